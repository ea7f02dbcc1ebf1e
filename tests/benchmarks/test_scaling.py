"""The simulation of benchmarks/scaling.py against closed forms, and what the program prints."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scripts import load_script

ROOT = Path(__file__).parents[2]
scaling = load_script("scaling")


@pytest.mark.parametrize("devices", [1, 10, 100])
def test_simulated_times_have_the_mean_that_is_expected(devices):
    failures = scaling.Failures(per_second=1e-4, restart=30.0, every=60.0, takes=2.0)
    times = failures.times(3000.0, devices, 4000, np.random.default_rng(0))
    error = times.std() / math.sqrt(len(times))
    assert abs(times.mean() - failures.expected(3000.0, devices)) < 4 * error
    assert times.min() >= 3000 + 50 * 2 - 1e-6


def test_the_mean_by_brute_force():
    """One stretch, failure by failure: tries of `length` seconds until one comes through."""
    failures = scaling.Failures(per_second=0.01, restart=5.0, every=100.0, takes=0.0)
    rng = np.random.default_rng(1)
    total = []
    for _ in range(20_000):
        spent = 0.0
        while (fails := rng.exponential(100.0)) < 100:
            spent += fails + 5
        total.append(spent + 100)
    error = np.std(total) / math.sqrt(len(total))
    assert abs(np.mean(total) - failures.expected(100.0, 1)) < 4 * error


def test_without_failures_time_is_work():
    failures = scaling.Failures(0.0, 300.0, 60.0, 0.5)
    assert failures.times(600.0, 64, 2, np.random.default_rng(0)).tolist() == [605.0, 605.0]
    assert failures.expected(600.0, 64) == 605
    seconds, paid = scaling.fso(8, 4, failures, np.random.default_rng(0))
    assert seconds * 4 == pytest.approx(paid)


def test_devices_that_share_directions():
    one, two = (scaling.update_seconds(2**20, devices) for devices in (1, 2))
    assert 0.5 < two / one < 0.501
    assert scaling.message_bytes(64, 32_928) == 512
    assert scaling.message_bytes(2**20, 32_928) == 4 * (2**21 + 32_928)


def test_the_program_prints_both_tables():
    line = [sys.executable, "benchmarks/scaling.py", "--failures=0"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "FSO" in done.stdout
    assert "65,536" in done.stdout
    assert "| 2^20 |" in done.stdout
