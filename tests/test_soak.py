"""A long run of a tiny expert: memory stays flat, nothing compiles again, the log does not swell.

SOMA_SOAK=50000 makes it as long as it takes to believe it; by default it is shorter.
"""

import dataclasses
import os

import jax
import numpy as np
import pytest
from test_training import STAGE, make_trainee, train

from soma_jax.config import Run

UPDATES = int(os.environ.get("SOMA_SOAK", "5000"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
def test_nothing_grows(tmp_path):
    stage = dataclasses.replace(STAGE, updates=UPDATES, patience=1000, validate_every=50)
    compiled, seen = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )

    def observe(update, _):
        seen.append((update, resident_bytes(), len(compiled)))

    trainee = make_trainee(tmp_path, 0, stage=stage)
    try:
        train([trainee], stage, Run(checkpoint_seconds=1.0), observe=observe, observe_every=50)
    finally:
        jax.monitoring.clear_event_listeners()
    memory = np.array([x[1] for x in seen])
    warm, late = np.median(memory[len(memory) // 5 : 2 * len(memory) // 5]), memory[-5:].max()
    # Python's and XLA's allocators keep freed blocks, and take a few more now and then.
    assert late - warm < 8 * 2**20, memory
    assert compiled, "the listener heard nothing"
    assert seen[-1][2] == seen[0][2]
    log = (trainee.directory / "metrics.jsonl").read_bytes()
    assert log.count(b"\n") == UPDATES // 10 + 1
    assert len(log) < 200 * log.count(b"\n")
    assert len(list((trainee.directory / "checkpoints").iterdir())) <= 3
