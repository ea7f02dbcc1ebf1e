"""SOMA, N = 256 experts of width 32 with one shared, frozen head: 8.44M parameters.

python launch/main.py --config=configs/paper/soma_n256.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

The paper: 1.72 nats/byte on its ensemble validation set after about 184 RTX 5090 GPU-hours.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()  # width 32, n_pert = B = 64, T = 1,024, rate = eps = 1e-3, E frozen
    config.experts = 256
    # Not in the paper: 184 h / (0.142 s an update, on the same GPU) / 256 experts.
    config.expert.updates = round(184 * 3600 / 0.142 / 256)
    config.data.train = "fineweb-edu/train/*.parquet"
    config.data.valid = "fineweb-edu/valid/*.parquet"
    config.data.test = "fineweb-edu/test/*.parquet"
    return config
