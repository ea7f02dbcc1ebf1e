"""The monolithic control with n_pert = 256; otherwise as mono_64.py.

python launch/main.py --config=configs/paper/mono_256.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

The paper: 1.32k updates in about 150 RTX 5090 GPU-hours; 2.11 nats/byte on its FineWeb-Edu test
set and 2.363 on the WikiText-103 test text.
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
    config.expert.updates = 1320
    config.expert.n_pert = 256
    config.expert.learning_rate = config.expert.eps = 2.5e-3
    config.expert.head_sequences = 64
    return config
