"""N, n_pert and B at fixed width (paper, Figs. 7 and 8).

python launch/experiment.py --experiment=scaling [--size=paper]
"""

import ml_collections

from soma_jax.experiments.runs import FINEWEB, both


def get_config(size="cpu"):
    if size == "paper":  # a step of one expert of width 32 takes 0.142 s there
        return ml_collections.ConfigDict(
            {
                "random_seeds": (0,),
                "operations": 2 * 64 * 64 * 1024 * 81920 * 18_000.0,
                "base": {"data": FINEWEB, "experts": 4, "seed_share": 0.05}
                | both(learning_rate=1e-3, eps=1e-3, head_sequences=16),
                "experts": (1, 2, 8, 32, 256),
                "n_pert": (16, 64, 256, 1024),
                "sequences": (16, 64, 256, 1024),
            }
        )
    stage = {
        "probe": "rank_one", "n_pert": 64, "sequences": 4, "own_batch": True, "window": 64,
        "learning_rate": 1e-2, "eps": 5e-3, "decay_to": 0.05, "head_sequences": 32,
        "validate_every": 1000,
    }  # fmt: skip
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0, 1, 2),
            "operations": 2.5e11,
            "base": {
                "experts": 1,
                "active": 1,
                "evaluation": {"wikitext": False, "bootstrap": 1000},
                "seed_share": 0.4,
            }
            | both(**stage),
            "experts": (1, 2, 4, 8),
            "n_pert": (32, 128, 512),
            "sequences": (1, 4, 16),
        }
    )
