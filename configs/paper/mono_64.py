"""The monolithic control: one expert of width 509 (8.33M parameters), n_pert = 64.

python launch/main.py --config=configs/paper/mono_64.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

The paper: 30.0k updates in about 150 RTX 5090 GPU-hours; 2.00 nats/byte on its FineWeb-Edu test
set and 2.254 on the WikiText-103 test text. --config.model.width=64 is a monolith of 144k
parameters, to stand beside four experts of width 32 that share E.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()  # the paper's: n_pert = B = 64, T = 1,024, Adam, plateau rule
    config.experts = 1
    config.active = 1
    config.model.width = 509
    config.data.train = "fineweb-edu/train/*.parquet"
    config.data.valid = "fineweb-edu/valid/*.parquet"
    config.data.test = "fineweb-edu/test/*.parquet"
    config.seed.updates = 0  # one expert has nothing to branch from
    config.expert.updates = 30_000
    config.expert.learning_rate = config.expert.eps = 2.5e-3
    config.expert.head_sequences = 64
    return config
