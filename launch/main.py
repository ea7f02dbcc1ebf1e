"""Trains, routes and scores an ensemble: `python launch/main.py --config=configs/soma_n4.py`.

Any field of the config can be overridden, as in `--config.expert.updates=500`; soma_jax/config.py
lists them. Stopped at any moment, the same command goes on; finished, it says so.

Several jobs share a workdir when each trains experts of its own (`--config.run.only=0,3`). Several
processes are one job by --cluster, or --coordinator, --processes and --process.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from soma_jax import cli, config

_CONFIG = config_flags.DEFINE_config_file(
    "config", str(Path(__file__).parent.parent / "configs" / "soma_n4.py"), "the run's settings"
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "where the run is kept [runs/NAME_OF_THE_CONFIG_FILE]"
)
_CLUSTER = flags.DEFINE_enum(
    "cluster", None, ["slurm", "ompi"], "whose variables say which process of a job this is"
)
_COORDINATOR = flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0 of this job")
_PROCESSES = flags.DEFINE_integer("processes", None, "how many this job has", lower_bound=1)
_PROCESS = flags.DEFINE_integer("process", None, "which one this is, from 0", lower_bound=0)


def main() -> None:
    resolved = config.resolve(_CONFIG.value)
    cli.use_host_devices(resolved.run.host_devices)
    cli.join(_CLUSTER.value, _COORDINATOR.value, _PROCESSES.value, _PROCESS.value)
    from soma_jax import recipe  # after the devices are set: it brings JAX programs
    from soma_jax.workdir import Workdir

    file = config_flags.get_config_filename(flags.FLAGS["config"])
    recipe.run(resolved, Workdir(cli.workdir(_WORKDIR.value, f"runs/{Path(file).stem}")))


if __name__ == "__main__":
    cli.run(main)
