"""Many experts on one mesh: FSO over its `expert` axis, DDPP over its `probe` axis (paper, 3).

Experts exchange nothing, so the program of an update that is sharded over `expert` alone has no
collective. When there are more devices than experts, the rest split each expert's directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from soma_jax import distributed, expert
from soma_jax.config import Stage
from soma_jax.errors import SomaError


def make_mesh(experts: int, stage: Stage, devices: list[Any] | None = None) -> Mesh:
    """Axes (expert, probe): as many devices over experts as divide them, the rest over directions.

    A device is left out rather than given an uneven part: results do not depend on placement.
    """
    devices = jax.devices() if devices is None else devices
    over_experts = max(n for n in range(1, len(devices) + 1) if experts % n == 0)
    over_probes = max(
        n
        for n in range(1, len(devices) // over_experts + 1)
        if stage.n_pert % n == 0 and stage.head_sequences % n == 0
    )
    used = np.array(devices[: over_experts * over_probes]).reshape(over_experts, over_probes)
    return Mesh(used, ("expert", "probe"), axis_types=(AxisType.Auto, AxisType.Auto))


def stack(states: list[expert.ExpertState]) -> expert.ExpertState:
    """Experts' states stacked on a leading axis."""
    return jax.tree.map(lambda *x: np.stack(jax.device_get(x)), *states)


def unstack(states: expert.ExpertState) -> list[expert.ExpertState]:
    """The inverse of `stack`, on the host (of every process)."""
    states = distributed.fetch(states)
    count = states.update.shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], states) for i in range(count)]


class Ensemble:
    """The compiled update and validation of N stacked experts on a mesh.

    Raises:
      SomaError: a process has none of the mesh's devices.
    """

    def __init__(self, mesh: Mesh, stage: Stage, *, chunk: int = 0):
        here = {device.process_index for device in mesh.devices.flat}
        if idle := set(range(jax.process_count())) - here:
            raise SomaError(
                f"process {min(idle)} of {jax.process_count()} would have nothing to do: the "
                f"experts, their {stage.n_pert} directions and {stage.head_sequences} windows of "
                f"the head are shared evenly, by {mesh.size} devices here. Use fewer processes"
            )
        axis_name = "probe" if mesh.shape["probe"] > 1 else None
        by_expert, by_probe = P("expert"), P("expert", axis_name)
        batch_spec = expert.Batch(
            probes=by_probe if stage.own_batch else by_expert,
            head=by_probe,
            streams=by_expert if stage.carry else None,
        )
        self._placements = [
            jax.tree.map(lambda spec: NamedSharding(mesh, spec), s)
            for s in (by_expert, batch_spec, by_expert)
        ]

        def one_update(expert_of: tuple) -> Any:
            state, batch, key = expert_of
            return expert.update(state, batch, key, stage, chunk=chunk, axis_name=axis_name)

        def one_validation(expert_of: tuple) -> Any:
            state, windows = expert_of
            return expert.validate(state, windows, stage)

        def local(one: Callable) -> Callable:
            # One expert after the other: on a CPU the working set then stays in cache.
            return lambda *experts: lax.map(one, experts)

        def sharded(function: Callable, in_specs: tuple) -> Any:
            # check_vma: an LSTM's zero state is the same on every device, its inputs are not.
            return jax.jit(
                jax.shard_map(
                    function, mesh=mesh, in_specs=in_specs, out_specs=by_expert, check_vma=False
                ),
                donate_argnums=0,
            )

        self.update = sharded(local(one_update), (by_expert, batch_spec, by_expert))
        """(states [N, ...], Batch [N, ...], keys [N]) -> (states, losses [N])."""
        self.validate = sharded(local(one_validation), (by_expert, by_expert))
        """(states [N, ...], windows [N, W, T + 1]) -> (states, losses [N])."""

    def exchanged_bytes(self, *arguments: Any) -> int:
        """What each device gives to the others in an update of one expert, in bytes: the operands
        of its sums. `arguments` are those of `update`."""
        return _summed_bytes(self.update.trace(*arguments).jaxpr)

    def place(self, states: Any) -> Any:
        """Puts stacked states, keys or validation windows on their devices."""
        return distributed.place(states, self._placements[0])

    def place_batch(self, batch: expert.Batch) -> expert.Batch:
        """Puts a stacked batch on its devices."""
        return distributed.place(batch, self._placements[1])


def _summed_bytes(jaxpr: Any) -> int:
    result = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("psum"):
            result += sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars)
        has_equations = lambda x: hasattr(x, "eqns")  # noqa: E731
        inner = jax.tree.leaves(list(equation.params.values()), is_leaf=has_equations)
        result += sum(_summed_bytes(x) for x in inner if has_equations(x))
    return result
