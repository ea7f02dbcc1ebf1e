"""SOMA, N = 8 experts of width 181 (8.55M parameters), the paper's settings exactly.

python launch/main.py --config=configs/paper/soma_n8.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

The number of updates is not in the paper; 65,000 is that of N = 2.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()  # the paper's: n_pert = B = 64, T = 1,024, Adam, plateau rule
    config.experts = 8
    config.model.width = 181
    config.data.train = "fineweb-edu/train/*.parquet"
    config.data.valid = "fineweb-edu/valid/*.parquet"
    config.data.test = "fineweb-edu/test/*.parquet"
    config.expert.updates = 65_000
    config.expert.learning_rate = config.expert.eps = 2.5e-3
    config.expert.head_sequences = 64  # the wide experts keep training their own copy of E
    return config
