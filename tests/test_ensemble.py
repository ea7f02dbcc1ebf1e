import dataclasses
import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soma_jax import ensemble, expert, model, randomness
from soma_jax.config import Stage

SHAPE = model.ExpertConfig(width=4, blocks=1, embedding=4)
# eps is large so that the last bit of a loss does not become 1e-4 of a finite difference.
STAGE = Stage(updates=9, n_pert=4, sequences=2, window=4, head_sequences=2, eps=0.1, whitening=0.1)
OWN = dataclasses.replace(STAGE, n_pert=2, own_batch=True, probe="rank_one")
FROZEN = dataclasses.replace(OWN, head_sequences=0, whitening=0.0, probe="sparse")
MANY = dataclasses.replace(FROZEN, n_pert=512)  # more losses than coordinates
# Directions 0 and 1 see the first stream, 2 and 3 the second; E is perturbed, too.
EGGROLL = dataclasses.replace(
    FROZEN, estimator="eggroll", parameters="all", n_pert=4, share=2, carry=True, rank=2
)
BPTT = dataclasses.replace(STAGE, estimator="backprop", n_pert=1, whitening=0.0)
UPDATES = 3


@functools.cache
def start(index: int, stage: Stage) -> expert.ExpertState:
    rng = np.random.default_rng(index)
    shapes = jax.eval_shape(lambda key: model.init(key, SHAPE), jax.random.key(0))
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(x.ndim == 1, 0.5, x.shape), x.dtype), shapes
    )
    return expert.init_state(params, stage)


def windows(index: int, update: int, stage: Stage) -> np.ndarray:
    rng = np.random.default_rng((index, update))
    return rng.integers(256, size=(stage.windows_per_update, 5), dtype=np.uint8)


def keys(count: int):
    return jnp.stack([randomness.key(0, "probes", i) for i in range(count)])


@functools.cache
def compiled(experts: int, devices: int, stage: Stage, processes: int = 1):
    """The ensemble, and its update as an executable (compiled once for all tests); with several
    `processes` the program that these would run, on devices of this one."""
    mesh = ensemble.make_mesh(experts, stage, jax.devices()[:devices])
    together: Any = ensemble.Ensemble(mesh, stage)
    placed = arguments(together, experts, 0, stage)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: processes)
        return together, together.update.lower(*placed).compile()


def arguments(together, experts: int, update: int, stage: Stage, states=None):
    if states is None:
        states = ensemble.stack([start(i, stage) for i in range(experts)])
    drawn = np.stack([windows(i, update, stage) for i in range(experts)])
    batch = expert.split_batch(drawn, stage)
    return together.place(states), together.place_batch(batch), together.place(keys(experts))


def train(experts: int, devices: int, stage: Stage = STAGE, poisoned=None, processes: int = 1):
    """Each expert's state after three updates, and the losses [updates, experts]."""
    together, update = compiled(experts, devices, stage, processes)
    begin = [start(i, stage) for i in range(experts)]
    if poisoned is not None:
        begin[poisoned] = poison(begin[poisoned])
    states, losses = ensemble.stack(begin), []
    for i in range(UPDATES):
        states, loss = update(*arguments(together, experts, i, stage, states))
        losses.append(np.asarray(loss))
    return ensemble.unstack(states), np.stack(losses)


def poison(state):
    body = state.params["body"] | {"final_gain": jnp.full(4, 3e38, jnp.float32)}
    return state.replace(params=state.params | {"body": body})


@functools.cache
def train_alone(index: int, stage: Stage = STAGE):
    state, losses = start(index, stage), []
    for i in range(UPDATES):
        batch = expert.split_batch(windows(index, i, stage), stage)
        state, loss = alone(stage)(state, batch, randomness.key(0, "probes", index))
        losses.append(float(loss))
    return state, losses


