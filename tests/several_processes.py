"""One of several processes that train together: a program that tests/test_distributed.py starts.

python tests/several_processes.py DIRECTORY [--coordinator=... --processes=... --process=...]
"""

import dataclasses
import sys
from pathlib import Path

from absl import flags

from soma_jax import cli, training
from soma_jax.config import Run, Stage
from soma_jax.interrupt import Interruptions

STAGE = Stage(
    updates=50,
    n_pert=8,
    sequences=4,
    window=8,
    head_sequences=4,
    # Large, so that the last bit of a loss does not become 1e-4 of a finite difference.
    eps=0.1,
    validate_every=10,
    patience=20,
    validation_windows=2,
)
CASES = {  # experts, and how they are trained
    "losses": (1, STAGE),  # of 16 losses and 1,896 coordinates, the losses are exchanged
    "estimates": (1, dataclasses.replace(STAGE, n_pert=1024, updates=5)),
    "experts": (2, dataclasses.replace(STAGE, own_batch=True, probe="rank_one", whitening=0.1)),
}


def train(directory: Path) -> None:
    from test_training import make_trainee  # its experts and their streams

    for name, (experts, stage) in CASES.items():
        trainees = [make_trainee(directory / name, i, stage=stage) for i in range(experts)]
        with Interruptions() as interruptions:
            training.train(name, trainees, stage, Run(host_devices=1), interruptions)


def main() -> None:
    f = flags.FLAGS
    cli.use_host_devices(1)
    cli.join(f.cluster, f.coordinator, f.processes, f.process)
    train(Path(f.into))


if __name__ == "__main__":
    flags.DEFINE_string("into", None, "where the experts are kept")
    flags.DEFINE_string("cluster", None, "")
    flags.DEFINE_string("coordinator", None, "")
    flags.DEFINE_integer("processes", None, "")
    flags.DEFINE_integer("process", None, "")
    sys.path.insert(0, str(Path(__file__).parent))
    cli.run(main)
