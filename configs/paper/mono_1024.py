"""The monolithic control with n_pert = 1024; otherwise as mono_64.py.

python launch/main.py --config=configs/paper/mono_1024.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

The paper: 839 updates in about 150 RTX 5090 GPU-hours; 2.00 nats/byte on its FineWeb-Edu test
set and 2.290 on the WikiText-103 test text.
"""

import runpy
from pathlib import Path

_SIBLING = Path(__file__).with_name("mono_64.py")


def get_config():
    config = runpy.run_path(str(_SIBLING))["get_config"]()
    config.expert.updates = 839
    config.expert.n_pert = 1024
    return config
