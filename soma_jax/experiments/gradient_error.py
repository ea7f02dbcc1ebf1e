"""Error of the estimate, and what a step costs, against the number of experts and of directions
(paper, Fig. 5, Appendix K).

N experts of one total size estimate the gradient each of its own loss, on its own shard. The error
of the joint estimate is |g' - g|^2 / |g|^2 with all experts' parts in g, the exact gradient by
backpropagation over a large set of windows of each shard. A global step is one update of all
experts, timed here with the compiled update that trains.

With dense or structured signs and a shared batch of B windows an expert's part has the variance
that `gradients` predicts, and the joint one their mean, weighted by |g_e|^2.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from threadpoolctl import threadpool_limits

from soma_jax import ensemble, expert, model, randomness, recipe
from soma_jax.config import Config, Stage, build, default_config, field, stage
from soma_jax.config import resolve as resolve_recipe
from soma_jax.data import store
from soma_jax.errors import SomaError
from soma_jax.experiments import gradients, output, pieces, runs
from soma_jax.files import read_json, write_json
from soma_jax.interrupt import Interruptions
from soma_jax.progress import console
from soma_jax.report import figures, page
from soma_jax.stats import t_interval
from soma_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Given:
    """The fields of configs/experiments/gradient_error.py."""

    experts: tuple  # N of each ensemble
    widths: tuple  # and the width of its experts, for one total size
    n_pert: tuple  # directions of the estimates
    recipe: dict  # what differs from the default config of the runs that train the ensembles
    step: Stage  # of the estimates and the timed steps: the probe, eps, B, T; n_pert is the above
    windows: int = field(512, at_least=2)  # of each shard that the exact gradient is of
    repeats: int = field(24, at_least=2)  # estimates that an error is the mean of
    timed_steps: int = field(7, at_least=1)  # that the seconds are the median of


@dataclasses.dataclass(frozen=True)
class Settings:
    """The same, checked, with a run for each ensemble."""

    given: Given
    recipes: Sequence[Config]
    steps: Sequence[Stage]  # one for each n_pert


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    values = config.to_dict()
    given: Given = build(Given, values, "config")
    for name in ("experts", "widths", "n_pert"):
        numbers = getattr(given, name)
        whole = all(type(n) is int and n > 0 for n in numbers)
        if (
            not whole
            or len(numbers) < 2
            or list(numbers) != sorted(set(numbers), reverse=name == "widths")
        ):
            raise SomaError(
                f"config.{name} must be two or more positive whole numbers, "
                f"{'falling' if name == 'widths' else 'rising'}, not {numbers!r}"
            )
    if len(given.widths) != len(given.experts):
        raise SomaError(
            f"config.widths={given.widths!r} must have one for each of config.experts="
            f"{given.experts!r}"
        )
    if given.step.estimator != "spsa" or given.step.probe in ("sparse", "gaussian"):
        raise SomaError(
            "config.step: the prediction is of config.step.estimator=spsa and of "
            "config.step.probe=dense, rank_one or flipout"
        )
    recipes = []
    for count, width in zip(given.experts, given.widths, strict=True):
        own = {"experts": count, "model": {"width": width}}
        recipes.append(
            resolve_recipe(
                ml_collections.ConfigDict(
                    runs.merged(default_config().to_dict(), given.recipe, own)
                )
            )
        )
    totals = [c.experts * c.expert_shape.body_parameters for c in recipes]
    if max(totals) > 1.05 * min(totals):
        raise SomaError(
            f"config.widths={given.widths!r} give bodies of {totals} parameters in all: they must "
            "be within 5% of each other"
        )
    steps = [stage(values["step"] | {"n_pert": n}, "config.step") for n in given.n_pert]
    return Settings(given, recipes, steps)


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains and measures what is not there yet, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a directory with what other settings have left.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    given = settings.given
    ensembles, rows = [], []
    with Interruptions():
        pieces.adopt(directory, dataclasses.asdict(given))
        for config in settings.recipes:
            console.print(f"{config.experts} experts of width {config.model.width}")
            workdir = Workdir(directory / "runs" / str(config.experts))
            trained = recipe.run(config, workdir)
            file = directory / "measured" / f"{config.experts}.json"
            if not file.exists():
                write_json(file, _measured(settings, config, workdir))
            measured = read_json(file)
            of = {"experts": config.experts, "width": config.model.width}
            rows += [of | row for row in measured.pop("rows")]
            facts = {"byte_forwards": trained["byte_forwards"], "test": trained["test"]["ensemble"]}
            ensembles.append(of | measured | facts)
    result = output.circumstances(command, [settings.recipes[0].random_seed]) | {
        "sequences": given.step.sequences,
        "window": given.step.window,
        "probe": given.step.probe,
        "windows": given.windows,
        "repeats": given.repeats,
        "timed_steps": given.timed_steps,
        "measuring_byte_forwards": given.repeats
        * sum(given.experts)
        * sum(step.byte_forwards_per_update for step in settings.steps),
        "ensembles": ensembles,
        "rows": rows,
        "at_equal_seconds": _at_equal_seconds(rows),
    }
    columns = ["experts", "width", "n_pert", "error", "low", "high", "predicted", "seconds"]
    lines = [
        [*(row[c] for c in columns[:4]), *row["interval"], row["predicted"], row["seconds"]]
        for row in rows
    ]
    output.write(
        directory, "gradient_error", result, markdown(result), (columns, lines), _curves(result)
    )
    return result


def _measured(settings: Settings, config: Config, workdir: Workdir) -> dict[str, Any]:
    """Errors and seconds of an ensemble for every n_pert."""
    given = settings.given
    _, states, _ = recipe.load(workdir.path)
    experts = [state.params for state in states]
    corpus = store.open_store(workdir.store("train"))
    assignment = np.load(workdir.assignment, allow_pickle=False)
    exact = [
        gradients.exact(
            params,
            gradients.draw_windows(
                corpus,
                np.flatnonzero(assignment == i),
                given.windows,
                given.step.window,
                np.random.default_rng((config.random_seed, i)),
            ),
        )
        for i, params in enumerate(experts)
    ]
    shares = np.array([one.squared_norm for one in exact])
    shares /= shares.sum()
    rows = []
    for step in settings.steps:
        errors = shares @ [
            _errors(one, step, given.repeats, config.random_seed, i) for i, one in enumerate(exact)
        ]
        interval = t_interval(errors)
        rows.append(
            {
                "n_pert": step.n_pert,
                "error": float(interval.mean),
                "interval": [float(interval.low), float(interval.high)],
                "predicted": float(shares @ [one.predicted(step) for one in exact]),
                "seconds": _seconds(experts, step, exact, given.timed_steps),
            }
        )
    return {
        "parameters": sum(one.gradient.size for one in exact),
        "nu": [one.nu for one in exact],
        "shares": shares.tolist(),
        "rows": rows,
    }


def _errors(
    exact: gradients.Exact, step: Stage, repeats: int, random_seed: int, index: int
) -> np.ndarray:
    """Relative errors of an expert's own estimates, float64 [repeats]."""
    rng = np.random.default_rng((random_seed, index, step.n_pert))
    batches = gradients.draw_batches(len(exact.windows), step, repeats, rng)
    keys = [
        randomness.key(random_seed, "gradient error", index, step.n_pert, repeat)
        for repeat in range(repeats)
    ]
    return gradients.errors(exact, step, keys, batches)


