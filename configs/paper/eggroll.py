"""The EGGROLL control: a six-layer GRU of width 339 (8.46M parameters) by its authors' recipe.

python launch/main.py --config=configs/paper/eggroll.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

Streams of 100 bytes an update with the state carried, a population of 2^20 in antithetic pairs,
rank one, everything perturbed, plain steps (paper, section 5). The paper: 7.40k updates in about
150 RTX 5090 GPU-hours; 2.21 nats/byte on its FineWeb-Edu test set and 2.493 on the WikiText-103
test text. Smaller widths it used: 20, 29, 58, 118.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()
    config.experts = 1
    config.active = 1
    config.model.recurrence = "gru"
    config.model.tied = False
    config.model.blocks = 6
    config.model.width = config.model.embedding = 339
    config.data.train = "fineweb-edu/train/*.parquet"
    config.data.valid = "fineweb-edu/valid/*.parquet"
    config.data.test = "fineweb-edu/test/*.parquet"
    config.seed.updates = 0
    stage = config.expert
    stage.estimator = "eggroll"
    stage.parameters = "all"
    stage.rank = 1
    stage.updates = 7_400
    stage.n_pert = 2**19  # pairs
    stage.own_batch = True
    stage.sequences = 1
    stage.share = 2**19 // 256  # 256 streams
    stage.window = 100
    stage.carry = True
    stage.optimizer = "sgd"
    stage.learning_rate = 0.01  # alpha
    stage.eps = 2.0**-4  # sigma_shift 4
    stage.weight_decay = 0.0
    return config
