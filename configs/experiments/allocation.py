"""How to spend a budget of byte-forwards: shared batches or windows of a direction's own, and more.

python launch/experiment.py --experiment=allocation

Each row is one expert's settings (soma_jax/config.py, Stage) on top of `base`; all rows spend the
same byte-forwards. `scratch` rows start from a drawn expert, `seed` rows from what `seed_row` has
reached with the same random seed.
"""

import dataclasses

import ml_collections

from soma_jax.config import Data, Stage


def get_config():
    paper = {"n_pert": 64, "eps": 2.5e-3, "learning_rate": 2.5e-3}
    # A rate for so few updates: the best of 2.5e-3, 5e-3, 1e-2 and 2e-2 on the validation text.
    few = {"n_pert": 64, "eps": 5e-3, "learning_rate": 1e-2}
    own = {"own_batch": True, "eps": 5e-3, "learning_rate": 1e-2, "decay_to": 0.05}
    scratch = {
        "paper (64, 64, 1024)": paper | {"sequences": 64, "window": 1024, "head_sequences": 64},
        "paper (64, 16, 128)": paper | {"sequences": 16, "head_sequences": 16},
        "shared, higher rate": few | {"sequences": 16, "head_sequences": 16},
        "shared, 4 sequences": few | {"sequences": 4, "head_sequences": 4, "decay_to": 0.05},
        "own windows": own | {"n_pert": 64, "sequences": 4, "head_sequences": 64},
        "own, E at 10 times the rate": own
        | {"n_pert": 64, "sequences": 4, "head_sequences": 64, "head_rate": 10.0},
        "own, one sequence": own | {"n_pert": 256, "head_sequences": 32, "head_rate": 10.0},
        "rank one, one sequence": own
        | {"n_pert": 256, "head_sequences": 32, "head_rate": 10.0, "probe": "rank_one"},
    }
    seed_rate = {"learning_rate": 5e-3}
    seed = {
        name: scratch[name] | seed_rate
        for name in ("shared, 4 sequences", "own, E at 10 times the rate", "own, one sequence")
    }
    seed = {"paper (64, 16, 128)": scratch["paper (64, 16, 128)"]} | seed
    return ml_collections.ConfigDict(
        {
            "byte_forwards": 26e6,  # of each run
            "random_seeds": (0, 1, 2),
            "data": dataclasses.asdict(Data()),
            "base": dataclasses.asdict(Stage(window=128, sequences=1, validate_every=1000)),
            "scratch": scratch,
            "seed": seed,
            "seed_row": "own, one sequence",
            "variance_windows": 2048,  # the exact gradient is of as many windows
        }
    )
