"""benchmarks/inference.py: its requests, and what it makes of its times."""

import json
import subprocess
import sys

import numpy as np
import pytest
from scripts import BENCHMARKS, load_script


@pytest.fixture(scope="module")
def benchmark():
    return load_script("inference")


def test_rates_shares_and_ratios_are_those_of_the_turns(benchmark, monkeypatch):
    rates = {8: 100.0, 256: 1500.0}
    turns = {
        "ensemble": lambda n: {
            "requests": n,
            "tokens_per_s": rates[n],
            "routing_share": n / 1000,
            "seconds_per_batch": 2.0,
            "peak_rss_bytes": n * 2**20,
        },
        "alone": lambda n: {"tokens_per_s": 30.0 * n},
        "torch": lambda n: {"tokens_per_s": 10.0 * n},
    }
    monkeypatch.setattr(benchmark, "in_a_process", lambda turn, n: turns[turn](n))
    result = json.loads(json.dumps(benchmark.measure([8, 256], lambda _: None)))
    assert result["tokens_per_s"] == {"8": 100.0, "256": 1500.0}
    assert result["routing_share"] == {"8": 0.008, "256": 0.256}
    assert result["n256_to_n8"] == 15
    ensembles, alone = benchmark.tables(result)
    assert ensembles[1:] == [
        ("8", "181", "100", "0.8%", "8", "2.00", "8"),
        ("256", "32", "1,500", "25.6%", "256", "2.00", "256"),
    ]
    assert alone[1:] == [("181", "240", "80", "3.00"), ("32", "7,680", "2,560", "3.00")]


def test_requests_are_whole_windows_of_the_text(benchmark):
    ids, chunks = benchmark.requests(5000)  # more than there are: some come twice
    assert ids.shape == (5000, 1025)
    assert 2000 < len(np.unique(ids, axis=0)) < 5000
    assert max(map(len, chunks)) == 1024


@pytest.mark.slow
def test_a_turn_is_timed_in_a_process_and_bad_flags_are_one_line():
    line = [
        sys.executable,
        str(BENCHMARKS / "inference.py"),
        "--experts=256",
        "--requests=64",
        "--batches=1",
    ]
    done = subprocess.run([*line, "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens_per_s"]["256"] > 0
    assert 0 < result["routing_share"]["256"] < 1
    assert set(result["one_expert_tokens_per_s"]["32"]) == {"soma_jax", "torch"}
    refused = subprocess.run(
        [*line[:2], "--experts=3"], capture_output=True, text=True, timeout=100
    )
    assert refused.returncode == 2
    assert "1, 2, 8, 256" in refused.stderr