@functools.cache
def alone(stage: Stage):
    return jax.jit(lambda state, batch, key: expert.update(state, batch, key, stage))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("experts", "devices", "stage"),
    [
        *(
            (4, 1, STAGE),
            (4, 2, STAGE),
            (4, 4, STAGE),
            (3, 2, STAGE),
            (1, 2, OWN),
            (1, 2, FROZEN),
        ),
        *((2, 2, EGGROLL), (1, 2, EGGROLL), (1, 4, EGGROLL), (2, 4, BPTT)),
    ],
)
def test_an_expert_is_alone_wherever_it_is_placed(experts, devices, stage):
    """FSO on 1, 2 and 4 devices, DDPP on 2 (shared batch; own batches and E frozen), and alone."""
    states, losses = train(experts, devices, stage)
    for i, state in enumerate(states):
        expected, expected_losses = train_alone(i, stage)
        assert int(state.update) == UPDATES
        moved = np.abs(flat(state.params["body"]) - flat(start(i, stage).params["body"]))
        assert np.median(moved) > 1e-4
        np.testing.assert_allclose(flat(state.params), flat(expected.params), atol=1e-6)
        np.testing.assert_allclose(losses[:, i], expected_losses, rtol=1e-5)


def test_a_failed_expert_stops_and_the_others_go_on_as_without_it():
    states, losses = train(4, 2, poisoned=1)
    np.testing.assert_array_equal([int(s.failed) for s in states], [-1, 0, -1, -1])
    np.testing.assert_array_equal([int(s.update) for s in states], [3, 0, 3, 3])
    np.testing.assert_array_equal(flat(states[1].params), flat(poison(start(1, STAGE)).params))
    assert np.isnan(losses[:, 1]).all()
    expected, expected_losses = train(4, 2)
    for i in (0, 2, 3):
        np.testing.assert_array_equal(flat(states[i]), flat(expected[i]))
        np.testing.assert_array_equal(losses[:, i], expected_losses[:, i])


def collectives(executable) -> list[str]:
    """The communication in a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-\\w+|ragged-\\w+|send|recv"
    return re.findall(rf"\b({kinds})(?:-start)?\(", executable.as_text())


def test_fso_communicates_nothing_and_ddpp_sums_alone():
    assert collectives(compiled(4, 4, STAGE)[1]) == []
    assert collectives(compiled(4, 2, STAGE)[1]) == []
    # One of what the unperturbed forward gives, one of the estimate: several could deadlock.
    assert collectives(compiled(3, 2, STAGE)[1]) == ["all-reduce"] * 2
    assert collectives(compiled(1, 2, EGGROLL)[1]) == ["all-reduce"]
    assert collectives(compiled(2, 4, BPTT)[1]) == []


def summed_bytes(executable) -> int:
    """The operands of a compiled program's sums, by its text."""
    sums = re.findall(r"= (.*?) all-reduce\(", executable.as_text())
    sizes = [shape for some in sums for shape in re.findall(r"f32\[([\d,]*)\]", some)]
    return sum(4 * math.prod(int(n) for n in shape.split(",") if n) for shape in sizes)


BODY = 16 * 4 * 4 + 3 * 4  # coordinates


@pytest.mark.parametrize(
    ("stage", "processes", "floats"),
    [
        (FROZEN, 1, 2 * 2 + BODY),  # the estimate, and the losses to log
        (FROZEN, 2, 2 * 2),  # the losses alone
        (MANY, 2, 2 * 512 + BODY),  # more losses than coordinates
        (dataclasses.replace(OWN, whitening=0.0), 2, 2 * 2 + 256 * 4),  # and the gradient of E
        (EGGROLL, 2, None),
    ],
)
def test_the_bytes_of_an_update_are_those_of_its_sums(stage, processes, floats):
    together, executable = compiled(1, 2, stage, processes)
    found = together.exchanged_bytes(*arguments(together, 1, 0, stage))
    assert found == summed_bytes(executable)
    assert floats is None or found == 4 * floats


def test_what_processes_exchange_gives_the_same_update():
    """Losses exchanged, and directions made again: bit for bit what one device computes."""
    (state,), losses = train(1, 2, FROZEN, processes=2)
    (expected,), expected_losses = train(1, 1, FROZEN)
    np.testing.assert_array_equal(flat(state), flat(expected))
    np.testing.assert_array_equal(losses, expected_losses)


def test_experts_apart_send_nothing():
    together, _ = compiled(4, 2, STAGE)
    assert together.exchanged_bytes(*arguments(together, 4, 0, STAGE)) == 0


