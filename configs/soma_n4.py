"""The default run: four width-32 experts on the embedded corpus, on a laptop's CPU.

python launch/main.py --config=configs/soma_n4.py

docs/default_run/report.md is what it wrote: losses, wall time, memory. docs/allocation.md says why
the byte-forwards are spent in this way.
"""

from soma_jax.config import default_config


def get_config():
    config = default_config()
    # With specialised experts the two nearest are better than all four, on the validation text.
    config.active = 2
    for stage in (config.seed, config.expert):
        # A direction with a window of its own averages over data and directions at once: the same
        # forwards teach more than when all directions share a batch, as they do in the paper.
        # Rank-one directions make so many small batches as fast as one large one.
        stage.probe = "rank_one"
        stage.n_pert = 256
        stage.sequences = 1
        stage.own_batch = True
        stage.window = 128
        # Noise limits the last part of a short run, so both the rate and eps go down a cosine.
        stage.decay_to = 0.02
        stage.eps = 5e-3
        stage.learning_rate = 1e-2
        # E's gradient is exact, and the experts' shards differ in their bytes before all else.
        stage.head_sequences = 32
    config.seed.updates = 1200
    config.seed.head_rate = 5.0
    config.expert.updates = 650
    # From a seed on, E is nearly where it should be.
    config.expert.head_rate = 0.2
    # What is left to learn lies along inputs that the seed's noise has hidden.
    config.expert.whitening = 0.01
    return config
