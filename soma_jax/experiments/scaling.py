"""Loss against the number of experts, of directions and of sequences, at fixed width and one budget
for each expert (paper, Figs. 7 and 8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from soma_jax.config import build, field
from soma_jax.errors import SomaError
from soma_jax.experiments import output, runs
from soma_jax.report import figures
from soma_jax.stats import t_interval

SWEEPS = {"experts": "N, experts", "n_pert": "n_pert, directions", "sequences": "B, sequences"}


@dataclasses.dataclass(frozen=True)
class Given:
    """The fields of configs/experiments/scaling.py."""

    random_seeds: tuple  # one run of each setting for each
    base: dict  # what all runs set in a config of launch/main.py, and the seed's share
    experts: tuple  # N, each on the budget times N: an expert's compute is the same
    n_pert: tuple
    sequences: tuple
    operations: float = field(1e11, above=0)  # of an expert and its share of the seed


@dataclasses.dataclass(frozen=True)
class Settings:
    given: Given
    rows: Mapping[str, list[runs.Row]]  # by sweep


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    given: Given = build(Given, config.to_dict(), "config")
    output.check_seeds(given.random_seeds)
    rows = {}
    for sweep in SWEEPS:
        values = getattr(given, sweep)
        if not all(isinstance(value, int) and value > 0 for value in values):
            raise SomaError(f"config.{sweep} must be positive whole numbers, not {values!r}")
        rows[sweep] = [_row(given, sweep, value) for value in values]
    return Settings(given, rows)


def _row(given: Given, sweep: str, value: int) -> runs.Row:
    # An expert has the same budget whatever N is: each may be on a device of its own.
    of_stage = sweep != "experts"
    overrides = runs.both(**{sweep: value}) if of_stage else {"experts": value, "active": value}
    operations = given.operations * (1 if of_stage else value)
    (row,) = runs.rows(
        {f"{sweep} {value}": overrides},
        given.base,
        operations=operations,
        random_seeds=given.random_seeds,
        path=f"config.{sweep}",
    )
    return row


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains and scores every run, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a run that was trained with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    result = output.circumstances(command, settings.given.random_seeds) | {
        "operations": settings.given.operations,
        "sweeps": {
            sweep: [
                runs.train(row, directory) | {"value": value}
                for row, value in zip(rows, getattr(settings.given, sweep), strict=True)
            ]
            for sweep, rows in settings.rows.items()
        },
    }
    every = [row for rows in result["sweeps"].values() for row in rows]
    table = runs.csv_table(every)
    output.write(directory, "scaling", result, markdown(result), table, _figure(result))
    return result


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: a table for each sweep, and whether more is better."""
    seeds = ", ".join(map(str, result["random_seeds"]))
    parts = [
        f"`{result['command']}`",
        f"{result['operations']:.3g} operations an expert, its share of the seed included; random "
        f"seeds {seeds}; {result['devices']} x {result['device']}, {result['date']}. Where an "
        "update costs more, there are fewer of them.",
    ]
    for sweep, rows in result["sweeps"].items():
        if not rows:
            continue
        parts += [f"**{SWEEPS[sweep]}**", runs.table(rows)]
        first, last = rows[0], rows[-1]
        words = f"{last['name']} is better than {first['name']} (difference of test losses)"
        parts.append(runs.claim(words, last, first))
    parts.append(
        "The paper: ensemble validation from 1.84 (N = 1) to 1.72 (N = 256) at width 32, after "
        "about 184 GPU-hours."
    )
    return "\n\n".join(parts) + "\n"


def _figure(result: dict[str, Any]) -> Any:
    sweeps = {sweep: rows for sweep, rows in result["sweeps"].items() if rows}
    figure, panels = figures.panels(12, 7, rows=2, columns=len(sweeps))
    for i, (sweep, rows) in enumerate(sweeps.items()):
        above, below = panels[i], panels[len(sweeps) + i]
        runs.draw_curves(above, rows)
        losses = np.concatenate([row["valid"] for row in rows])
        above.set_ylim(losses.min() - 0.1, losses.max() + 0.6)
        above.legend(frameon=False)
        mean, low, high = np.array([t_interval(row["test"]) for row in rows]).T
        x = [row["value"] for row in rows]
        below.errorbar(x, mean, [mean - low, high - mean], fmt="o-", color=figures.COLORS[1])
        below.set_xscale("log", base=2)
        below.set_xlabel(SWEEPS[sweep])
        below.set_ylabel("test nats/byte (bars: 95% over seeds)")
    return figure
