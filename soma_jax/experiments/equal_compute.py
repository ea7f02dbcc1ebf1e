"""Every system at one total size and one budget of arithmetic operations (paper, Fig. 1, Tables 4
and 9): SOMA, monolithic SPSA, EGGROLL and backpropagation, on the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soma_jax.experiments import runs
from soma_jax.report import page

# Near 150 RTX 5090 GPU-hours and 8.44M parameters: FineWeb-Edu test, WikiText-103 test, updates.
PAPER = {
    "SOMA, N = 2": (1.76, 2.066, "65.0k"),
    "monolith, n_pert 64": (2.00, 2.254, "30.0k"),
    "monolith, n_pert 256": (2.11, 2.363, "1.32k"),
    "monolith, n_pert 1024": (2.00, 2.290, "839"),
    "EGGROLL, GRU": (2.21, 2.493, "7.40k"),
}
# What the paper's table says: the first is better than the second.
CLAIMS = [
    ("SOMA, N = 2", "monolith, n_pert 64"),
    ("SOMA, N = 2", "monolith, n_pert 256"),
    ("SOMA, N = 2", "monolith, n_pert 1024"),
    ("SOMA, N = 2", "EGGROLL, GRU"),
    ("monolith, n_pert 64", "monolith, n_pert 256"),
    ("monolith, n_pert 1024", "monolith, n_pert 256"),
    ("monolith, n_pert 64", "EGGROLL, GRU"),
    ("monolith, n_pert 256", "EGGROLL, GRU"),
    ("backpropagation", "SOMA, N = 2"),
]


resolve = runs.resolve_rows


def run(settings: runs.Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains and scores every row, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a row that was trained with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    return runs.run_and_write("equal_compute", settings, directory, command, markdown, above=0.6)


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: our table, the paper's, and which of its orderings came out."""
    rows = result["rows"]
    parts = [
        runs.introduction(result),
        runs.table(rows),
        "For the first random seed, the 95% interval of the test loss over documents: "
        + "; ".join(
            "{} {:.3f} to {:.3f}".format(row["name"], *row["documents_interval"][0]) for row in rows
        )
        + ".",
        "**The paper**, near 150 RTX 5090 GPU-hours and 8.44M parameters, on FineWeb-Edu:",
        page.table(
            ["", "updates", "test nats/byte", "WikiText-103 test"],
            [
                [name, updates, f"{test:.2f}", f"{wikitext:.3f}"]
                for name, (test, wikitext, updates) in PAPER.items()
            ],
        ),
        "**Its ordering, here** (difference of test losses, paired by random seed):",
        runs.claims(rows, CLAIMS),
    ]
    return "\n\n".join(parts) + "\n"
