"""Experiments whose rows are whole runs: each row a config of launch/main.py, trained for each
random seed on one budget of arithmetic operations and scored by the same protocol on the same
bytes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from soma_jax import recipe
from soma_jax.config import Config, build, default_config, field, resolve
from soma_jax.errors import SomaError
from soma_jax.experiments import output
from soma_jax.files import read_json_lines
from soma_jax.progress import console
from soma_jax.report import figures, page
from soma_jax.stats import Interval, t_interval
from soma_jax.workdir import Workdir

# For configs: the paper's corpus, where a user keeps it.
FINEWEB = {split: f"fineweb-edu/{split}/*.parquet" for split in ("train", "valid", "test")}
TEXTS = {"test": "test text", "wikitext103_test": "WikiText-103 test"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One system, a run for each random seed."""

    name: str
    configs: tuple[Config, ...]

    @property
    def slug(self) -> str:
        return slug(self.name)


@dataclasses.dataclass(frozen=True)
class Given:
    """The fields of the config of an experiment that is a list of rows."""

    random_seeds: tuple  # one run of each row for each
    base: dict  # what all rows set in a config of launch/main.py
    rows: dict  # name -> what a row sets, and its seed's share of the budget
    operations: float = field(1e12, above=0)  # of each run


@dataclasses.dataclass(frozen=True)
class Settings:
    """The same, checked, with every row's configs."""

    given: Given
    rows: Sequence[Row]


def resolve_rows(config: ml_collections.ConfigDict) -> Settings:
    """Checks such a config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    given: Given = build(Given, config.to_dict(), "config")
    output.check_seeds(given.random_seeds)
    if not given.rows:
        raise SomaError("config.rows has no rows")
    return Settings(
        given,
        rows(
            given.rows,
            given.base,
            operations=given.operations,
            random_seeds=given.random_seeds,
            path="config.rows",
        ),
    )


def run_rows(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains and scores every row: the result of such an experiment.

    Raises:
      SomaError: bad input, or a row that was trained with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    return output.circumstances(command, settings.given.random_seeds) | {
        "operations": settings.given.operations,
        "rows": [train(row, directory) for row in settings.rows],
    }


def run_and_write(
    name: str,
    settings: Settings,
    directory: Path,
    command: str,
    markdown: Callable[[dict[str, Any]], str],
    above: float,
) -> dict[str, Any]:
    """`run_rows`, and its files with a line for each run and the rows' figure (`rows_figure`)."""
    result = run_rows(settings, directory, command)
    figure = rows_figure(result["rows"], above)
    output.write(directory, name, result, markdown(result), csv_table(result["rows"]), figure)
    return result


def both(**fields: Any) -> dict[str, Any]:
    """Fields of a stage, for the seed and the experts."""
    return {"seed": fields, "expert": dict(fields)}


def slug(name: str) -> str:
    """A directory's name for a row."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")


def merged(*groups: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, the later ones over the earlier."""
    result: dict[str, Any] = {}
    for group in groups:
        for name, value in group.items():
            both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
            result[name] = merged(result[name], value) if both else value
    return result


def rows(
    systems: Mapping[str, Any],
    base: Mapping[str, Any],
    *,
    operations: float,
    random_seeds: Sequence[int],
    path: str,
) -> list[Row]:
    """The rows of an experiment, their updates given by the budget.

    Args:
      systems: by name, what a row sets in a config (nested) on top of `base`, and `seed_share`, the
        part of the budget that its seed gets (default 0: no seed).
      base: what all rows set.
      operations: of each run, in the matrix products of training, all experts and the seed.
      random_seeds: of the runs.
      path: names `systems` in errors.

    Raises:
      SomaError: naming the row and the field.
    """
    result: list[Row] = []
    for name, overrides in systems.items():
        where = f"{path}[{name!r}]"
        if not isinstance(overrides, Mapping):
            raise SomaError(f"{where} must be fields of a config, not {overrides!r}")
        if not slug(name) or slug(name) in [row.slug for row in result]:
            raise SomaError(f"{where} needs a name of letters or digits of its own")
        values = merged(base, overrides)
        share = values.pop("seed_share", 0.0)
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise SomaError(f"{where}.seed_share must be at least 0 and below 1, not {share!r}")
        for stage in ("seed", "expert"):
            if "updates" in values.get(stage, {}):
                raise SomaError(f"{where}.{stage}.updates follows from the budget: leave it out")
        values = merged(default_config().to_dict(), values)
        values["seed"]["updates"] = values["expert"]["updates"] = 0
        configs = []
        for seed in random_seeds:
            values["random_seed"] = seed
            try:
                config = resolve(ml_collections.ConfigDict(values))
            except SomaError as error:
                raise SomaError(f"{where}: {error}") from error
            configs.append(_within(config, operations, share, where))
        result.append(Row(name, tuple(configs)))
    return result


