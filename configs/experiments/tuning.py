"""The rate, then the probe radius, by validation alone (paper, Tables 6 and 7).

python launch/experiment.py --experiment=tuning [--size=paper]
"""

import ml_collections

from soma_jax.experiments.runs import FINEWEB, both


def get_config(size="cpu"):
    paper = size == "paper"
    stage = {
        "probe": "rank_one", "n_pert": 256, "sequences": 1, "own_batch": True, "window": 128,
        "decay_to": 0.05, "head_sequences": 32, "validate_every": 1000,
    }  # fmt: skip
    width = {1: 509, 2: 361} if paper else {1: 69, 2: 47}
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0, 1, 2),
            # The paper: 149 to 151 updates of the monolith.
            "operations": 2 * 64 * 64 * 1024 * 16.9e6 * 150 if paper else 2.5e11,
            "base": {"data": FINEWEB} | both(head_sequences=64)
            if paper
            else {"evaluation": {"wikitext": False, "bootstrap": 1000}} | both(**stage),
            "systems": {
                "monolith": {"experts": 1, "active": 1, "model": {"width": width[1]}},
                "SOMA, N = 2": {
                    "experts": 2,
                    "active": 2,
                    "model": {"width": width[2]},
                    "seed_share": 0.3,
                },
            },
            "learning_rates": (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2),
            "radii": (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2),
            "eps": 2.5e-3 if paper else 5e-3,
        }
    )
