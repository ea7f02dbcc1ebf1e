"""How to spend a budget of byte-forwards: shared batches or windows of a direction's own, and more.

python launch/experiment.py --experiment=allocation [--size=paper]

Each row is one expert's settings (soma_jax/config.py, Stage) on top of `base`; all rows spend the
same byte-forwards. `scratch` rows start from a drawn expert, `seed` rows from what `seed_row` has
reached with the same random seed.
"""

import dataclasses

import ml_collections

from soma_jax.config import Data, Stage
from soma_jax.experiments.runs import FINEWEB


def get_config(size="cpu"):
    paper = {"learning_rate": 2.5e-3, "eps": 2.5e-3}
    # The rate is the best of 2.5e-3, 5e-3, 1e-2 and 2e-2 on the validation text.
    high = {"learning_rate": 1e-2, "eps": 5e-3}
    own = high | {"own_batch": True, "decay_to": 0.05, "head_sequences": 32}
    one_each = own | {"n_pert": 256, "sequences": 1, "head_rate": 5.0}
    warm = one_each | {"probe": "rank_one", "head_rate": 0.2}
    scratch = {
        "paper (64, 64, 1024)": paper | {"sequences": 64, "window": 1024, "head_sequences": 64},
        "paper (64, 16, 128)": paper | {"sequences": 16, "head_sequences": 16},
        "shared, high rate": high | {"sequences": 4, "head_sequences": 4, "decay_to": 0.05},
        "own windows": own | {"sequences": 4, "head_rate": 5.0},
        "rank one, a window each": one_each | {"probe": "rank_one"},
    }
    seed = {
        "paper (64, 16, 128)": scratch["paper (64, 16, 128)"],
        "rank one, a window each": warm | {"learning_rate": 3e-3},
        "rank one, the rate of the whitened": warm,
        "rank one, whitened": warm | {"whitening": 0.01},
    }
    return ml_collections.ConfigDict(
        {
            "byte_forwards": 26e9 if size == "paper" else 26e6,  # of each run
            "random_seeds": (0, 1, 2),
            "data": dataclasses.asdict(Data(**FINEWEB if size == "paper" else {})),
            "base": dataclasses.asdict(Stage(n_pert=64, window=128, validate_every=1000)),
            "scratch": scratch,
            "seed": seed,
            "seed_row": "rank one, a window each",
            "variance_windows": 2048,  # the exact gradient is of as many windows
            "variance_repeats": 64,  # estimates that a measured variance is the mean of
        }
    )
