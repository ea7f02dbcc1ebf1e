"""How much two experts know that the other does not: the correlation of their errors and what
averaging them gains, for every pair (paper, Fig. 17)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from soma_jax import inference, recipe, summary
from soma_jax.data import store, windows
from soma_jax.experiments import output, runs
from soma_jax.files import read_json
from soma_jax.report import figures, page
from soma_jax.stats import t_interval
from soma_jax.workdir import Workdir

resolve = runs.resolve_rows


def run(settings: runs.Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains every row, measures its pairs, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a row that was trained with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    result = runs.run_rows(settings, directory, command)
    for row, given in zip(result["rows"], settings.rows, strict=True):
        row["pairs"] = [
            _pairs(Workdir(directory / "runs" / given.slug / str(config.random_seed)))
            for config in given.configs
        ]
    table = (
        ["name", "run", "first", "second", "correlation", "gain", "better", "together"],
        [
            [row["name"], run, *pair.values()]
            for row in result["rows"]
            for run, pairs in enumerate(row["pairs"])
            for pair in pairs
        ],
    )
    output.write(directory, "complementary", result, markdown(result), table, _figure(result))
    return result


def _pairs(workdir: Workdir) -> list[dict[str, Any]]:
    """Every pair of a run's experts, on its test windows."""
    config, experts, _ = recipe.load(workdir.path)
    test = summary.drawn_windows(
        store.open_store(workdir.store("test")), config.evaluation, read_json(workdir.screened)
    )
    mask = windows.scored_mask(test.lengths)
    every = np.tile(np.arange(len(experts)), (len(test), 1))
    log_p = inference.log_probabilities(
        [e.params for e in experts], test.ids, every, windows.CONTEXT
    )
    log_p = log_p.swapaxes(0, 1)[:, mask].astype(np.float64)
    return [
        {"first": i, "second": j, **pair(log_p[i], log_p[j])}
        for i, j in itertools.combinations(range(len(experts)), 2)
    ]


def pair(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Of two experts' log-probabilities of the same bytes, float64 [n].

    Returns:
      The correlation of their losses over bytes, the loss of the better one, that of the mean of
      their probabilities, and the gain, their difference, nats/byte.
    """
    better = min(-first.mean(), -second.mean())
    together = -(np.logaddexp(first, second) - np.log(2)).mean()
    return {
        "correlation": float(np.corrcoef(first, second)[0, 1]),
        "gain": float(better - together),
        "better": float(better),
        "together": float(together),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: the pairs of each row, and whether less correlation gains more."""
    parts = [runs.introduction(result), runs.table(result["rows"])]
    for row in result["rows"]:
        pairs = [p for of_run in row["pairs"] for p in of_run]
        spread = [np.array([p[name] for p in pairs]) for name in ("correlation", "gain")]
        rows = [
            [words, f"{x.mean():.4f}", f"{x.min():.4f} to {x.max():.4f}"]
            for words, x in zip(
                ("correlation of the losses", "gain, nats/byte"), spread, strict=True
            )
        ]
        # Within each run, so that runs that differ as a whole do not make a correlation.
        ranks = [
            stats.spearmanr(*([p[name] for p in of_run] for name in ("correlation", "gain")))[0]
            for of_run in row["pairs"]
            if len(of_run) > 2
        ]
        parts += [
            f"**{row['name']}**, {len(pairs)} pairs",
            page.table(["", "mean", "over all pairs"], rows),
        ]
        if ranks:
            words = "The less two experts' losses correlate, the more averaging gains"
            parts.append(
                output.claim(f"{words} (rank correlation < 0)", t_interval(-np.array(ranks)))
            )
    return "\n\n".join(parts) + "\n"


def _figure(result: dict[str, Any]) -> Any:
    figure, (axes,) = figures.panels(6, 4)
    for row, color in zip(result["rows"], figures.cycle(), strict=False):
        pairs = [p for of_run in row["pairs"] for p in of_run]
        x, y = ([p[name] for p in pairs] for name in ("correlation", "gain"))
        axes.plot(x, y, ".", color=color, label=row["name"])
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xlabel("correlation of two experts' losses over bytes")
    axes.set_ylabel("gain of averaging them, nats/byte")
    figures.legend(figure, [axes])
    return figure
