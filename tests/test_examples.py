"""The examples run as they are, at a small size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_an_own_estimator_runs_beside_the_built_in_ones(tmp_path):
    example = ROOT / "examples" / "own_estimator.py"
    assert len(example.read_text().splitlines()) < 60
    command = [sys.executable, str(example), f"--workdir={tmp_path}", "--operations=6e10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    one_sided, spsa = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert (one_sided["name"], spsa["name"]) == ("one_sided", "spsa")
    # At one budget: 65 forwards of the batch, or 128; E's delta rule takes 32 more of a window.
    ratio = (2 * 64 * 4) / ((64 + 1) * 4)
    assert one_sided["updates"]["expert"] / spsa["updates"]["expert"] > 0.8 * ratio
    for curve in one_sided["curves"]:
        assert curve[-1][1] < curve[0][1] - 0.03
