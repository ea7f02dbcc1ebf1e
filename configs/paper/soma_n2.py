"""SOMA, N = 2 experts of width 361: the paper's best model near 8.44M parameters, its settings.

python launch/main.py --config=configs/paper/soma_n2.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

The paper: 65.0k updates in about 150 RTX 5090 GPU-hours; 1.76 nats/byte on its FineWeb-Edu test
set and 2.066 on the WikiText-103 test text.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()  # the paper's: n_pert = B = 64, T = 1,024, Adam, plateau rule
    config.experts = 2
    config.model.width = 361
    config.data.train = "fineweb-edu/train/*.parquet"
    config.data.valid = "fineweb-edu/valid/*.parquet"
    config.data.test = "fineweb-edu/test/*.parquet"
    config.expert.updates = 65_000
    config.expert.learning_rate = config.expert.eps = 2.5e-3
    config.expert.head_sequences = 64  # the wide experts keep training their own copy of E
    return config
