"""How to split K = n B windows between directions and batch (paper, Appendix F.1, G.2, M.2).

The relative variance v(n, B) of the estimate is measured over a grid, at freshly drawn and at
trained experts, with a shared batch and with windows of a direction's own, and compared with what
section 6 predicts from nu (`gradients`). For a shared batch it also predicts the best B at a fixed
K, B* = clip(sqrt(K nu / a), 1, K), which lies inside the grid only where K nu is above a: the
narrow expert, of few parameters, is there for that.

The last part is the paper's check of what this is worth in training: several (n, B) of one
K, for as many updates, from the same expert.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from scipy import stats

from soma_jax import evaluate, model, randomness, recipe, summary, training
from soma_jax.config import Data, Evaluation, Run, Stage, build, field, stage
from soma_jax.data import store
from soma_jax.errors import SomaError
from soma_jax.experiments import gradients, output, pieces
from soma_jax.files import read_json, write_json
from soma_jax.interrupt import Interruptions
from soma_jax.progress import console
from soma_jax.report import figures, page
from soma_jax.stats import Interval, t_interval

_PAPER = 6e-5  # nats/byte: how near the paper's three allocations are


@dataclasses.dataclass(frozen=True)
class Given:
    """The fields of configs/experiments/batch_allocation.py."""

    random_seeds: tuple  # of the training runs of the check; the first is everything else's
    data: Data
    widths: tuple  # of the experts that are measured; the last one is the check's
    budgets: tuple  # K of each width's grid: windows an estimate
    sequences: tuple  # B of the grids; n_pert = K / B
    training: Stage  # of the trained experts
    measuring: Stage  # of the estimates: the probe, eps, T; n_pert and B are the grid's
    check: Stage  # of the runs from the trained expert
    allocations: tuple  # (n_pert, B) of the check
    windows: int = field(256, at_least=2)  # that the exact gradient is of, and batches are from
    repeats: int = field(256, at_least=2)  # estimates that a variance is the mean of


@dataclasses.dataclass(frozen=True)
class Settings:
    """The same, checked, with the estimates and runs it asks for."""

    given: Given
    grids: Mapping[int, Sequence[Stage]]  # by width
    runs: Sequence[Stage]


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    values = config.to_dict()
    given: Given = build(Given, values, "config")
    output.check_seeds(given.random_seeds)
    _check_numbers("config.widths", given.widths)
    _check_numbers("config.sequences", given.sequences)
    if len(given.budgets) != len(given.widths):
        raise SomaError(
            f"config.budgets={given.budgets!r} must have one K or more for each of config.widths="
            f"{given.widths!r}"
        )
    stage(values["training"], "config.training")
    if given.measuring.estimator != "spsa" or given.measuring.probe in ("sparse", "gaussian"):
        raise SomaError(
            "config.measuring: the prediction is of config.measuring.estimator=spsa and of "
            "config.measuring.probe=dense, rank_one or flipout"
        )
    grids = {}
    for width, budgets in zip(given.widths, given.budgets, strict=True):
        _check_numbers("config.budgets", budgets)
        if lost := [k for k in budgets if all(k % batch for batch in given.sequences)]:
            raise SomaError(
                f"config.budgets has {lost[0]}, which no number of config.sequences="
                f"{given.sequences!r} divides"
            )
        grids[width] = [
            stage(
                values["measuring"]
                | {"n_pert": budget // batch, "sequences": batch, "own_batch": own},
                "config.measuring",
            )
            for own, budget, batch in itertools.product((False, True), budgets, given.sequences)
            if budget % batch == 0
        ]
    runs = []
    for allocation in given.allocations:
        _check_numbers("config.allocations", allocation, distinct=False)
        if len(allocation) != 2 or math.prod(allocation) != math.prod(given.allocations[0]):
            raise SomaError(
                "config.allocations must be pairs (n_pert, B) of one product, not "
                f"{given.allocations!r}"
            )
        n_pert, batch = allocation
        runs.append(stage(values["check"] | {"n_pert": n_pert, "sequences": batch}, "config.check"))
    if len(runs) < 2:
        raise SomaError("config.allocations must have two pairs (n_pert, B) or more to compare")
    return Settings(given, grids, runs)


def _check_numbers(where: str, values: Any, distinct: bool = True) -> None:
    good = isinstance(values, tuple) and values and all(type(v) is int and v > 0 for v in values)
    if not good or (distinct and len(set(values)) < len(values)):
        raise SomaError(
            f"{where} must be {'different ' if distinct else ''}positive whole numbers, not "
            f"{values!r}"
        )


def best_batch(parameters: int, nu: float, budget: int) -> float:
    """B* of a shared batch at a budget of `budget` = n B windows (paper, section 6)."""
    return min(max(math.sqrt(budget * nu / (parameters - 1)), 1.0), float(budget))


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains and measures what is not there yet, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a directory with what other settings have left.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    given = settings.given
    pieces.adopt(directory, dataclasses.asdict(given))
    with Interruptions() as interruptions:
        train, valid = (
            recipe.open_corpus(given.data, getattr(given.data, split), directory / "data" / split)
            for split in ("train", "valid")
        )
        experts: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        for width, grid in settings.grids.items():
            drawn = model.init(
                randomness.key(given.random_seeds[0], "init"), model.ExpertConfig(width=width)
            )
            (trained,) = _trained(
                "training", f"width {width}", directory / "runs" / str(width), [drawn],
                given.training, train, given.random_seeds[:1], interruptions,
            )  # fmt: skip
            for start, params in (("drawn", drawn), ("trained", trained)):
                home = directory / "measured" / f"{width}-{start}"
                console.print(f"width {width}, {start}: measuring {len(grid)} variances")
                measured, cells = _measured(settings, home, params, grid, train)
                of = {"width": width, "start": start}
                experts.append(of | measured)
                rows += [of | cell for cell in cells]
        runs = list(_check(settings, directory, trained, train, valid, interruptions))
    one = settings.runs[0]
    result = output.circumstances(command, given.random_seeds) | {
        "window": given.measuring.window,
        "windows": given.windows,
        "repeats": given.repeats,
        "training_byte_forwards": given.training.updates * given.training.byte_forwards_per_update,
        # Of each expert, drawn and trained.
        "measuring_byte_forwards": 2
        * given.repeats
        * sum(s.byte_forwards_per_update for grid in settings.grids.values() for s in grid),
        "experts": experts,
        "rows": rows,
        "optima": _optima(experts, rows),
        "check": {
            "updates": given.check.updates,
            "byte_forwards": one.updates * one.byte_forwards_per_update,
            "window": given.check.window,
            "runs": runs,
        },
    }
    columns = ["width", "start", "own_batch", "n_pert", "sequences", "measured", "low", "high",
               "predicted"]  # fmt: skip
    lines = [[*(row[c] for c in columns[:6]), *row["interval"], row["predicted"]] for row in rows]
    output.write(
        directory, "batch_allocation", result, markdown(result), (columns, lines), _curves(result)
    )
    return result


def _trained(
    kind: str,
    name: str,
    home: Path,
    params: Sequence[model.Params],
    stage: Stage,
    corpus: store.Store,
    random_seeds: Sequence[int],
    interruptions: Interruptions,
) -> list[model.Params]:
    """Experts trained side by side on the whole corpus, one for each random seed."""
    trainees = [
        training.trainee(
            home / str(seed), some, stage, corpus, np.arange(corpus.n_chunks),
            random_seed=seed, kind=kind, index=0, validation_share=0.01,
        )
        for seed, some in zip(random_seeds, params, strict=True)
    ]  # fmt: skip
    return [s.params for s in training.train(name, trainees, stage, Run(), interruptions)]


def _measured(
    settings: Settings,
    home: Path,
    params: model.Params,
    grid: Sequence[Stage],
    corpus: store.Store,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What there is to know of an expert's gradient, and the variance of each estimate."""
    given = settings.given
    drawn = gradients.draw_windows(
        corpus,
        np.arange(corpus.n_chunks),
        given.windows,
        given.measuring.window,
        np.random.default_rng(given.random_seeds[0]),
    )
    exact = gradients.exact(params, drawn)
    cells = []
    for i, estimate in enumerate(grid):
        file = home / f"{i:03d}.json"
        if not file.exists():
            rng = np.random.default_rng((given.random_seeds[0], i))
            batches = gradients.draw_batches(len(drawn), estimate, given.repeats, rng)
            keys = [
                randomness.key(given.random_seeds[0], "batch allocation", i, repeat)
                for repeat in range(given.repeats)
            ]
            write_json(file, gradients.measure(exact, estimate, keys, batches))
        cells.append(read_json(file))
    return {"parameters": exact.gradient.size, "nu": exact.nu}, cells