def _within(config: Config, operations: float, share: float, where: str) -> Config:
    """The config with as many updates as the budget allows."""
    stages = {}
    for name, part, count in (("seed", share, 1), ("expert", 1 - share, config.experts)):
        stage = getattr(config, name)
        one = count * stage.byte_forwards_per_update * config.expert_shape.operations_per_byte
        updates = int(part * operations / one)
        if part and not updates:
            raise SomaError(
                f"{where}: a budget of {part * operations:.3g} operations for the {name} stage is "
                f"less than one update of it, {one:.3g}"
            )
        stages[name] = dataclasses.replace(stage, updates=updates)
    return dataclasses.replace(config, **stages)


def train(row: Row, directory: Path) -> dict[str, Any]:
    """Trains and scores what is not there yet; the row's part of a result.

    Raises:
      SomaError: bad input, or a run that was started with other settings.
      Interrupted: on SIGTERM or Ctrl-C, after saving.
    """
    summaries, curves = [], []
    for config in row.configs:
        console.print(f"[bold]{row.name}, random seed {config.random_seed}[/bold]")
        workdir = Workdir(directory / "runs" / row.slug / str(config.random_seed))
        summaries.append(recipe.run(config, workdir, show=False))
        curves.append(read_json_lines(workdir.curve))
    first, config = summaries[0], row.configs[0]
    return {
        "name": row.name,
        "experts": config.experts,
        "active": min(config.active, config.experts),
        "width": config.model.width,
        "parameters": first["parameters"],
        "byte_forwards": first["byte_forwards"],
        "operations": first["operations"],
        "updates": {"seed": config.seed.updates, "expert": config.expert.updates},
        "stage": dataclasses.asdict(config.expert),
        "valid": [s["valid"] for s in summaries],
        **{text: [s[text]["ensemble"] for s in summaries] for text in TEXTS if text in first},
        "documents_interval": [s["test"]["interval"]["ensemble"] for s in summaries],
        "by_k": [s["test"]["by_k"] for s in summaries],
        "seconds": [s["stages"]["seed"] + s["stages"]["experts"] for s in summaries],
        "curves": [_by_operations(curve, config) for curve in curves],
    }


def _by_operations(curve: Sequence[Mapping[str, Any]], config: Config) -> list[list[float]]:
    """[operations of the run so far, validation nats/byte of the ensemble] of each look at it."""
    one = config.expert_shape.operations_per_byte
    of_seed = config.seed.updates * config.seed.byte_forwards_per_update * one
    points = []
    for line in curve:
        if line["stage"] == "seed":
            spent = line["update"] * config.seed.byte_forwards_per_update * one
        else:
            each = line["update"] * config.expert.byte_forwards_per_update * one
            spent = of_seed + config.experts * each
        points.append([spent, line["nats_per_byte"]])
    return points


def interval(row: Mapping[str, Any], text: str = "test") -> Interval:
    """The mean over the random seeds and its 95% interval."""
    return t_interval(row[text])


