"""What makes a sharded ensemble good: its shards, a warm start or a cold one, how E is trained
(paper, Fig. 9); by backpropagation, so that nothing else limits the experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from soma_jax.experiments import runs
from soma_jax.report import page

# The paper's ordering: the first is better than the second.
CLAIMS = [
    ("semantic shards", "random shards"),
    ("semantic shards", "IID data"),
    ("semantic shards", "cold start"),
    ("cold start", "cold start, E by its decoder's path"),
    ("cold start, E by its decoder's path", "cold start, E frozen"),
]

resolve = runs.resolve_rows


def run(settings: runs.Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains and scores every row, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a row that was trained with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    return runs.run_and_write(
        "sharding_ablation", settings, directory, command, markdown, above=0.3
    )


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: the table, and which of the paper's orderings came out."""
    rows = result["rows"]
    parts = [
        runs.introduction(result),
        runs.table(rows),
        "Random shards and IID data leave nothing to route by: there, all experts are averaged. E "
        "learns by both its paths where nothing else is said; a cold start has no seed, and the "
        "experts its part of the budget.",
        "The test loss with the k nearest experts, mean over seeds:",
        page.table(
            ["", *(f"k = {k}" for k in range(1, 1 + len(rows[0]["by_k"][0])))],
            [
                [row["name"], *(f"{loss:.4f}" for loss in np.mean(row["by_k"], axis=0))]
                for row in rows
            ],
        ),
        "**The paper's ordering, here** (difference of test losses, paired by random seed); the "
        "paper has the decoder's path 0.029 behind both:",
        runs.claims(rows, CLAIMS),
    ]
    return "\n\n".join(parts) + "\n"
