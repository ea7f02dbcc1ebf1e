"""Experiments: each a config, a command, and a result that is a table, figures and result.json.

An experiment NAME is the module soma_jax/experiments/NAME.py, whose `run(settings, workdir)` trains
and measures, and whose settings are configs/experiments/NAME.py, which `resolve` checks.
"""

NAMES = ("allocation",)
