"""Relative variance of the estimate of an ensemble's gradient (paper, Figs. 10 and 11, Appendix G).

python launch/experiment.py --experiment=gradient_variance [--size=paper]
"""

import dataclasses

import ml_collections

from soma_jax.config import Data, Model, Stage
from soma_jax.experiments.runs import FINEWEB


def get_config(size="cpu"):
    paper = size == "paper"
    short = Stage(
        updates=100, probe="rank_one", n_pert=64, sequences=1, own_batch=True, window=32,
        learning_rate=1e-2, eps=5e-3, head_sequences=32, validate_every=100,
    )  # fmt: skip
    stage = Stage(updates=10_000) if paper else short
    return ml_collections.ConfigDict(
        {
            "random_seed": 0,
            "model": dataclasses.asdict(Model()),
            "data": dataclasses.asdict(Data(**FINEWEB if paper else {})),
            "stage": dataclasses.asdict(stage),  # the short training
            "experts": (1, 2, 4, 8, 16, 32, 64, 128, 256) if paper else (1, 2, 4, 8),
            "n_pert": (1, 2, 4, 8, 16, 32, 64),
            "sequences": 64 if paper else 2,  # of the batch whose gradient is estimated
            "repeats": 64,  # draws of 64 directions
            "checked": 4,  # of them are done with finite differences, too
        }
    )
