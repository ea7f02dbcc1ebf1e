"""The default run: four width-32 experts on the embedded corpus, on a laptop's CPU.

python launch/main.py --config=configs/soma_n4.py

docs/default_run/report.md is what it wrote: losses, wall time, memory.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()
    # With specialised experts the two nearest are better than all four, on the validation text.
    config.active = 2
    for stage in (config.seed, config.expert):
        # A direction with windows of its own averages over data and directions at once: the same
        # forwards teach more than when all directions share a batch, as they do in the paper.
        stage.n_pert = 64
        stage.sequences = 4
        stage.own_batch = True
        stage.window = 128
        # Noise limits the last part of a short run, so both the rate and eps go down a cosine.
        stage.decay_to = 0.02
        stage.eps = 5e-3
    config.seed.updates = 1000
    config.seed.learning_rate = 1e-2
    config.seed.head_sequences = 64
    config.expert.updates = 1300
    config.expert.learning_rate = 5e-3
    return config
