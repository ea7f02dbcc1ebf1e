"""The report says what the numbers of a run say, whatever their order and however many experts."""

import json
import math
import re
import struct
import zlib

import numpy as np
import pytest
from rich.console import Console

from soma_jax import report
from soma_jax.errors import SomaError
from soma_jax.report import figures, page
from soma_jax.workdir import Workdir


def make_text(experts: int, **values) -> dict:
    return {
        "scored_bytes": 76_800,
        "windows": 100,
        "ensemble": 2.61,
        "seed": 2.75,
        "interval": {
            "ensemble": [2.55, 2.67],
            "seed": [2.69, 2.81],
            "ensemble_minus_seed": [-0.15, -0.13],
        },
        "by_k": [2.66 - 0.01 * k for k in range(min(experts, 8))],
        "routed_first": [1] * experts,
        "unigram": 3.43,
        "bigram": 2.79,
        "trigram": 2.19,
        "gzip_9": 2.27,
    } | values


def make_summary(experts: int = 4, *, seed_updates=100, expert_updates=200, **test) -> dict:
    """The summary of a run in which nothing is wrong."""
    spent = {"seed": 1000 * seed_updates, "experts": 1000 * expert_updates * experts}
    return {
        "test": make_text(experts, documents_also_in_training=0, **test),
        "experts": [
            {
                "chunks": 1000 + i,
                "bytes": 1_000_000 + 1000 * i,
                "top_terms": [f"word{i}", "and", "others"],
                "own_shard": {"seed": 2.8, "expert": 2.7 - i / 1000},
            }
            for i in range(experts)
        ],
        "byte_forwards": sum(spent.values()),
        "byte_forwards_by_stage": spent,
        "operations": 81_920 * sum(spent.values()),
        "parameters": 41_120 * experts,
        "devices": 4,
        "peak_rss_bytes": 3 * 2**29,
        "config": {
            "random_seed": 17,
            "experts": experts,
            "active": 4,
            "data": {"train": "embedded:train"},
            "seed": {"updates": seed_updates},
            "expert": {"updates": expert_updates},
        },
        "seconds": 7500.0,
        "stages": {"seed": 1800.0, "cluster": 100.0, "experts": 5400.0, "evaluate": 200.0},
    }


def make_lines(updates: int, start: float, end: float, noise: float = 0.0) -> list[dict]:
    rng = np.random.default_rng(updates)
    lines = []
    for update in sorted({1, *range(10, updates + 1, 10)}) if updates else []:
        loss = end + (start - end) * math.exp(-5 * update / updates)
        line = {"update": update, "byte_forwards": 1000 * update, "seconds": 0.1 * update}
        line |= {"loss": loss + noise * rng.normal(), "eps": 1e-3, "learning_rate": 1e-3}
        lines.append(line | ({"validation": loss} if update % 50 == 0 else {}))
    return lines


def make_workdir(path, summary: dict) -> Workdir:
    """A finished workdir, as far as the report reads it."""
    workdir = Workdir(path)
    updates = {stage: summary["config"][stage]["updates"] for stage in ("seed", "expert")}
    files = {
        workdir.summary: [summary],
        workdir.seed / "metrics.jsonl": make_lines(updates["seed"], 5.6, 2.8, 0.05),
    }
    for i, expert in enumerate(summary["experts"]):
        before, after = expert["own_shard"]["seed"], expert["own_shard"]["expert"]
        lines = make_lines(updates["expert"], before, after, 0.05)
        files[workdir.expert(i) / "metrics.jsonl"] = lines
    curve = []
    for stage, key, start, end in (("seed", "seed", 5.6, 2.75), ("experts", "expert", 2.75, 2.61)):
        for i in range(1, 11) if updates[key] else ():
            loss = end + (start - end) * math.exp(-i / 2)
            line = {"stage": stage, "update": i * updates[key] // 10, "nats_per_byte": loss}
            curve.append(line)
    if curve:
        files[workdir.curve] = curve
    for file, lines in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return workdir
