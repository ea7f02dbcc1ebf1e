"""Which (N, n_pert, B) to train for a deadline or a budget, by the update times and curves of short
runs, and how far such a plan can be trusted (paper, Fig. 14)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from soma_jax import planning
from soma_jax.config import build, field
from soma_jax.errors import SomaError
from soma_jax.experiments import output, runs
from soma_jax.report import figures, page
from soma_jax.stats import Interval, t_interval

_SEEN = 0.6  # of a curve; the rest is held out
_FEWEST = 20  # updates: looks at the ensemble are then seven or more, and the first part has five


@dataclasses.dataclass(frozen=True)
class Given:
    """The fields of configs/experiments/plan.py."""

    random_seeds: tuple  # one run of each setting for each
    base: dict  # what all runs set in a config of launch/main.py, and the seed's share
    grid: tuple  # (N, n_pert, B) of each setting
    deadlines: tuple  # wall-clock seconds
    budgets: tuple  # arithmetic operations
    operations: float = field(1e12, above=0)  # of each run
    devices: int = field(1, at_least=1)  # that are planned for, with one expert at a time on each


@dataclasses.dataclass(frozen=True)
class Settings:
    given: Given
    rows: Sequence[runs.Row]


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    given: Given = build(Given, config.to_dict(), "config")
    output.check_seeds(given.random_seeds)
    for name in ("deadlines", "budgets"):
        values = getattr(given, name)
        if not values or not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
            raise SomaError(f"config.{name} must be positive numbers, not {values!r}")
    if not given.grid or not all(
        isinstance(x, Sequence) and len(x) == 3 and all(isinstance(n, int) and n > 0 for n in x)
        for x in given.grid
    ):
        raise SomaError(
            "config.grid must be settings (N, n_pert, B) of positive whole numbers, not "
            f"{given.grid!r}"
        )
    if len(set(given.grid)) < len(given.grid):
        raise SomaError(f"config.grid names a setting twice: {given.grid!r}")
    systems = {
        f"N {experts}, n {n_pert}, B {sequences}": {
            "experts": experts,
            "expert": {"n_pert": n_pert, "sequences": sequences},
        }
        for experts, n_pert, sequences in given.grid
    }
    rows = runs.rows(
        systems,
        given.base,
        operations=given.operations,
        random_seeds=given.random_seeds,
        path="config.grid",
    )
    for row in rows:
        if (updates := row.configs[0].expert.updates) < _FEWEST:
            raise SomaError(
                f"config.operations={given.operations:g} is {updates} updates of {row.name}, and "
                f"a curve of which a part is held out needs {_FEWEST}"
            )
    return Settings(given, rows)


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains what is not trained yet, plans, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a run that was started with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    given = settings.given
    rows = [runs.train(row, directory) for row in settings.rows]
    measured = [_measured(row, directory) for row in settings.rows]
    laws = [planning.fit(m.updates, m.losses, m.name) for m in measured]

    def options(limits: planning.Limits) -> list[planning.Option]:
        return [planning.option(m, law, limits) for m, law in zip(measured, laws, strict=True)]

    looks = [m.updates * planning.seconds_of_round(m, given.devices) for m in measured]
    drawn = min(map(np.min, looks)), max(*map(np.max, looks), *given.deadlines)
    by_deadline = [planning.Limits(given.devices, seconds=s) for s in given.deadlines]
    by_budget = [planning.Limits(given.devices, operations=c) for c in given.budgets]
    result = output.circumstances(command, given.random_seeds) | {
        "operations": given.operations,
        "planned_devices": given.devices,
        "rows": [
            row | _facts(m, law, given.devices, drawn)
            for row, m, law in zip(rows, measured, laws, strict=True)
        ],
        "deadlines": [_plan(options(limits), limits.seconds) for limits in by_deadline],
        "budgets": [_plan(options(limits), limits.operations) for limits in by_budget],
        "decision": _decision(measured, given.devices),
        "caveats": planning.caveats(measured),
    }
    columns, lines = _csv(result)
    output.write(directory, "plan", result, markdown(result), (columns, lines), _figure(result))
    return result


def _measured(row: runs.Row, directory: Path) -> planning.Measured:
    home = directory / "runs" / row.slug
    measured = [planning.read(home / str(config.random_seed)) for config in row.configs]
    (setting,) = planning.by_setting(measured)
    return dataclasses.replace(setting, name=row.name)


def _facts(
    setting: planning.Measured, law: planning.Law, devices: int, drawn: tuple[float, float]
) -> dict[str, Any]:
    """A row's time, its curve, its law between two wall-clock seconds, and how well the first part
    of the curve predicts the rest."""
    each = planning.seconds_of_round(setting, devices)
    ahead = np.geomspace(*drawn, 100) / each
    return {
        "n_pert": setting.config.expert.n_pert,
        "sequences": setting.config.expert.sequences,
        "seconds_per_update": setting.seconds,
        "seconds_of_round": each,
        "curve": [setting.updates.tolist(), setting.losses.tolist()],
        "law": {name: float(getattr(law, name)) for name in _LAW},
        "predicted": np.stack([ahead, *law.predict(ahead)], 1).tolist(),
        "hold_out": planning.hold_out(setting, _SEEN),
    }


_BETTER = (
    "The law predicts the rest better than the last loss that was seen (difference of mean errors)"
)
_LAW = ("floor", "gain", "offset", "power", "residual", "last")


def _plan(options: Sequence[planning.Option], limit: float) -> dict[str, Any]:
    return {"limit": limit, "options": [dataclasses.asdict(o) for o in options]}


def _decision(measured: Sequence[planning.Measured], devices: int) -> dict[str, Any]:
    """What is chosen by the first part of the curves, and what would have been best, for the
    longest deadline by which all were measured."""
    deadline = min(m.updates.max() * planning.seconds_of_round(m, devices) for m in measured)
    limits = planning.Limits(devices, seconds=deadline)
    losses, options = {}, []
    for setting in measured:
        looks = np.unique(setting.updates)
        means = [setting.losses[setting.updates == look].mean() for look in looks]
        within = planning.updates_within(setting, limits)
        losses[setting.name] = float(np.interp(within, looks, means))
        start = planning.first_part(setting, _SEEN)
        law = planning.fit(start.updates, start.losses, setting.name)
        options.append(planning.option(setting, law, limits))
    return {
        "seconds": deadline,
        "chosen": planning.chosen(options).name,
        "predicted": {o.name: o.loss for o in options},
        "measured": losses,
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: what was measured, how well it predicts, and the plans."""
    rows, devices = result["rows"], result["planned_devices"]
    longest, largest = result["deadlines"][-1], result["budgets"][-1]
    parts = [
        runs.introduction(result),
        "**Runs, and the law of each curve**, L(u) = L_inf + A (u + u_0)^-b nats/byte after u "
        "updates of every expert, with 0.05 < b < 3. Seconds of a device for an update of one "
        "expert; of all devices together where they shared its directions.",
        page.table(
            ["", "N", "n_pert", "B", "updates", "s an update", "validation at the end", "L_inf",
             "A", "u_0", "b", "residual"],
            [_row_cells(row) for row in rows],
        ),
        f"**Fitted to the first {_SEEN:.0%} of each curve**, the rest predicted",
        page.table(
            ["", "predicted", "mean error", "largest error", "mean error of the last loss seen",
             "within the 95% interval"],
            [_hold_out_cells(row) for row in rows],
        ),
        _trust(result),
        f"**Deadlines**, on {devices} devices with an expert at a time on each",
        _choices(result["deadlines"], "seconds"),
        f"All settings at {longest['limit']:g} seconds:",
        _table(longest),
        "**Budgets of arithmetic operations**, without a deadline",
        _choices(result["budgets"], "operations"),
        f"All settings at {largest['limit']:.3g} operations:",
        _table(largest),
        "eta L at most: the bound of section 6 of the paper on the rate, 1 / (1 + (d - 1) / "
        "n_pert), in units of one over the smoothness. " + " ".join(result["caveats"]),
        _paper(result),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _row_cells(row: Mapping[str, Any]) -> list[str]:
    law = row["law"]
    return [
        *(row["name"], str(row["experts"]), str(row["n_pert"]), str(row["sequences"])),
        *(f"{row['updates']['expert']:,}", f"{row['seconds_per_update']:.4f}"),
        *(f"{np.mean(row['valid']):.3f}", f"{law['floor']:.2f}", f"{law['gain']:.3g}"),
        *(f"{law['offset']:.3g}", f"{law['power']:.2f}", f"{law['residual']:.4f}"),
    ]


def _errors(held_out: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Of the predictions and of the last loss that was seen, [m] each, nats/byte."""
    losses = np.array(held_out["losses"])
    return np.abs(losses - held_out["predicted"]), np.abs(losses - held_out["last"])


def _covered(held_out: Mapping[str, Any]) -> np.ndarray:
    low, high = np.array(held_out["interval"]).T
    return (low <= held_out["losses"]) & (held_out["losses"] <= high)


def _hold_out_cells(row: Mapping[str, Any]) -> list[str]:
    of_law, of_last = _errors(row["hold_out"])
    covered = _covered(row["hold_out"])
    return [
        *(row["name"], f"{len(covered)} points", f"{of_law.mean():.4f}", f"{of_law.max():.4f}"),
        *(f"{of_last.mean():.4f}", f"{covered.sum()} of {len(covered)}"),
    ]


def _trust(result: Mapping[str, Any]) -> str:
    """What holding out says: of the errors, of the intervals, and of the choice itself."""
    rows, decision = result["rows"], result["decision"]
    pairs = [_errors(row["hold_out"]) for row in rows]
    gained = t_interval([of_last.mean() - of_law.mean() for of_law, of_last in pairs])
    covered = np.concatenate([_covered(row["hold_out"]) for row in rows])
    measured, chosen = decision["measured"], decision["chosen"]
    best = min(measured, key=lambda name: measured[name])
    choice = (
        f"By {decision['seconds']:.1f} seconds on {result['planned_devices']} devices, when every "
        f"setting had been measured, the first {_SEEN:.0%} of the curves choose {chosen} "
        f"(predicted {decision['predicted'][chosen]:.3f}), which has {measured[chosen]:.3f} "
        "nats/byte then: "
    )
    choice += (
        "the lowest of all."
        if chosen == best
        else f"{best} has the lowest, {measured[best]:.3f}. The plan loses "
        f"{measured[chosen] - measured[best]:.4f}."
    )
    lines = [
        output.claim(_BETTER, gained),
        f"- {covered.sum()} of {len(covered)} losses held out are within their 95% intervals.",
        f"- {choice}",
    ]
    return "\n".join(lines)


def _options(plan: Mapping[str, Any]) -> list[planning.Option]:
    return [planning.Option(**values) for values in plan["options"]]


def _choices(plans: Iterable[Mapping[str, Any]], unit: str) -> str:
    lines = []
    for plan in plans:
        options = _options(plan)
        words = planning.verdict(options) if any(o.updates for o in options) else "Nothing fits."
        lines.append(f"- {plan['limit']:g} {unit}: {words}")
    return "\n".join(lines)


def _table(plan: Mapping[str, Any]) -> str:
    return page.table(planning.HEADER, [planning.cells(option) for option in _options(plan)])


def _paper(result: Mapping[str, Any]) -> str:
    """More experts at a fixed width and a large budget: the paper's figure and ours."""
    options = [o for o in _options(result["budgets"][-1]) if o.updates]
    words = (
        "The paper, at width 32 after about 184 GPU-hours: validation loss from 1.84 (N = 1) to "
        "1.72 (N = 256)."
    )
    fewest, most = (f(o.experts for o in options) for f in (min, max)) if options else (0, 0)
    if fewest == most:
        return words + " These settings do not differ in N."
    few, many = (
        min((o for o in options if o.experts == n), key=lambda o: o.loss) for n in (fewest, most)
    )
    # Two independent predictions: the distances to their bounds add as squares do.
    mean = few.loss - many.loss
    low = mean - math.hypot(few.loss - few.interval[0], many.interval[1] - many.loss)
    high = mean + math.hypot(few.interval[1] - few.loss, many.loss - many.interval[0])
    difference = Interval(*map(np.asarray, (mean, low, high)))
    budget = f"{result['budgets'][-1]['limit']:.3g} operations"
    claim = (
        f"At {budget}, {many.name} is predicted to end lower than {few.name} (difference of "
        "predictions)"
    )
    return f"{words}\n\n{output.claim(claim, difference)}"


def _csv(result: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    columns = [f.name for f in dataclasses.fields(planning.Option) if f.name != "interval"]
    lines = [
        [kind, plan["limit"], *(option[c] for c in columns), *option["interval"]]
        for kind in ("deadlines", "budgets")
        for plan in result[kind]
        for option in plan["options"]
    ]
    return ["limits", "limit", *columns, "low", "high"], lines


def _figure(result: Mapping[str, Any]) -> Any:
    """Curves with their laws against the time they take, and the lowest of the laws."""
    figure, (curves, plan) = figures.panels(12, 5, columns=2)
    rows = result["rows"]
    colors = dict(zip((row["name"] for row in rows), figures.cycle(), strict=False))
    laws = []
    for row in rows:
        color, each = colors[row["name"]], row["seconds_of_round"]
        updates, losses = map(np.array, row["curve"])
        x, loss, low, high = np.array(row["predicted"]).T
        seen = (updates.min() <= x) & (x <= updates.max())
        curves.plot(updates * each, losses, "o", color=color, ms=4, label=row["name"])
        for axes in (curves, plan):
            axes.plot(x * each, np.where(seen, loss, np.nan), color=color)
            axes.plot(x * each, np.where(seen, np.nan, loss), color=color, ls=":", lw=1.2)
        curves.fill_between(x * each, low, high, where=~seen, color=color, alpha=0.08, lw=0)
        times = x * each  # the same for all
        laws.append(loss)
    lowest, chosen = np.min(laws, axis=0), np.argmin(laws, axis=0)
    for i, color in enumerate(colors.values()):
        band = np.where(chosen == i, lowest, np.nan)
        plan.plot(times, band, color=color, lw=5, alpha=0.5, solid_capstyle="butt")
    for deadline in result["deadlines"]:
        if times[0] <= deadline["limit"] <= times[-1]:
            plan.axvline(deadline["limit"], color="black", lw=0.8, ls="--", label="a deadline")
    everything = np.concatenate([row["curve"][1] for row in rows])
    span = everything.max() - lowest.min()
    for axes, top in ((curves, everything.max()), (plan, lowest.max())):
        axes.set_ylim(lowest.min() - span / 10, top + span / 20)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(figures.engineering())
        axes.set_xlabel(f"wall-clock seconds on {result['planned_devices']} devices")
        axes.set_ylabel("validation nats/byte")
    curves.set_title("Curves (dots), laws, and beyond what was measured (dotted)")
    plan.set_title("The lowest law (thick) is the choice for a deadline")
    figures.legend(figure, [curves, plan])
    return figure
