"""Four width-32 experts on the embedded corpus by learned feedback, on a laptop's CPU.

python launch/main.py --config=configs/soma_n4_activity.py

Forward passes only, with noise in the activities instead of the weights: docs/estimators.md says
how far that goes and which local derivatives it uses.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()
    config.active = 2
    for stage in (config.seed, config.expert):
        stage.estimator = "feedback"
        stage.parameters = "all"
        stage.head_sequences = 0  # the readout's gradient comes with the estimate
        stage.sequences = 64
        stage.n_pert = 8
        stage.window = 64
        stage.credit = 8
        stage.eps = 0.1
        stage.decay_to = 0.02
        stage.weight_decay = 0.0
    config.seed.learning_rate = 1e-2
    config.seed.updates = 4000
    config.expert.learning_rate = 5e-3
    config.expert.updates = 3000
    return config
