"""Systems at one total size and one budget of operations (paper, Fig. 1, Tables 4 and 9).

python launch/experiment.py --experiment=equal_compute [--size=paper]

A row sets fields of a config of launch/main.py (soma_jax/config.py); `updates` follow from the
budget. `seed_share` is the part of it that a row's seed gets.
"""

import ml_collections

from soma_jax.experiments.runs import FINEWEB, both


def get_config(size="cpu"):
    return ml_collections.ConfigDict(_paper() if size == "paper" else _cpu())


def _cpu():
    """164k parameters, as four experts of width 32 with their own E have, and 1.5e12 operations."""
    stage = {
        "probe": "rank_one", "sequences": 1, "own_batch": True, "window": 64,
        "learning_rate": 1e-2, "eps": 5e-3, "decay_to": 0.05, "validate_every": 1000,
    }  # fmt: skip
    spsa = both(n_pert=64, head_sequences=32, head_rate=5.0)
    soma = spsa | {"seed_share": 0.3, "expert": spsa["expert"] | {"head_rate": 0.2}}
    mono = {"experts": 1, "active": 1, "model": {"width": 69}} | spsa
    # Its rate is the best of 0.1, 0.3 and 1 by validation at a fifth of the budget.
    gru = {"recurrence": "gru", "tied": False, "blocks": 6, "width": 44, "embedding": 44}
    eggroll = {
        "estimator": "eggroll", "parameters": "all", "head_sequences": 0, "n_pert": 64,
        "window": 100, "carry": True, "weight_decay": 0.0,
    }  # fmt: skip
    bptt = {
        "estimator": "backprop", "parameters": "all", "head_sequences": 0, "n_pert": 1,
        "own_batch": False, "sequences": 16, "window": 128,
    }  # fmt: skip
    return {
        "random_seeds": (0, 1, 2),
        "operations": 1.5e12,
        "base": {"evaluation": {"bootstrap": 2000}} | both(**stage),
        "rows": {
            "SOMA, N = 2": soma | {"experts": 2, "active": 2, "model": {"width": 47}},
            "SOMA, N = 4": soma | {"experts": 4, "active": 2},
            "monolith, n_pert 64": mono,
            "monolith, n_pert 256": mono | both(**spsa["seed"] | {"n_pert": 256}),
            "monolith, n_pert 1024": mono | both(**spsa["seed"] | {"n_pert": 1024}),
            "EGGROLL, GRU": {"experts": 1, "active": 1, "model": gru}
            | both(**eggroll, optimizer="sgd", learning_rate=1.0, eps=2.0**-5),
            "EGGROLL, LSTM": {"experts": 1, "active": 1, "model": {"width": 69}} | both(**eggroll),
            "backpropagation": {"experts": 1, "active": 1, "model": {"width": 69}} | both(**bptt),
        },
    }


def _paper():
    """8.44M parameters and the operations of SOMA's 65.0k updates: days of several GPUs."""
    spsa = both(head_sequences=64, learning_rate=2.5e-3, eps=2.5e-3)
    mono = {"experts": 1, "active": 1, "model": {"width": 509}}
    gru = {"recurrence": "gru", "tied": False, "blocks": 6, "width": 339, "embedding": 339}
    eggroll = {
        "estimator": "eggroll", "parameters": "all", "head_sequences": 0, "n_pert": 2**19,
        "own_batch": True, "sequences": 1, "share": 2**19 // 256, "window": 100, "carry": True,
        "optimizer": "sgd", "learning_rate": 0.01, "eps": 2.0**-4, "weight_decay": 0.0,
    }  # fmt: skip
    bptt = {"estimator": "backprop", "parameters": "all", "head_sequences": 0, "n_pert": 1}
    return {
        "random_seeds": (0,),
        "operations": 2 * 65e3 * 2 * 64 * 64 * 1024 * 8.46e6,
        "base": {"data": FINEWEB},
        "rows": {
            "SOMA, N = 2": spsa | {"experts": 2, "active": 2, "model": {"width": 361},
                                   "seed_share": 0.01},
            "monolith, n_pert 64": mono | spsa,
            "monolith, n_pert 256": mono | both(**spsa["seed"] | {"n_pert": 256}),
            "monolith, n_pert 1024": mono | both(**spsa["seed"] | {"n_pert": 1024}),
            "EGGROLL, GRU": {"experts": 1, "active": 1, "model": gru} | both(**eggroll),
            "backpropagation": mono | both(**bptt),
        },
    }  # fmt: skip