def introduction(result: Mapping[str, Any]) -> str:
    """What a page begins with: the command, and how the result came about."""
    seeds = ", ".join(map(str, result["random_seeds"]))
    return (
        f"`{result['command']}`\n\n{result['operations']:.3g} operations a run, random seeds "
        f"{seeds}; {result['devices']} x {result['device']}, {result['date']}."
    )


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table."""
    texts = [text for text in TEXTS if text in results[0]]
    header = ["", "N", "k", "width", "parameters", "updates (seed + each expert)", "operations"]
    header += ["seconds", "validation"]
    for text in texts:
        header += [f"{TEXTS[text]}, nats/byte", "95% over seeds"]
    cells = []
    for row in results:
        seed, expert = row["updates"]["seed"], row["updates"]["expert"]
        line = [
            *(row["name"], str(row["experts"]), str(row["active"]), str(row["width"])),
            *(f"{row['parameters']:,}", f"{seed:,} + {expert:,}", f"{row['operations']:.3g}"),
            *(f"{np.mean(row['seconds']):.0f}", f"{np.mean(row['valid']):.4f}"),
        ]
        for text in texts:
            mean, low, high = interval(row, text)
            line += [f"{mean:.4f}", f"{low:.4f} to {high:.4f}"]
        cells.append(line)
    return page.table(header, cells)


def csv_table(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Column names and a line for each row and random seed, for `output.write`."""
    texts = [text for text in TEXTS if text in results[0]]
    fields = ["n_pert", "sequences", "window", "estimator", "probe", "learning_rate", "eps"]
    names = ["name", "run", "experts", "active", "width", "parameters", "operations", *fields]
    lines = [
        [
            *(row["name"], i, row["experts"], row["active"], row["width"], row["parameters"]),
            *(row["operations"], *(row["stage"][field] for field in fields)),
            *(row["seconds"][i], row["valid"][i], *(row[text][i] for text in texts)),
        ]
        for row in results
        for i in range(len(row["test"]))
    ]
    return [*names, "seconds", "valid", *texts], lines


def draw_curves(axes: Any, results: Sequence[Mapping[str, Any]]) -> None:
    """Validation loss against operations, a line for each row and a band for its random seeds."""
    for row, color in zip(results, figures.cycle(), strict=False):
        x = [spent for spent, _ in row["curves"][0]]
        y = np.array([[loss for _, loss in curve] for curve in row["curves"]])
        axes.plot(x, y.mean(0), color=color, marker=".", label=row["name"])
        axes.fill_between(x, y.min(0), y.max(0), color=color, alpha=0.2, lw=0)
    axes.set_xlabel("operations of a run")
    axes.set_ylabel("validation nats/byte")
    axes.xaxis.set_major_formatter(figures.engineering())


def draw_losses(axes: Any, results: Sequence[Mapping[str, Any]], text: str) -> None:
    """Each row's loss on a text with its interval, and every run as a small dot."""
    for i, (row, color) in enumerate(zip(results, figures.cycle(), strict=False)):
        mean, low, high = interval(row, text)
        axes.plot([low, high], [i, i], color=color, lw=2)
        axes.plot(row[text], [i] * len(row[text]), ".", color=color, ms=4)
        axes.plot(mean, i, "o", color=color)
    axes.set_yticks(range(len(results)), [row["name"] for row in results])
    axes.invert_yaxis()
    axes.set_xlabel(f"{TEXTS[text]}, nats/byte (bar: 95% over random seeds)")


def rows_figure(results: Sequence[Mapping[str, Any]], above: float) -> Any:
    """The rows' curves, up to `above` nats/byte over their highest end, and their test losses."""
    figure, (curves, test) = figures.panels(12, 5, columns=2)
    draw_curves(curves, results)
    losses = [loss for row in results for loss in row["valid"]]
    curves.set_ylim(min(losses) - 0.1, max(losses) + above)
    curves.set_title("Loss against compute (band: random seeds)")
    draw_losses(test, results, "test")
    test.set_title("At the end of the budget")
    figures.legend(figure, [curves])
    return figure


def claims(results: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[str, str]]) -> str:
    """What the runs say of each pair of rows of which the first is claimed to be the better."""
    return "\n".join(
        claim(f"{better} is better than {worse}", of_better, of_worse)
        for better, worse in pairs
        if (of_better := find(results, better)) and (of_worse := find(results, worse))
    )


def claim(words: str, better: Mapping[str, Any], worse: Mapping[str, Any]) -> str:
    """What the runs say of the claim that one row's test loss is lower than another's."""
    differences = np.subtract(worse["test"], better["test"])
    return output.claim(words, t_interval(differences))


def find(results: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any] | None:
    """The row of that name, if it was run."""
    return next((row for row in results if row["name"] == name), None)
