"""How to spend byte-forwards: a shared batch or windows of a direction's own, how many of each,
which probe, at which rates (paper, Appendix F.1, G.2; here at one expert's scale).

Every row trains one expert for each random seed on the same budget. Beside the losses stands the
relative variance of the estimate, E|g' - g|^2 / |g|^2, measured against the exact gradient of the
trained expert, and as predicted (paper, section 6): with a = (parameters - 1) and nu the variance
of a window's gradient over |g|^2,

    shared batch of B windows:      v = a/n + nu/B + a nu/(n B)
    B windows of a direction's own: v = [a + (a + 1) nu/B] / n

Reverse mode is used to measure here, and nowhere to train.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from soma_jax import evaluate, model, randomness, recipe, summary, training
from soma_jax.config import Data, Evaluation, Run, Stage, build, field, stage
from soma_jax.data import store, windows
from soma_jax.errors import SomaError
from soma_jax.experiments import gradients, output, pieces
from soma_jax.files import read_json, write_json
from soma_jax.interrupt import Interruptions
from soma_jax.progress import activity, console
from soma_jax.report import figures, page
from soma_jax.stats import t_interval

_OBSERVATIONS = 12  # looks at the test loss in a run, for the figure
STARTS = {"scratch": "from scratch", "seed": "from the seed"}


@dataclasses.dataclass(frozen=True)
class Given:
    """The fields of configs/experiments/allocation.py."""

    random_seeds: tuple  # one run of each row for each
    data: Data
    base: Stage  # what all rows have in common
    scratch: dict  # name -> what differs from base
    seed: dict  # the same, of rows that start from what seed_row has reached
    seed_row: str  # a row of scratch
    byte_forwards: float = field(26e6, above=0)  # of each run
    variance_windows: int = field(2048, at_least=16)  # the exact gradient is of as many
    variance_repeats: int = field(64, at_least=2)  # estimates that a variance is the mean of


@dataclasses.dataclass(frozen=True)
class Settings:
    """The same, checked, with every row a whole Stage."""

    given: Given
    rows: Mapping[str, Mapping[str, Stage]]  # by start, by name


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    values = config.to_dict()
    given: Given = build(Given, values, "config")
    output.check_seeds(given.random_seeds)
    rows: dict[str, dict[str, Stage]] = {start: {} for start in STARTS}
    for start in STARTS:
        for name, overrides in values[start].items():
            where = f"config.{start}[{name!r}]"
            if not isinstance(overrides, dict):
                raise SomaError(f"{where} must be fields of a Stage, not {overrides!r}")
            if "updates" in overrides:
                raise SomaError(f"{where}.updates follows from config.byte_forwards: leave it out")
            if _slug(name) in map(_slug, rows[start]) or not _slug(name):
                raise SomaError(f"{where} needs a name of letters or digits of its own")
            row = stage(values["base"] | overrides, where)
            updates = int(given.byte_forwards / row.byte_forwards_per_update)
            if updates < 1:
                raise SomaError(
                    f"config.byte_forwards={given.byte_forwards:g} is less than one update of "
                    f"{where}: {row.byte_forwards_per_update}"
                )
            rows[start][name] = dataclasses.replace(row, updates=updates)
    if not rows["scratch"]:
        raise SomaError("config.scratch has no rows")
    if given.seed_row not in rows["scratch"]:
        raise SomaError(
            f"config.seed_row={given.seed_row!r} is not a row of config.scratch: "
            f"{', '.join(rows['scratch'])}"
        )
    return Settings(given, rows)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains what is not trained yet, measures, and writes table, figures and result.json.

    Raises:
      SomaError: bad input, or a row that was trained with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    given, data = settings.given, directory / "data"
    with Interruptions() as interruptions:
        corpus = {
            split: recipe.open_corpus(given.data, getattr(given.data, split), data / split)
            for split in ("train", "test")
        }
        screened = windows.screen(corpus["train"].documents(), corpus["test"].documents())
        test = summary.drawn_windows(corpus["test"], Evaluation(), screened)
        shape = model.ExpertConfig()
        drawn = [model.init(randomness.key(s, "init"), shape) for s in given.random_seeds]
        starts, results = {"scratch": drawn}, []
        for start in STARTS:
            for name, row in settings.rows[start].items():
                console.print(f"{STARTS[start]}: {name}")
                experts, result = _row(
                    settings, directory, start, name, row, starts[start], corpus["train"], test,
                    interruptions,
                )  # fmt: skip
                results.append(result)
                if (start, name) == ("scratch", given.seed_row):
                    starts["seed"] = experts
        with activity("measuring the variance of the estimate"):
            variance = _variances(starts["seed"][0], corpus["train"], settings)
    result = output.circumstances(command, given.random_seeds) | {
        "byte_forwards": given.byte_forwards,
        "test_windows": len(test),
        "seed_row": given.seed_row,
        "rows": results,
        "variance": variance,
    }
    _write(directory, result)
    return result


def _row(
    settings: Settings,
    directory: Path,
    start: str,
    name: str,
    stage: Stage,
    params: Sequence[model.Params],
    corpus: store.Store,
    test: windows.Windows,
    interruptions: Interruptions,
) -> tuple[list[model.Params], dict[str, Any]]:
    """Trains a row's experts, one for each random seed, side by side."""
    home = directory / "runs" / f"{start}-{_slug(name)}"
    mine = {
        "stage": dataclasses.asdict(stage),
        "random_seeds": list(settings.given.random_seeds),
        "data": dataclasses.asdict(settings.given.data),
    }
    if start == "seed":
        mine["seed"] = dataclasses.asdict(settings.rows["scratch"][settings.given.seed_row])
    pieces.adopt(home, mine)
    trainees = [
        training.trainee(
            home / str(seed), some, stage, corpus, np.arange(corpus.n_chunks),
            random_seed=seed, kind=start, index=0, validation_share=0.01,
        )
        for seed, some in zip(settings.given.random_seeds, params, strict=True)
    ]  # fmt: skip

    def losses(experts: Sequence[model.Params]) -> list[float]:
        return [evaluate.score([one], None, test, 1).nats(1) for one in experts]

    def observe(update: int, experts: list[model.Params]) -> None:
        before = time.monotonic()
        scored = losses(experts)
        point = {"test": scored, "seconds": time.monotonic() - before}
        write_json(home / "curve" / f"{update:08d}.json", point)

    states = training.train(
        name,
        trainees,
        stage,
        Run(),
        interruptions,
        observe=observe,
        observe_every=-(-stage.updates // _OBSERVATIONS),
    )
    experts = [state.params for state in states]
    lines = (home / str(settings.given.random_seeds[0]) / "metrics.jsonl").read_text().splitlines()
    seconds = {m["update"]: m["seconds"] / len(trainees) for m in map(json.loads, lines)}
    updates = sorted(seconds)
    curve, looking = [], 0.0
    for file in sorted((home / "curve").glob("*.json")):
        update, point = int(file.stem), read_json(file)
        training_seconds = float(np.interp(update, updates, [seconds[u] for u in updates]))
        curve.append(
            {
                "byte_forwards": update * stage.byte_forwards_per_update,
                "seconds": training_seconds - looking,
                "test": point["test"],
            }
        )
        looking += point["seconds"] / len(trainees)
    final = losses(experts)
    interval = t_interval(final)
    return experts, {
        "start": start,
        "name": name,
        "test": final,
        "mean": float(interval.mean),
        "interval": [float(interval.low), float(interval.high)],
        # Of one run, compilation included: the seeds' runs share the machine.
        "seconds": seconds[updates[-1]] - looking,
        "byte_forwards": stage.updates * stage.byte_forwards_per_update,
        "stage": dataclasses.asdict(stage),
        "curve": curve,
    }


def _variances(params: model.Params, corpus: store.Store, settings: Settings) -> dict[str, Any]:
    """Measured and predicted relative variance of estimates, on windows drawn from a fixed set."""
    given, rng = settings.given, np.random.default_rng(0)
    drawn = gradients.draw_windows(
        corpus, np.arange(corpus.n_chunks), given.variance_windows, 128, rng
    )
    exact = gradients.exact(params, drawn)
    keys = [randomness.key(0, "variance", repeat) for repeat in range(given.variance_repeats)]
    rows = []
    for law, n_pert, sequences, own in _MEASURED:
        shape = (n_pert, sequences) if own else (sequences,)
        batches = [rng.integers(0, len(drawn), shape) for _ in keys]
        stage = Stage(probe=law, n_pert=n_pert, sequences=sequences, own_batch=own, eps=1e-3)
        rows.append(gradients.measure(exact, stage, keys, batches))
    return {
        "nu": exact.nu,
        "window": drawn.shape[1] - 1,
        "parameters": exact.gradient.size,
        "norm": exact.squared_norm,
        "rows": rows,
    }


# Equal byte-forwards (256 windows), but for the last, which shows the law of 1/n.
_MEASURED = [
    ("dense", 16, 16, False),
    ("dense", 64, 4, False),
    ("dense", 16, 16, True),
    ("dense", 64, 4, True),
    ("dense", 256, 1, True),
    ("rank_one", 256, 1, True),
    ("flipout", 256, 1, True),
    ("rank_one", 64, 1, True),
]


_FIELDS = ("n_pert", "sequences", "window", "own_batch", "probe", "learning_rate", "eps",
           "decay_to", "head_sequences", "head_rate", "whitening", "updates")  # fmt: skip


def _write(directory: Path, result: dict[str, Any]) -> None:
    columns = ["start", "name", "mean", "low", "high", "seconds", "byte_forwards", *_FIELDS]
    rows = [
        [
            *(row["start"], row["name"], row["mean"], *row["interval"], row["seconds"]),
            *(row["byte_forwards"], *(row["stage"][field] for field in _FIELDS)),
        ]
        for row in result["rows"]
    ]
    output.write(
        directory, "allocation", result, markdown(result), (columns, rows), _curves(result)
    )


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: its command, the losses of each start, and the variances."""
    parts = [f"`{result['command']}`"]
    for start, words in STARTS.items():
        rows = [row for row in result["rows"] if row["start"] == start]
        if not rows:
            continue
        parts.append(f"**One expert {words}**, {result['byte_forwards'] / 1e6:g}M byte-forwards")
        parts.append(page.table(_HEADER, [_cells(row) for row in rows]))
    variance = result["variance"]
    parts.append(
        f"**Relative variance of the estimate**, at the seed: {variance['parameters']:,} "
        f"parameters, nu = {variance['nu']:.1f} for windows of {variance['window']} bytes"
    )
    rows = [
        [
            f"{row['probe']}, {'own windows' if row['own_batch'] else 'shared batch'}",
            str(row["n_pert"]),
            str(row["sequences"]),
            f"{row['measured']:.0f}",
            f"{row['interval'][0]:.0f} to {row['interval'][1]:.0f}",
            f"{row['predicted']:.0f}",
        ]
        for row in variance["rows"]
    ]
    parts.append(page.table(["", "n_pert", "B", "measured", "95% interval", "predicted"], rows))
    return "\n\n".join(parts) + "\n"


_HEADER = ["", "n_pert", "B", "T", "windows", "probe", "rate", "eps", "rate of E", "whitening",
           "updates", "seconds", "test nats/byte", "95% over seeds"]  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    stage = row["stage"]
    return [
        row["name"],
        *(str(stage[field]) for field in ("n_pert", "sequences", "window")),
        "own" if stage["own_batch"] else "shared",
        stage["probe"],
        f"{stage['learning_rate']:g}" + (" cos" if stage["decay_to"] < 1 else ""),
        f"{stage['eps']:g}",
        f"x {stage['head_rate']:g}" if stage["head_sequences"] else "frozen",
        f"{stage['whitening']:g}" if stage["whitening"] else "",
        str(stage["updates"]),
        f"{row['seconds']:.0f}",
        f"{row['mean']:.3f}",
        f"{row['interval'][0]:.3f} to {row['interval'][1]:.3f}",
    ]


def _curves(result: dict[str, Any]) -> Any:
    starts = [s for s in STARTS if any(row["start"] == s for row in result["rows"])]
    figure, panels = figures.panels(11, 1.2 + 4 * len(starts), rows=len(starts), columns=2)
    names = list(dict.fromkeys(row["name"] for row in result["rows"]))
    axis_label = {
        "byte_forwards": "byte-forwards of a run",
        "seconds": f"seconds of a run on {result['devices']} x {result['device']}",
    }
    for i, start in enumerate(starts):
        rows = [row for row in result["rows"] if row["start"] == start]
        for axes, unit in zip(panels[2 * i : 2 * i + 2], axis_label, strict=True):
            for row in rows:
                color = figures.COLORS[names.index(row["name"]) % len(figures.COLORS)]
                points = [(p[unit], p["test"]) for p in row["curve"]]
                points.append((row[unit], row["test"]))
                x = [p[0] for p in points]
                y = np.array([p[1] for p in points])
                axes.plot(x, y.mean(1), color=color, label=row["name"], marker=".")
                axes.fill_between(x, y.min(1), y.max(1), color=color, alpha=0.2, lw=0)
            ends = [loss for row in rows for loss in row["test"]]
            axes.set_ylim(min(ends) - 0.03, max(ends) + 0.35)
            axes.set_xlabel(axis_label[unit])
            axes.set_ylabel("test nats/byte")
            axes.set_title(f"One expert {STARTS[start]} (band: all random seeds)")
            axes.xaxis.set_major_formatter(figures.engineering())
    figures.legend(figure, panels)
    return figure
