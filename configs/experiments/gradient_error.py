"""Error of the estimate and seconds of a step, for N experts of one total size (paper, Fig. 5).

python launch/experiment.py --experiment=gradient_error [--size=paper]
"""

import dataclasses

import ml_collections

from soma_jax.config import Stage
from soma_jax.experiments.runs import FINEWEB, both


def get_config(size="cpu"):
    if size == "paper":
        return ml_collections.ConfigDict(
            {
                "experts": (1, 2, 8),
                "widths": (509, 361, 181),  # 8.4M parameters in all
                "n_pert": (64, 256, 1024),
                "recipe": {"data": FINEWEB}
                | both(updates=1000, learning_rate=2.5e-3, eps=2.5e-3, head_sequences=64),
                "step": dataclasses.asdict(Stage(probe="dense", eps=1e-4)),
                "windows": 4096,
                "repeats": 16,
                "timed_steps": 7,
            }
        )
    training = {
        "probe": "rank_one", "n_pert": 256, "sequences": 1, "own_batch": True, "window": 128,
        "learning_rate": 1e-2, "eps": 5e-3, "decay_to": 0.05, "validate_every": 1000,
    }  # fmt: skip
    return ml_collections.ConfigDict(
        {
            "experts": (1, 2, 4, 8),
            "widths": (33, 23, 16, 11),  # 37 thousand parameters in all, within 0.4%
            "n_pert": (16, 64, 256),
            # The seed of configs/soma_n4.py for a shorter time; then E is frozen, and one for all.
            "recipe": {
                "seed": training | {"updates": 100, "head_sequences": 32, "head_rate": 5.0},
                "expert": training | {"updates": 20, "learning_rate": 3e-3},
                "evaluation": {"wikitext": False, "bootstrap": 100, "documents": 64},
            },
            # A radius so small that the loss is as good as linear, as the prediction has it.
            "step": dataclasses.asdict(Stage(probe="dense", eps=1e-4, sequences=4, window=64)),
            "windows": 512,  # of each shard that the exact gradient is of
            "repeats": 24,  # estimates that an error is the mean of
            "timed_steps": 7,  # that the seconds are the median of
        }
    )