def _seconds(
    experts: Sequence[model.Params],
    step: Stage,
    exact: Sequence[gradients.Exact],
    timed_steps: int,
) -> float:
    """Of one update of all experts, compiled as for training: the median."""
    compiled = ensemble.Ensemble(ensemble.make_mesh(len(experts), step), step)
    states = compiled.place(ensemble.stack([expert.init_state(params, step) for params in experts]))
    keys = compiled.place(
        jnp.stack([randomness.key(0, "timed steps", i) for i in range(len(experts))])
    )
    windows = np.stack(
        [np.resize(one.windows, (step.windows_per_update, step.window + 1)) for one in exact]
    )
    batch = compiled.place_batch(expert.split_batch(windows, step))
    times = []
    with threadpool_limits(1, "blas"):  # as training does
        for _ in range(1 + timed_steps):
            start = time.perf_counter()
            states, _ = jax.block_until_ready(compiled.update(states, batch, keys))
            times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one compiles


def _at_equal_seconds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each ensemble's error and its interval at the seconds that all of them reach, interpolated
    between n_pert on logarithmic scales: at the first, the middle and the last of them.

    Empty where no step of one takes as long as some step of another.
    """
    lines = {n: list(of) for n, of in itertools.groupby(rows, lambda row: row["experts"])}
    first = max(min(row["seconds"] for row in of) for of in lines.values())
    last = min(max(row["seconds"] for row in of) for of in lines.values())
    if first > last:
        return []
    return [
        {
            "seconds": float(seconds),
            "ensembles": [
                {"experts": n} | dict(zip(("error", "low", "high"), _at(of, seconds), strict=True))
                for n, of in lines.items()
            ],
        }
        for seconds in np.geomspace(first, last, 3)
    ]


def _at(line: Sequence[Mapping[str, Any]], seconds: float) -> list[float]:
    """Mean, low and high of an ensemble's error at some seconds a step."""
    line = sorted(line, key=lambda row: row["seconds"])
    x = np.log([row["seconds"] for row in line])
    bounds = np.array([[row["error"], *row["interval"]] for row in line])
    # An interval may reach below zero; an error does not.
    floor = np.log(np.maximum(bounds, 1e-3 * bounds[:, :1]))
    return [float(np.exp(np.interp(np.log(seconds), x, y))) for y in floor.T]


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: the ensembles, the errors, and the claim at equal seconds."""
    parts = [
        f"`{result['command']}`",
        f"Random seed {result['random_seeds'][0]}; {result['devices']} x {result['device']}, "
        f"{result['date']}. An error is the mean of {result['repeats']} joint estimates with its "
        f"95% interval: {result['probe']} directions, B = {result['sequences']} windows of "
        f"{result['window']} bytes for each expert, against the gradient of {result['windows']} "
        "windows of each shard; all errors together took "
        f"{result['measuring_byte_forwards'] / 1e6:.3g}M byte-forwards. Seconds are the median of "
        f"{result['timed_steps']} compiled updates of all experts on the machine named above.",
        "**The ensembles**, trained by the recipe (seed, clusters, branch); the parameters are of "
        "the bodies, which are what is estimated",
        page.table(
            ["N", "width", "parameters", "training byte-forwards", "test nats/byte", "nu"],
            [_ensemble_cells(one) for one in result["ensembles"]],
        ),
        "**The errors**",
        page.table(
            ["N", "width", "n_pert", "relative error", "95% interval", "predicted",
             "seconds a step"],
            [_cells(row) for row in result["rows"]],
        ),
        _at_equal_directions(result["rows"]),
        *_verdict(result["at_equal_seconds"]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _ensemble_cells(one: Mapping[str, Any]) -> list[str]:
    return [
        *(str(one["experts"]), str(one["width"]), f"{one['parameters']:,}"),
        *(f"{one['byte_forwards'] / 1e6:.3g}M", f"{one['test']:.3f}"),
        f"{min(one['nu']):.3g} to {max(one['nu']):.3g}",
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        *(str(row["experts"]), str(row["width"]), str(row["n_pert"])),
        f"{row['error']:.4g}",
        f"{row['interval'][0]:.4g} to {row['interval'][1]:.4g}",
        f"{row['predicted']:.4g}",
        f"{row['seconds']:.4f}",
    ]


def _at_equal_directions(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many times the error of the fewest experts is that of the most, at each n_pert."""
    few, *_, many = (list(of) for _, of in itertools.groupby(rows, lambda row: row["experts"]))
    ratios = [
        f"{one['error'] / other['error']:.2f} at {one['n_pert']} "
        f"({one['predicted'] / other['predicted']:.2f} predicted)"
        for one, other in zip(few, many, strict=True)
    ]
    return (
        f"At equal n_pert the error of N = {few[0]['experts']} is so many times that of N = "
        f"{many[0]['experts']}: {', '.join(ratios)}. The paper measured 118 times less "
        "variance at N = 256 than at N = 1, after 10,000 updates."
    )


