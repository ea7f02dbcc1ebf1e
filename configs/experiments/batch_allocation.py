"""How to split K = n_pert B windows between directions and batch (paper, App. F.1, G.2, M.2).

python launch/experiment.py --experiment=batch_allocation [--size=paper]
"""

import dataclasses

import ml_collections

from soma_jax.config import Data, Stage
from soma_jax.experiments.runs import FINEWEB


def get_config(size="cpu"):
    paper = size == "paper"
    training = Stage(updates=1000, learning_rate=2.5e-3, eps=2.5e-3, head_sequences=64)
    check = Stage(updates=512)
    if not paper:  # the seed of configs/soma_n4.py, for a shorter time
        training = Stage(
            updates=120, probe="rank_one", n_pert=256, sequences=1, own_batch=True, window=128,
            decay_to=0.02, learning_rate=1e-2, eps=5e-3, head_sequences=32, head_rate=5.0,
            validate_every=1000,
        )  # fmt: skip
        check = Stage(updates=200, window=64, validate_every=1000)
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0, 1, 2),
            "data": dataclasses.asdict(Data(**FINEWEB if paper else {})),
            # Of few parameters, so that B* is inside the grid; and the paper's expert.
            "widths": (4, 32),
            "budgets": ((4096, 65536), (4096, 65536)) if paper else ((64, 512), (16, 128)),
            "sequences": (1, 16, 256, 4096) if paper else (1, 8, 64, 512),
            "training": dataclasses.asdict(training),
            # A radius so small that the loss is as good as linear, as the theory has it.
            "measuring": dataclasses.asdict(
                Stage(probe="dense", eps=1e-4, window=1024 if paper else 32)
            ),
            "check": dataclasses.asdict(check),
            "allocations": (
                ((64, 1024), (256, 256), (1024, 64)) if paper else ((4, 64), (16, 16), (64, 4))
            ),
            "windows": 1024 if paper else 256,  # the exact gradient is of as many
            "repeats": 64 if paper else 256,  # estimates that a variance is the mean of
        }
    )
