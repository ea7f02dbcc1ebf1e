"""Which (N, n_pert, B) to train for a deadline or a budget, from short runs of a few of them.

python launch/experiment.py --experiment=plan

Every run spends the same operations, its seed included, at one width and a constant rate: the
curve of a run whose rate falls to its end is not that of a longer one.
"""

import ml_collections

from soma_jax.experiments.runs import FINEWEB, both


def get_config(size="cpu"):
    if size == "paper":  # an update of n_pert = B = 64 takes 0.142 s there
        return ml_collections.ConfigDict(
            {
                "random_seeds": (0,),
                "operations": 2 * 64 * 64 * 1024 * 81920 * 16_000.0,
                "base": {"data": FINEWEB, "seed_share": 0.06} | both(learning_rate=1e-3, eps=1e-3),
                "grid": (
                    *((1, 64, 64), (1, 256, 64), (1, 64, 256)),
                    *((2, 64, 64), (8, 64, 64), (32, 64, 16)),
                ),
                "devices": 8,
                "deadlines": (600.0, 3600.0, 6 * 3600.0, 24 * 3600.0),
                "budgets": (1e16, 1e17, 1e18),
            }
        )
    stage = {
        "probe": "rank_one", "n_pert": 256, "sequences": 1, "own_batch": True, "window": 64,
        "learning_rate": 5e-3, "eps": 5e-3, "head_sequences": 16, "validate_every": 1000,
    }  # fmt: skip
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0,),
            "operations": 1.6e12,  # of each run
            "base": {
                "evaluation": {"wikitext": False, "bootstrap": 1000},
                # Every update is timed, so that the few between which the ensemble is scored do
                # not matter to the median.
                "run": {"log_every": 1},
                "seed_share": 0.15,
            }
            | both(**stage),
            "grid": (
                *((1, 64, 1), (1, 256, 1), (1, 64, 4)),  # N, n_pert, B
                *((2, 256, 1), (4, 64, 1), (4, 256, 1)),
            ),
            "devices": 2,  # that are planned for; each has one expert at a time
            "deadlines": (10.0, 30.0, 100.0, 300.0),  # wall-clock seconds
            "budgets": (3e11, 1e12, 3e12, 1e13),  # operations
        }
    )