def _verdict(at_equal_seconds: Sequence[Mapping[str, Any]]) -> list[str]:
    """The claim that at equal seconds more experts give the lower error."""
    if not at_equal_seconds:
        return ["At equal seconds: undecided; no time of a step is reached by all ensembles."]
    rows, lower, higher, pairs = [], 0, 0, 0
    for point in at_equal_seconds:
        cells = [
            f"{e['error']:.4g} ({e['low']:.4g} to {e['high']:.4g})" for e in point["ensembles"]
        ]
        rows.append([f"{point['seconds']:.4f}", *cells])
        for few, many in itertools.pairwise(point["ensembles"]):
            pairs += 1
            lower += many["high"] < few["low"]
            higher += many["low"] > few["high"]
    if higher:
        words = f"**not reproduced**: in {higher} of {pairs} the error is higher"
    elif lower == pairs:
        words = f"reproduced, in {pairs} of {pairs}"
    else:
        words = f"undecided within the intervals, which are apart in {lower} of {pairs}"
    names = [f"N = {e['experts']}" for e in at_equal_seconds[0]["ensembles"]]
    few, *_, many = at_equal_seconds[1]["ensembles"]
    return [
        "**At equal seconds a step**, interpolated between n_pert",
        page.table(["seconds", *names], rows),
        "The paper's claim that at equal seconds more experts give the lower error, for each N and "
        f"the next at each of the times above: {words}. At the middle one the error of {names[0]} "
        f"is {few['error'] / many['error']:.2f} times that of {names[-1]}.",
    ]


def _curves(result: dict[str, Any]) -> Any:
    figure, panels = figures.panels(11, 5, columns=2)
    labels = {
        "n_pert": "n_pert, directions",
        "seconds": f"seconds of a global step on {result['devices']} x {result['device']}",
    }
    for axes, (unit, label) in zip(panels, labels.items(), strict=True):
        for one, color in zip(result["ensembles"], figures.cycle(), strict=False):
            rows = [row for row in result["rows"] if row["experts"] == one["experts"]]
            x = [row[unit] for row in rows]
            y = np.array([row["error"] for row in rows])
            low, high = np.array([row["interval"] for row in rows]).T
            axes.errorbar(
                x, y, [y - low, high - y], color=color, marker="o", ms=4, capsize=2,
                label=f"N = {one['experts']}, width {one['width']}",
            )  # fmt: skip
            predicted = [row["predicted"] for row in rows]
            axes.plot(x, predicted, ":", color=color, lw=1.2)
        axes.set_xscale("log", base=2 if unit == "n_pert" else 10)
        axes.xaxis.set_minor_formatter("")  # labels between the powers would run into each other
        axes.set_yscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("relative error of the estimate (dotted: predicted)")
    figures.legend(figure, panels)
    return figure
