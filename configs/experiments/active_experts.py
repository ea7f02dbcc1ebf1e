"""Loss against k, the number of active experts (paper, Fig. 16).

python launch/experiment.py --experiment=active_experts [--size=paper]
"""

import ml_collections

from soma_jax.experiments.runs import FINEWEB


def get_config(size="cpu"):
    if size == "paper":
        return ml_collections.ConfigDict(
            {
                "random_seeds": (0,),
                "operations": 256 * 18_000 * 2 * 64 * 64 * 1024 * 81920.0,
                "base": {"data": FINEWEB, "experts": 256, "active": 12, "seed_share": 0.01},
                "rows": {"SOMA, N = 256": {}},
            }
        )
    stage = {
        "probe": "rank_one", "n_pert": 128, "sequences": 1, "own_batch": True, "window": 128,
        "learning_rate": 1e-2, "eps": 5e-3, "decay_to": 0.05, "head_sequences": 32,
        "validate_every": 1000,
    }  # fmt: skip
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0, 1, 2),
            "operations": 2.4e12,
            "base": {
                "experts": 8,
                "active": 8,
                "evaluation": {"wikitext": False, "bootstrap": 1000},
                "seed_share": 0.35,
                "seed": stage | {"head_rate": 5.0},
                "expert": stage | {"head_rate": 0.2, "whitening": 0.01},
            },
            "rows": {"SOMA, N = 8": {}},
        }
    )
