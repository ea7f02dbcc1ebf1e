"""The monolithic control with n_pert = 256; otherwise as mono_64.py.

python launch/main.py --config=configs/paper/mono_256.py \
    --config.data.train='fineweb-edu/train/*.parquet' --config.data.valid=... --config.data.test=...

The paper: 1.32k updates in about 150 RTX 5090 GPU-hours; 2.11 nats/byte on its FineWeb-Edu test
set and 2.363 on the WikiText-103 test text.
"""

import runpy
from pathlib import Path

_SIBLING = Path(__file__).with_name("mono_64.py")


def get_config():
    config = runpy.run_path(str(_SIBLING))["get_config"]()
    config.expert.updates = 1320
    config.expert.n_pert = 256
    return config
