"""Estimators of the gradient beside each other and backpropagation: docs/estimators.md.

python launch/experiment.py --experiment=estimators [--size=paper]
"""

import dataclasses

import ml_collections

from soma_jax.config import Data, Stage
from soma_jax.experiments.runs import FINEWEB, both


def get_config(size="cpu"):
    paper = size == "paper"
    shared = {"n_pert": 64, "sequences": 16 if not paper else 64, "learning_rate": 2.5e-3}
    rank_one = {
        "probe": "rank_one", "n_pert": 256, "sequences": 1, "own_batch": True,
        "learning_rate": 1e-2, "eps": 5e-3,
    }  # fmt: skip
    activity = {"eps": 0.1, "weight_decay": 0.0, "learning_rate": 1e-2}
    node = activity | {"estimator": "node_perturbation", "n_pert": 32, "sequences": 32}
    feedback = activity | {"estimator": "feedback", "n_pert": 8, "sequences": 32}
    backprop = {"estimator": "backprop", "n_pert": 1, "sequences": 32, "learning_rate": 1e-2}
    schedule = {"window": 1024 if paper else 128, "decay_to": 0.02, "validate_every": 1000}
    by_readout = {"parameters": "all", "head_sequences": 0}
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0, 1, 2),
            "data": dataclasses.asdict(Data(**FINEWEB if paper else {})),
            "training": dataclasses.asdict(
                Stage(
                    estimator="backprop", parameters="all", n_pert=1, sequences=32, window=128,
                    learning_rate=5e-3, validate_every=1000,
                )
            ),
            "starts": (0, 100, 1000),
            "estimates": {
                "SPSA, shared batch": shared | {"n_pert": 4, "eps": 1e-3},
                "SPSA, a window each": rank_one | {"n_pert": 64, "probe": "dense"},
                "SPSA, rank one, a window each": rank_one | {"n_pert": 64},
                **{
                    f"node perturbation, K = {credit}": node | {"credit": credit}
                    for credit in (1, 2, 4, 8, 128)
                },
                **{
                    f"feedback, K = {credit}": feedback | {"credit": credit}
                    for credit in (1, 4, 8, 16)
                },
                "backpropagation": backprop,
            },
            "window": 128,
            "windows": 256,
            "repeats": 16,
            "warm": 20,
            "base": {
                "experts": 1,
                "active": 1,
                "evaluation": {"wikitext": paper, "bootstrap": 1000},
            }
            | both(**schedule),
            "rows": {
                "SPSA, the paper's allocation": both(**shared, head_sequences=16),
                "SPSA, rank one, a window each": both(**rank_one, head_sequences=32, head_rate=5.0),
                "node perturbation, K = 2": both(**node, credit=2, **by_readout),
                "feedback, K = 8": both(**feedback, credit=8, **by_readout),
                "backpropagation": both(**backprop, **by_readout, weight_decay=0.0),
            },
            # Of a row, from scratch: 26M byte-forwards.
            "operations": 81920 * (26e9 if paper else 26e6),
        }
    )  # fmt: skip