def test_validation_is_each_experts_own():
    together, _ = compiled(4, 2, STAGE)
    states = [start(i, STAGE) for i in range(4)]
    held_out = np.stack([windows(i, 99, STAGE) for i in range(4)])
    placed = together.place(ensemble.stack(states)), together.place(held_out)
    lowered = together.validate.lower(*placed).compile()
    assert collectives(lowered) == []
    after, losses = lowered(*placed)
    expected = [
        model.sequence_losses(s.params, w).mean() for s, w in zip(states, held_out, strict=True)
    ]
    np.testing.assert_allclose(losses, np.stack(expected), rtol=1e-6)
    for state, loss in zip(ensemble.unstack(after), losses, strict=True):
        assert float(state.plateau.best_value) == float(loss)


@pytest.mark.parametrize("devices", [1, 2])
def test_states_on_the_host_do_not_change_with_the_ones_on_devices(devices):
    """The update's inputs are donated; what was stacked before or unstacked after is a copy."""
    together, update = compiled(4, devices, STAGE)
    before = ensemble.stack([start(i, STAGE) for i in range(4)])
    states, _ = update(*arguments(together, 4, 0, STAGE, before))
    after = ensemble.unstack(states)
    kept = [flat(before).copy(), flat(after).copy()]
    update(*arguments(together, 4, 1, STAGE, states))
    np.testing.assert_array_equal(flat(before), kept[0])
    np.testing.assert_array_equal(flat(after), kept[1])


def test_stack_and_unstack_are_inverse():
    states = [start(i, STAGE) for i in range(3)]
    stacked = ensemble.stack(states)
    assert {x.shape[0] for x in jax.tree.leaves(stacked)} == {3}
    back = ensemble.unstack(stacked)
    assert len(back) == 3
    for state, original in zip(back, states, strict=True):
        jax.tree.map(np.testing.assert_array_equal, state, original)


@pytest.mark.parametrize(
    ("experts", "devices", "n_pert", "head_sequences", "axes"),
    [
        (4, 1, 64, 0, (1, 1)),
        (4, 4, 64, 0, (4, 1)),
        (6, 4, 64, 0, (3, 1)),
        (1, 4, 64, 0, (1, 4)),
        (2, 4, 64, 0, (2, 2)),
        (3, 2, 64, 0, (1, 2)),
        (1, 3, 64, 0, (1, 2)),  # 64 directions do not split in three
        (1, 4, 64, 6, (1, 2)),  # nor six windows in four
        (5, 3, 5, 0, (1, 1)),
        (256, 4, 64, 0, (4, 1)),
    ],
)
def test_mesh_gives_experts_devices_first_and_directions_the_rest(
    experts, devices, n_pert, head_sequences, axes
):
    stage = dataclasses.replace(STAGE, n_pert=n_pert, head_sequences=head_sequences)
    mesh = ensemble.make_mesh(experts, stage, jax.devices()[:devices])
    assert mesh.axis_names == ("expert", "probe")
    assert mesh.devices.shape == axes


def test_mesh_takes_all_devices_unless_told():
    assert ensemble.make_mesh(4, STAGE).devices.shape == (4, 1)


# Run by itself: devices are made once in a process, and the other tests have four.
_ON_EIGHT = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import test_ensemble as t
t.UPDATES = 50
one = t.train(4, 1)[0]
for devices in (2, 3, 4, 8):
    mesh = t.ensemble.make_mesh(4, t.STAGE, jax.devices()[:devices])
    states = t.train(4, devices)[0]
    off = max(np.abs(t.flat(a.params) - t.flat(b.params)).max() for a, b in zip(states, one))
    print(devices, *mesh.devices.shape, off, *t.collectives(t.compiled(4, devices, t.STAGE)[1]))
print("moved", min(np.abs(t.flat(a.params) - t.flat(t.start(i, t.STAGE).params)).max()
                   for i, a in enumerate(one)))
"""


@pytest.mark.slow
def test_four_experts_on_one_to_eight_devices_are_equal_after_fifty_updates():
    """The same to 1e-6, devices that do not divide them included; FSO without a collective."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _ON_EIGHT],
        env=os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{here.parent}"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    *lines, (_, moved) = [line.split() for line in done.stdout.splitlines()]
    assert float(moved) > 1e-2
    assert [line[:3] for line in lines] == [list(x) for x in ("221", "321", "441", "842")]
    assert max(float(line[3]) for line in lines) < 1e-6
    assert [len(line[4:]) for line in lines] == [0, 0, 0, 2]
