"""The default run: four width-32 experts on the embedded corpus, on a laptop's CPU.

python launch/main.py --config=configs/soma_n4.py
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()
    config.seed.updates = 815
    config.expert.updates = 1144
    for stage in (config.seed, config.expert):
        # The same number of forwards says more when each direction sees a window of its own than
        # when all share a batch: data and directions are averaged at once (configs/paper/ keeps
        # the paper's allocation).
        stage.n_pert = 256
        stage.sequences = 1
        stage.own_batch = True
        stage.window = 128
        stage.decay_to = 0.02
        stage.eps = 5e-3
    config.seed.head_sequences = 64
    config.seed.learning_rate = 1e-2
    config.expert.learning_rate = 5e-3
    return config
