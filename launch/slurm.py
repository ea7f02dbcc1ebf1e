"""Trains an ensemble on a Slurm cluster: `python launch/slurm.py --workdir=/shared/run --jobs=8`.

Experts never wait for each other, so each job takes some of them and is an ordinary
`launch/main.py --config.run.only=...` in a workdir that all nodes see. The first job to start makes
the corpora, the clusters and the seed while the others wait; the last one to end scores the
ensemble. `--nodes` and `--tasks_per_node` give a job more processes, which share its experts'
directions. A job that Slurm takes off its nodes saves, and goes on when it is put back; the same
command submits what is not finished once more.

Needs: pip install "soma_jax[slurm]". What jobs print is in WORKDIR.slurm/.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from ml_collections import config_flags

from soma_jax import cli, config
from soma_jax.errors import SomaError

_CONFIG = config_flags.DEFINE_config_file(
    "config", str(Path(__file__).parent.parent / "configs" / "soma_n4.py"), "the run's settings"
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "where the run is kept, seen by all nodes", required=True
)
_JOBS = flags.DEFINE_integer("jobs", 1, "how many, each with its part of the experts", 1)
_NODES = flags.DEFINE_integer("nodes", 1, "of a job", 1)
_TASKS = flags.DEFINE_integer("tasks_per_node", 1, "processes of a job on each node", 1)
_CPUS = flags.DEFINE_integer("cpus_per_task", None, "cores of a process [the cluster's default]", 1)
_GPUS = flags.DEFINE_integer("gpus_per_node", None, "of a job [the cluster's default]", 1)
_MINUTES = flags.DEFINE_integer("minutes", 24 * 60, "after which Slurm ends a job", 1)
_PARTITION = flags.DEFINE_string("partition", None, "of the cluster [its default]")


def main() -> None:
    try:
        from submitit import SlurmExecutor
        from submitit.helpers import Checkpointable, CommandFunction
    except ImportError:
        raise SomaError('launch/slurm.py needs: pip install "soma_jax[slurm]"') from None

    class Training(CommandFunction, Checkpointable):
        """A command that is put back into the queue, as it is, when its time is over."""

    workdir = cli.workdir(_WORKDIR.value, "").absolute()
    parts = [p.tolist() for p in np.array_split(config.resolve(_CONFIG.value).chosen, _JOBS.value)]
    trainings = [Training(_command(workdir, part), cwd=Path.cwd()) for part in parts if part]
    wanted = {
        "job_name": workdir.name,
        "nodes": _NODES.value,
        "ntasks_per_node": _TASKS.value,
        "cpus_per_task": _CPUS.value,
        "gpus_per_node": _GPUS.value,
        "time": _MINUTES.value,
        "partition": _PARTITION.value,
        "array_parallelism": len(trainings),
    }
    try:
        executor = SlurmExecutor(f"{workdir}.slurm")
        executor.update_parameters(**{name: x for name, x in wanted.items() if x is not None})
        with executor.batch():
            jobs = [executor.submit(training) for training in trainings]
    except Exception as error:  # no Slurm here, or sbatch refuses: a class for each
        raise SomaError(f"Slurm takes no jobs from here: {error}") from error
    for job, part in zip(jobs, filter(None, parts), strict=True):
        print(f"job {job.job_id}: experts {', '.join(map(str, part))}")
    print(f"what they print: {workdir}.slurm")


def _command(workdir: Path, experts: list[int]) -> list[str]:
    """The command of a job's processes."""
    overrides: dict[str, Any] = dict(config_flags.get_override_values(flags.FLAGS["config"]))
    overrides["run.only"] = ",".join(map(str, experts))
    line = [
        sys.executable,
        str(Path(__file__).with_name("main.py")),
        f"--config={config_flags.get_config_filename(flags.FLAGS['config'])}",
        f"--workdir={workdir}",
        *(["--cluster=slurm"] if _NODES.value * _TASKS.value > 1 else []),
        *(f"--config.{name}={value}" for name, value in overrides.items()),
    ]
    # USR2 is Slurm's word to submitit that time is nearly over; ours is the TERM that follows.
    return ["sh", "-c", f"trap '' USR2; exec {shlex.join(line)}"]


if __name__ == "__main__":
    cli.run(main)
