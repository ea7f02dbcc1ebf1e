"""The upper bound: one expert of width 509 by backpropagation through time, with Adam.

python launch/main.py --config=configs/paper/bptt.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

The paper: 1.01 to 1.18 nats/byte on its ensemble validation text at 50 to 100 GPU-hours (no rate or
number of updates is given). --config.expert.parameters=body with
--config.expert.head_sequences=64 trains E by the delta rule (its decoder's path only), and with
head_sequences=0 freezes it: the ablation's variants of the tied head.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()
    config.experts = 1
    config.active = 1
    config.model.width = 509
    config.data.train = "fineweb-edu/train/*.parquet"
    config.data.valid = "fineweb-edu/valid/*.parquet"
    config.data.test = "fineweb-edu/test/*.parquet"
    config.seed.updates = 0
    config.expert.estimator = "backprop"
    config.expert.parameters = "all"
    config.expert.n_pert = 1
    config.expert.updates = 100_000
    return config
