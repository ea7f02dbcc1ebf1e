"""Shards, starts and the training of E, by backpropagation (paper, Fig. 9).

python launch/experiment.py --experiment=sharding_ablation [--size=paper]
"""

import ml_collections

from soma_jax.experiments.runs import FINEWEB, both


def get_config(size="cpu"):
    paper = size == "paper"
    stage = {"estimator": "backprop", "parameters": "all", "head_sequences": 0, "n_pert": 1}
    stage |= {"sequences": 512, "window": 1024} if paper else {"sequences": 16, "window": 128}
    if not paper:
        stage |= {"learning_rate": 5e-3, "decay_to": 0.05, "validate_every": 1000}
    experts, routed = (32, 4) if paper else (4, 2)
    warm = {"seed_share": 0.3}
    cold = {"warm_start": False}
    unrouted = {"active": experts}  # where no expert is of a window's kind
    by_decoder = both(parameters="body", head_sequences=stage["sequences"])
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0, 1, 2),
            "operations": 3 * 81920 * (32e9 if paper else 4e6),
            "base": {
                "experts": experts,
                "active": routed,
                "data": FINEWEB if paper else {},
                "evaluation": {"wikitext": paper, "bootstrap": 2000},
            }
            | both(**stage),
            "rows": {
                "semantic shards": warm,
                "random shards": warm | unrouted | {"cluster": {"shards": "random"}},
                "IID data": warm | unrouted | {"cluster": {"shards": "iid"}},
                "cold start": cold,
                "cold start, E by its decoder's path": cold | by_decoder,
                "cold start, E frozen": cold | both(parameters="body"),
            },
        }
    )
