"""Experiments: each a config, a command, and a result that is a table, figures and result.json.

An experiment NAME is the module soma_jax/experiments/NAME.py, whose `run(settings, directory,
command)` trains and measures, and whose settings are configs/experiments/NAME.py, which `resolve`
checks. `markdown(result)` makes the page of a result.json again.
"""

NAMES = (
    "equal_compute",
    "tuning",
    "independent_loss",
    "gradient_variance",
    "gradient_error",
    "batch_allocation",
    "allocation",
    "scaling",
    "sharding_ablation",
    "active_experts",
    "complementary",
    "plan",
    "estimators",
)