def _check(
    settings: Settings,
    directory: Path,
    params: model.Params,
    train: store.Store,
    valid: store.Store,
    interruptions: Interruptions,
) -> Iterator[dict[str, Any]]:
    """Validation losses of each allocation, one for each random seed."""
    given, scored = settings.given, summary.drawn_windows(valid, Evaluation())
    for allocated in settings.runs:
        name = f"{allocated.n_pert} x {allocated.sequences}"
        experts = _trained(
            "check", name, directory / "runs" / name.replace(" ", ""),
            [params] * len(given.random_seeds), allocated, train, given.random_seeds, interruptions,
        )  # fmt: skip
        yield {
            "n_pert": allocated.n_pert,
            "sequences": allocated.sequences,
            "start": evaluate.score([params], None, scored, 1).nats(1),
            "losses": [evaluate.score([one], None, scored, 1).nats(1) for one in experts],
        }


def _optima(
    experts: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """For each expert and K of a shared batch, the best B as predicted and as measured.

    `not_worse` are the measured B whose interval reaches below the measured best's upper end.
    """
    optima = []
    for expert in experts:
        mine = [r for r in rows if _same(r, expert) and not r["own_batch"]]
        for budget in dict.fromkeys(map(_budget, mine)):
            cells = [r for r in mine if _budget(r) == budget]
            best = min(cells, key=lambda r: r["measured"])
            optima.append(
                {
                    **{name: expert[name] for name in ("width", "start")},
                    "budget": budget,
                    "predicted": best_batch(expert["parameters"], expert["nu"], budget),
                    "predicted_on_grid": min(cells, key=lambda r: r["predicted"])["sequences"],
                    "measured": best["sequences"],
                    "not_worse": [
                        r["sequences"] for r in cells if r["interval"][0] <= best["interval"][1]
                    ],
                }
            )
    return optima


def _same(row: Mapping[str, Any], expert: Mapping[str, Any]) -> bool:
    return row["width"] == expert["width"] and row["start"] == expert["start"]


def _budget(row: Mapping[str, Any]) -> int:
    return row["n_pert"] * row["sequences"]


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: variances, optima, the check, and what became of the claims."""
    seeds = ", ".join(map(str, result["random_seeds"]))
    parts = [
        f"`{result['command']}`",
        f"Random seeds {seeds} (the first one for all but the check); {result['devices']} x "
        f"{result['device']}, {result['date']}. Trained experts have had "
        f"{result['training_byte_forwards'] / 1e6:.3g}M byte-forwards; all variances together took "
        f"{result['measuring_byte_forwards'] / 1e6:.3g}M. A variance is the mean of "
        f"{result['repeats']} estimates with its 95% interval, relative to the exact gradient of "
        f"{result['windows']} windows of {result['window']} bytes, from which batches are drawn.",
        "**Where the best B of a shared batch lies.** \"not worse\": every B whose interval "
        "reaches below the upper end of the best one's",
        page.table(
            ["expert", "parameters", "nu", "K = n B", "B*", "best of the grid, predicted",
             "measured", "not worse"],
            [_optimum_cells(result, optimum) for optimum in result["optima"]],
        ),
        _verdict_on_optima(result["optima"]),
        "**Relative variance, measured and predicted**",
        page.table(
            ["expert", "windows", "K", "n_pert", "B", "measured", "95% interval", "predicted"],
            [_cells(row) for row in result["rows"]],
            left=2,
        ),
        _verdict_on_variances(result["rows"]),
        *_check_section(result["check"]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _optimum_cells(result: Mapping[str, Any], optimum: Mapping[str, Any]) -> list[str]:
    (expert,) = (e for e in result["experts"] if _same(optimum, e))
    return [
        f"width {optimum['width']}, {optimum['start']}",
        f"{expert['parameters']:,}",
        f"{expert['nu']:.3g}",
        str(optimum["budget"]),
        f"{optimum['predicted']:.2f}",
        str(optimum["predicted_on_grid"]),
        str(optimum["measured"]),
        ", ".join(map(str, optimum["not_worse"])),
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    low, high = row["interval"]
    return [
        f"width {row['width']}, {row['start']}",
        "own" if row["own_batch"] else "shared",
        *(str(n) for n in (_budget(row), row["n_pert"], row["sequences"])),
        f"{row['measured']:.4g}",
        f"{low:.4g} to {high:.4g}",
        f"{row['predicted']:.4g}",
    ]


def _verdict_on_optima(optima: Sequence[Mapping[str, Any]]) -> str:
    wrong = [o for o in optima if o["predicted_on_grid"] not in o["not_worse"]]
    same = [o for o in optima if o["predicted_on_grid"] == o["measured"]]
    alone = [o for o in optima if o["not_worse"] == [o["predicted_on_grid"]]]
    inside = [o for o in optima if o["predicted"] > 1]
    if wrong:
        words = f"**not reproduced** in {len(wrong)} of {len(optima)} cases"
    elif len(alone) == len(optima):
        words = "reproduced"
    else:
        words = (
            f"reproduced in {len(alone)} of {len(optima)} cases, undecided in the others, where "
            "the intervals leave more than one B (the best one is the predicted one in "
            f"{len(same)})"
        )
    return (
        f"The paper's claim that B* is the best B: {words}. B* is above 1 in "
        f"{len(inside)} of {len(optima)} cases; in the others a is at least K nu, and one sequence "
        "is best."
    )


def _verdict_on_variances(rows: Sequence[Mapping[str, Any]]) -> str:
    within = sum(row["interval"][0] <= row["predicted"] <= row["interval"][1] for row in rows)
    ratios = [row["measured"] / row["predicted"] for row in rows]
    # If each interval held its prediction with probability 0.95, so few would do so once in 40.
    good = stats.binom.cdf(within, len(rows), 0.95) > 0.025
    words = "reproduced" if good else "**not reproduced** within the intervals"
    return (
        f"The paper's v(n, B): {words}. {within} of {len(rows)} intervals hold the prediction (95% "
        f"of them should); measured over predicted is {min(ratios):.2f} to {max(ratios):.2f}, "
        f"{float(np.median(ratios)):.2f} in the middle."
    )


def _check_section(check: Mapping[str, Any]) -> list[str]:
    rows = []
    for one in check["runs"]:
        mean, low, high = t_interval(one["losses"])
        losses = ", ".join(f"{loss:.4f}" for loss in one["losses"])
        cells = [str(one["n_pert"]), str(one["sequences"]), f"{mean:.4f}"]
        rows.append([*cells, f"{low:.4f} to {high:.4f}", losses])
    means = [float(np.mean(one["losses"])) for one in check["runs"]]
    differences = [_difference(a, b) for a, b in itertools.combinations(check["runs"], 2)]
    apart = [words for words, interval in differences if interval.low > 0 or interval.high < 0]
    farthest = max(max(abs(d.low), abs(d.high)) for _, d in differences)
    if apart:
        verdict = f"**not reproduced**: {'; '.join(apart)}"
    elif farthest <= _PAPER:
        verdict = "reproduced"
    else:
        verdict = (
            "undecided: no difference of two has an interval without 0, but the intervals reach "
            f"to {farthest:.2g}"
        )
    spent, start = check["byte_forwards"] / 1e6, check["runs"][0]["start"]
    return [
        f"**{check['updates']} updates from the trained expert of the last width**, validation "
        f"nats/byte; {spent:.3g}M byte-forwards a run, T = {check['window']}. It starts at "
        f"{start:.4f}",
        page.table(["n_pert", "B", "mean", "95% over seeds", "each seed"], rows),
        f"The paper's (64, 1024), (256, 256) and (1024, 64) are within {_PAPER:g} nats/byte after "
        f"512 updates. Here the means are {max(means) - min(means):.4f} apart. That the split "
        f"makes no difference: {verdict}.",
    ]


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, Interval]:
    interval = t_interval(np.subtract(one["losses"], other["losses"]))
    names = [f"({run['n_pert']}, {run['sequences']})" for run in (one, other)]
    return (
        f"{' less '.join(names)} is {interval.mean:+.4f}, 95% {interval.low:+.4f} to "
        f"{interval.high:+.4f}"
    ), interval


def _curves(result: dict[str, Any]) -> Any:
    experts = result["experts"]
    figure, panels = figures.panels(11, 1 + 3.6 * (len(experts) // 2), len(experts) // 2, 2)
    colors = dict(zip(dict.fromkeys(map(_budget, result["rows"])), figures.cycle(), strict=False))
    for axes, expert in zip(panels, experts, strict=True):
        mine = [row for row in result["rows"] if _same(row, expert)]
        for budget in dict.fromkeys(map(_budget, mine)):
            color = colors[budget]
            b = np.geomspace(1, budget, 100)
            for own, dashes, marker in ((False, "-", "o"), (True, ":", "s")):
                cells = [r for r in mine if _budget(r) == budget and r["own_batch"] == own]
                predicted = [
                    gradients.predicted_variance(
                        expert["parameters"], expert["nu"], budget / x, x, own
                    )
                    for x in b
                ]
                axes.plot(b, predicted, dashes, color=color, lw=1.2)
                y = np.array([r["measured"] for r in cells])
                low, high = np.array([r["interval"] for r in cells]).T
                axes.errorbar(
                    [r["sequences"] for r in cells], y, [y - low, high - y], ls="", ms=4,
                    marker=marker, mfc="none" if own else color, color=color,
                    label=f"K = {budget}, {'own windows' if own else 'shared batch'}",
                )  # fmt: skip
            star = best_batch(expert["parameters"], expert["nu"], budget)
            at = gradients.predicted_variance(
                expert["parameters"], expert["nu"], budget / star, star, False
            )
            axes.plot(star, at, "*", color="black", ms=9, zorder=4, label="B*")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("B, windows a direction sees (n_pert = K / B)")
        axes.set_ylabel("relative variance (lines: predicted)")
        axes.set_title(f"Width {expert['width']}, {expert['start']}: nu = {expert['nu']:.3g}")
    figures.legend(figure, panels)
    return figure
