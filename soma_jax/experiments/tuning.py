"""The learning rate, then the probe radius, of each system, chosen on the validation text alone
(paper, Tables 6 and 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from soma_jax.config import build, field
from soma_jax.errors import SomaError
from soma_jax.experiments import output, runs
from soma_jax.report import figures, page
from soma_jax.stats import t_interval

# Three seeds, 1.65 RTX 5090 GPU-hours each: nats/byte of the chosen setting; the lowest of five
# rates (1.25e-3) was chosen for both.
PAPER = {"monolith": (2.2628, 0.0047), "SOMA, N = 2": (2.2232, 0.0036)}
PHASES = {"learning_rate": "rate", "eps": "probe radius"}


@dataclasses.dataclass(frozen=True)
class Given:
    """The fields of configs/experiments/tuning.py."""

    random_seeds: tuple  # one run of each setting for each
    base: dict  # what all runs set in a config of launch/main.py
    systems: dict  # name -> what a system sets, and its seed's share of the budget
    learning_rates: tuple
    radii: tuple  # probe radii, tried at the best rate
    eps: float = field(1e-3, above=0)  # the radius at which rates are tried; one of `radii`
    operations: float = field(1e11, above=0)  # of each run


@dataclasses.dataclass(frozen=True)
class Settings:
    given: Given


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config, every setting that may be tried included, and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    given: Given = build(Given, config.to_dict(), "config")
    output.check_seeds(given.random_seeds)
    for name in ("learning_rates", "radii"):
        values = getattr(given, name)
        if not values or not all(isinstance(v, float) and v > 0 for v in values):
            raise SomaError(f"config.{name} must be positive numbers, not {values!r}")
    if given.eps not in given.radii:
        raise SomaError(f"config.eps={given.eps:g} must be one of config.radii: {given.radii}")
    for system in given.systems:
        for rate in given.learning_rates:
            for eps in given.radii:
                _row(given, system, rate, eps)
    return Settings(given)


def _row(given: Given, system: str, rate: float, eps: float) -> runs.Row:
    both = {"learning_rate": rate, "eps": eps}
    name = f"{system}, rate {rate:g}, radius {eps:g}"
    overrides = runs.merged(given.systems[system], {"seed": both, "expert": both})
    (row,) = runs.rows(
        {name: overrides},
        given.base,
        operations=given.operations,
        random_seeds=given.random_seeds,
        path="config.systems",
    )
    return row


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains what is not there yet, chooses, and writes tables, figure and result.json.

    Raises:
      SomaError: bad input, or a run that was trained with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    given = settings.given
    trained: dict[str, dict[str, Any]] = {}

    def tried(system: str, rate: float, eps: float) -> dict[str, Any]:
        row = _row(given, system, rate, eps)
        if row.name not in trained:
            trained[row.name] = runs.train(row, directory)
        return trained[row.name] | {"system": system, "learning_rate": rate, "eps": eps}

    systems = {}
    for system in given.systems:
        rates = [tried(system, rate, given.eps) for rate in given.learning_rates]
        best = _best(rates)
        radii = [tried(system, best["learning_rate"], eps) for eps in given.radii]
        systems[system] = {"learning_rate": rates, "eps": radii, "chosen": _best(radii)}
    result = output.circumstances(command, given.random_seeds) | {
        "operations": given.operations,
        "systems": systems,
    }
    output.write(
        directory,
        "tuning",
        result,
        markdown(result),
        runs.csv_table(list(trained.values())),
        _figure(result),
    )
    return result


def _best(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(rows, key=lambda row: np.mean(row["valid"]))


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: the two tables, the choice, and the paper's."""
    systems = result["systems"]
    seeds = ", ".join(map(str, result["random_seeds"]))
    parts = [
        f"`{result['command']}`",
        f"{result['operations']:.3g} operations a run, random seeds {seeds}; "
        f"{result['devices']} x {result['device']}, {result['date']}. Settings are chosen by the "
        "mean validation loss; the test text is scored for the chosen ones alone.",
    ]
    for phase, words in PHASES.items():
        tried = [row[phase] for row in next(iter(systems.values()))[phase]]
        rows = []
        for system, found in systems.items():
            best = _best(found[phase])[phase]
            cells = []
            for row in found[phase]:
                mean, spread = (
                    np.mean(row["valid"]),
                    np.std(row["valid"], ddof=len(row["valid"]) > 1),
                )
                mark = "**" if row[phase] == best else ""
                cells.append(f"{mark}{mean:.4f} ± {spread:.4f}{mark}")
            rows.append([system, *cells])
        parts.append(f"**The {words}**: validation nats/byte, mean ± standard deviation")
        parts.append(page.table(["", *(f"{value:g}" for value in tried)], rows))
    chosen = []
    for system, found in systems.items():
        row = found["chosen"]
        mean, low, high = t_interval(row["test"])
        paper = "{:.4f} ± {:.4f}".format(*PAPER[system]) if system in PAPER else ""
        chosen.append(
            [
                *(system, f"{row['learning_rate']:g}", f"{row['eps']:g}"),
                *(f"{mean:.4f}", f"{low:.4f} to {high:.4f}", paper),
            ]
        )
    header = ["", "rate", "radius", "test nats/byte", "95% over seeds", "the paper (FineWeb-Edu)"]
    parts += ["**Chosen**", page.table(header, chosen)]
    claims = [
        f"- The paper's lowest rate wins for {system}: "
        + ("reproduced." if row["learning_rate"] == lowest else "**not reproduced**.")
        for system, found in systems.items()
        for row, lowest in [(found["chosen"], found["learning_rate"][0]["learning_rate"])]
    ]
    if {"monolith", "SOMA, N = 2"} <= set(systems):
        of = {name: systems[name]["chosen"] for name in ("SOMA, N = 2", "monolith")}
        words = "SOMA, N = 2, is better than the monolith, each at its best setting"
        claims.append(runs.claim(words, of["SOMA, N = 2"], of["monolith"]))
    return "\n\n".join([*parts, "\n".join(claims)]) + "\n"


def _figure(result: dict[str, Any]) -> Any:
    figure, panels = figures.panels(10, 4, columns=2)
    for axes, (phase, words) in zip(panels, PHASES.items(), strict=True):
        for (system, found), color in zip(result["systems"].items(), figures.cycle(), strict=False):
            x = [row[phase] for row in found[phase]]
            y = np.array([row["valid"] for row in found[phase]])
            axes.plot(x, y.mean(1), "o-", color=color, label=system)
            axes.fill_between(x, y.min(1), y.max(1), color=color, alpha=0.2, lw=0)
        axes.set_xscale("log")
        axes.set_xlabel(words)
        axes.set_ylabel("validation nats/byte")
    panels[0].set_title("The rate (band: random seeds)")
    panels[1].set_title("The probe radius, at the best rate")
    figures.legend(figure, panels)
    return figure
