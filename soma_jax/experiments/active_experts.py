"""Loss against k, the number of active experts (paper, Fig. 16)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from soma_jax.experiments import output, runs
from soma_jax.report import figures, page
from soma_jax.stats import t_interval

resolve = runs.resolve_rows


def run(settings: runs.Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains and scores every row, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a row that was trained with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    result = runs.run_rows(settings, directory, command)
    table = (
        ["name", "run", "k", "test"],
        [
            [row["name"], run, k, loss]
            for row in result["rows"]
            for run, by_k in enumerate(row["by_k"])
            for k, loss in enumerate(by_k, 1)
        ],
    )
    output.write(directory, "active_experts", result, markdown(result), table, _figure(result))
    return result


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: the test loss by k, and what more experts bring."""
    parts = [runs.introduction(result), runs.table(result["rows"])]
    for row in result["rows"]:
        by_k = np.array(row["by_k"])  # [runs, k]
        cells = []
        for k, losses in enumerate(by_k.T, 1):
            mean, low, high = t_interval(losses)
            gain = t_interval(losses - by_k[:, 0])
            cells.append(
                [
                    *(str(k), f"{mean:.4f}", f"{low:.4f} to {high:.4f}"),
                    "" if k == 1 else "{:+.4f} ({:+.4f} to {:+.4f})".format(*gain),
                ]
            )
        header = ["k", "test nats/byte", "95% over seeds", "against k = 1 (95%)"]
        best = 1 + int(by_k.mean(0).argmin())
        parts += [
            f"**{row['name']}**: the lowest mean is at k = {best}",
            page.table(header, cells),
            output.claim(
                f"Averaging all {by_k.shape[1]} experts is better than the nearest alone",
                t_interval(by_k[:, 0] - by_k[:, -1]),
            ),
        ]
    parts.append("The paper, N = 256: from k = 4 to 12, -0.013.")
    return "\n\n".join(parts) + "\n"


def _figure(result: dict[str, Any]) -> Any:
    figure, (axes,) = figures.panels(6, 4)
    for row, color in zip(result["rows"], figures.cycle(), strict=False):
        by_k = np.array(row["by_k"])
        k = np.arange(1, by_k.shape[1] + 1)
        axes.plot(k, by_k.mean(0), "o-", color=color, label=row["name"])
        axes.fill_between(k, by_k.min(0), by_k.max(0), color=color, alpha=0.2, lw=0)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("k, active experts")
    axes.set_ylabel("test nats/byte (band: random seeds)")
    figures.legend(figure, [axes])
    return figure
