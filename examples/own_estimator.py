"""An estimator of your own beside the built-in ones, at equal compute.

python examples/own_estimator.py [--workdir=...] [--operations=2e11]

One-sided differences: each direction is compared with one clean forward. An update then takes
n_pert + 1 forwards in place of 2 n_pert; what curvature adds does not cancel.
"""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import optax
from absl import flags

from soma_jax import cli, probes
from soma_jax.backprop import BackpropState
from soma_jax.estimators import ESTIMATORS, Estimator
from soma_jax.experiments import equal_compute, runs

flags.DEFINE_string("workdir", "runs/own_estimator", "where runs are kept")
flags.DEFINE_float("operations", 2e11, "of each run")


def one_sided(stage, eps, factors, chunk, axis_name):
    # g = 1/n sum_j [L(theta + eps z_j) - L(theta)] / eps * z_j
    def update(updates, state, params, *, value_fn, key, batch=None, **extra):
        clean = value_fn(params, batch)

        def add(total, j):
            z = probes.LAWS[stage.probe](key, j, params)
            moved = jax.tree.map(lambda p, z: p + eps * z, params, z)
            slope = (value_fn(moved, batch) - clean).mean() / eps / stage.n_pert
            return jax.tree.map(lambda g, z: g + slope * z, total, z), None

        zero = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zero, jnp.arange(stage.n_pert))
        return total, BackpropState(clean.mean())

    return optax.GradientTransformationExtraArgs(lambda _: BackpropState(jnp.zeros(())), update)


def main() -> None:
    cli.use_host_devices(1)  # directions are not split: `axis_name` is None
    ESTIMATORS["one_sided"] = Estimator(one_sided, lambda s: (s.n_pert + 1) * s.sequences)
    values = runpy.run_path("configs/experiments/equal_compute.py")["get_config"]().to_dict()
    stage = {"probe": "sparse", "own_batch": False, "sequences": 4, "n_pert": 64}
    one = {"experts": 1, "active": 1, "evaluation": {"wikitext": False}, "expert": stage}
    values["base"] = runs.merged(values["base"], one)
    values["rows"] = {name: {"expert": {"estimator": name}} for name in ("spsa", "one_sided")}
    values["operations"] = flags.FLAGS.operations
    settings = equal_compute.resolve(ml_collections.ConfigDict(values))
    equal_compute.run(settings, Path(flags.FLAGS.workdir), "python examples/own_estimator.py")


if __name__ == "__main__":
    cli.run(main)
