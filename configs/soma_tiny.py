"""The recipe at a size that finishes in under a minute: what to run after each change.

python launch/main.py --config=configs/soma_tiny.py
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()
    config.experts = 3
    config.active = 2
    config.model.width = 16
    config.model.embedding = 16
    config.cluster.components = 16
    for stage in (config.seed, config.expert):
        stage.updates = 60
        stage.probe = "rank_one"
        stage.n_pert = 16
        stage.sequences = 2
        stage.own_batch = True
        stage.window = 64
        stage.validate_every = 10
        stage.validation_windows = 16
        stage.patience = 20
        stage.learning_rate = stage.eps = 2.5e-3
        stage.head_sequences = 32
    config.expert.whitening = 0.1
    config.evaluation.wikitext = False
    config.evaluation.bootstrap = 1000
    return config
