"""Each expert by its own loss, or by the sum of the experts' (paper, Fig. 4, Appendix J).

python launch/experiment.py --experiment=independent_loss [--size=paper]

`run` is a config of launch/main.py, whose `random_seed` is each of `random_seeds` in turn. Both
arms go on from its experts, with the settings of its experts.
"""

import ml_collections

from soma_jax.config import default_config
from soma_jax.experiments.runs import FINEWEB


def get_config(size="cpu"):
    run = default_config()
    run.evaluation.wikitext = False
    if size == "paper":  # its four experts are the first of eight
        run.data.update(FINEWEB)
        run.expert.updates = 2000
    else:
        run.evaluation.update(documents=64, bootstrap=1000)
        run.cluster.validation_share = 0.05
        run.seed.update(
            updates=300, probe="rank_one", n_pert=256, sequences=1, own_batch=True, window=128,
            learning_rate=1e-2, eps=5e-3, decay_to=0.02, head_sequences=32, head_rate=5.0,
        )  # fmt: skip
        run.expert.update(updates=200, n_pert=16, sequences=4, window=64, validation_windows=256)
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0, 1, 2),
            "run": run,
            "updates": 1000,  # of each arm
            "observe_every": 50,  # updates between looks at the validation losses
            "variance_every": 250,  # and at the variances
            "variance_repeats": 24,  # estimates that a variance is the mean of
        }
    )
