"""Pairs of experts: correlation of their errors, and what averaging gains (paper, Fig. 17).

python launch/experiment.py --experiment=complementary [--size=paper]
"""

import runpy
from pathlib import Path

_SIBLING = Path(__file__).with_name("active_experts.py")  # the same ensembles


def get_config(size="cpu"):
    return runpy.run_path(str(_SIBLING))["get_config"](size)
