"""Estimates of the gradient from forward passes, beside each other and beside backpropagation.

First what an estimate is worth: its cosine to the exact gradient and its relative error, per site,
at experts that backpropagation has trained for no, some and many updates. Then what that is worth
in training: rows of whole runs (`runs`) at equal operations and, in the same runs, equal seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.flatten_util import ravel_pytree

from soma_jax import expert, model, randomness, recipe, training
from soma_jax.config import Data, Run, Stage, build, field, stage
from soma_jax.data import store
from soma_jax.errors import SomaError
from soma_jax.estimators import ESTIMATORS
from soma_jax.experiments import gradients, output, pieces, runs
from soma_jax.files import read_json, write_json
from soma_jax.interrupt import Interruptions
from soma_jax.progress import console
from soma_jax.report import figures, page
from soma_jax.stats import t_interval

# The matrices that each site's errors train.
SITES = {"gates": ("lstm_input", "lstm_recurrent"), "hidden": ("mlp_in",), "written": ("mlp_out",)}


@dataclasses.dataclass(frozen=True)
class Given:
    """The fields of configs/experiments/estimators.py."""

    random_seeds: tuple  # one run of each row for each; the first is that of the estimates
    data: Data
    training: Stage  # of the experts whose gradient is estimated, by backpropagation
    starts: tuple  # after how many of its updates
    estimates: dict  # name -> fields of a stage
    window: int = field(128, at_least=1)  # T of the estimates
    windows: int = field(256, at_least=2)  # that the exact gradient is of, and batches are from
    repeats: int = field(16, at_least=2)  # estimates that a mean is of
    warm: int = field(20, at_least=0)  # updates before, for estimators that learn
    base: dict = dataclasses.field(default_factory=dict)  # of the rows, as in runs.Given
    rows: dict = dataclasses.field(default_factory=dict)
    operations: float = field(1e12, above=0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The same, checked."""

    given: Given
    estimates: Mapping[str, Stage]
    rows: Sequence[runs.Row]


def resolve(config: ml_collections.ConfigDict) -> Settings:
    """Checks the config and freezes it.

    Raises:
      SomaError: naming the field, its value and what it may be.
    """
    values = config.to_dict()
    given: Given = build(Given, values, "config")
    output.check_seeds(given.random_seeds)
    stage(values["training"], "config.training")
    if not given.starts or not all(type(s) is int and s >= 0 for s in given.starts):
        raise SomaError(f"config.starts must be numbers of updates, not {given.starts!r}")
    defaults = dataclasses.asdict(Stage(window=given.window))
    estimates = {
        name: stage(defaults | fields, f"config.estimates[{name!r}]")
        for name, fields in given.estimates.items()
    }
    rows = runs.rows(
        given.rows,
        runs.merged({"data": values["data"]}, given.base),
        operations=given.operations,
        random_seeds=given.random_seeds,
        path="config.rows",
    )
    return Settings(given, estimates, rows)


def run(settings: Settings, directory: Path, command: str) -> dict[str, Any]:
    """Trains and measures what is not there yet, and writes table, figure and result.json.

    Raises:
      SomaError: bad input, or a directory with what other settings have left.
      Interrupted: on SIGTERM or Ctrl-C, after saving; called again, it goes on.
    """
    given = settings.given
    pieces.adopt(directory, dataclasses.asdict(given))
    with Interruptions() as interruptions:
        corpus = recipe.open_corpus(given.data, given.data.train, directory / "data" / "train")
        cells = []
        for updates in given.starts:
            params = _trained(given, updates, directory, corpus, interruptions)
            exact = _exact(given, params, corpus)
            for name, of in settings.estimates.items():
                file = directory / "measured" / str(updates) / f"{runs.slug(name)}.json"
                if not file.exists():
                    console.print(f"after {updates} updates: {name}")
                    write_json(file, {"start": updates, "name": name} | _measure(given, exact, of))
                cells.append(read_json(file))
    result = output.circumstances(command, given.random_seeds) | {
        "operations": given.operations,
        "window": given.window,
        "windows": given.windows,
        "repeats": given.repeats,
        "estimates": cells,
        "rows": [runs.train(row, directory) for row in settings.rows],
    }
    table = (
        ["start", "name", "byte_forwards", "site", "cosine", "relative_error"],
        [
            [c["start"], c["name"], c["byte_forwards"], site, np.mean(of["cosine"]),
             np.mean(of["relative_error"])]
            for c in cells
            for site, of in c["sites"].items()
        ],
    )  # fmt: skip
    output.write(directory, "estimators", result, markdown(result), table, _figure(result))
    return result


def _trained(
    given: Given,
    updates: int,
    directory: Path,
    corpus: store.Store,
    interruptions: Interruptions,
) -> model.Params:
    """An expert after some updates of backpropagation."""
    seed = given.random_seeds[0]
    params = model.init(randomness.key(seed, "init"), model.ExpertConfig())
    of = dataclasses.replace(given.training, updates=updates)
    trainee = training.trainee(
        directory / "experts" / str(updates), params, of, corpus, np.arange(corpus.n_chunks),
        random_seed=seed, kind="estimators", index=0, validation_share=0.01,
    )  # fmt: skip
    (state,) = training.train("training", [trainee], of, Run(), interruptions)
    return state.params


def _exact(given: Given, params: model.Params, corpus: store.Store) -> gradients.Exact:
    rng = np.random.default_rng(given.random_seeds[0])
    chunks = np.arange(corpus.n_chunks)
    return gradients.exact(
        params, gradients.draw_windows(corpus, chunks, given.windows, given.window, rng)
    )


def _measure(given: Given, exact: gradients.Exact, of: Stage) -> dict[str, Any]:
    """Cosine and relative error of one estimate for each repeat, by site and of all together."""
    tx, one = _compiled(of)
    rng = np.random.default_rng((given.random_seeds[0], 1))
    batches = gradients.draw_batches(len(exact.windows), of, given.warm + given.repeats, rng)
    unravel = ravel_pytree(exact.params["body"])[1]
    wanted = dict(_by_site(unravel(jnp.asarray(exact.gradient))))
    found: dict[str, Any] = {site: {"cosine": [], "relative_error": []} for site in wanted}
    state = tx.init(exact.params["body"])
    for i, batch in enumerate(batches):
        key = randomness.key(given.random_seeds[0], "estimators", i)
        estimate, state = one(exact.params, state, key, exact.windows[batch])
        if i >= given.warm:
            for site, g in _by_site(estimate):
                want = wanted[site]
                cosine = g @ want / np.sqrt((g @ g) * (want @ want))
                error = np.square(g - want).sum() / (want @ want)
                found[site]["cosine"].append(float(cosine))
                found[site]["relative_error"].append(float(error))
    return {"byte_forwards": of.byte_forwards_per_update, "sites": found}


def _compiled(of: Stage) -> tuple[Any, Callable]:
    """An estimator, and one estimate of the body's gradient by it."""
    chunk, block = expert.chunk_and_block(of)
    tx = ESTIMATORS[of.estimator].build(of, of.eps, None, chunk, None)

    @jax.jit
    def one(params: model.Params, state: Any, key: jax.Array, windows: Any) -> Any:
        def complete(body: Any) -> model.Params:
            return {"head": params["head"], "body": body}

        def value_fn(body: Any, batch: tuple) -> jax.Array:
            return model.sequence_losses(complete(body), batch[0], block)

        return tx.update(
            params["body"], state, params["body"],
            value_fn=value_fn, complete=complete, key=key, batch=(windows, None),
        )  # fmt: skip

    return tx, one


def _by_site(body: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The matrices of a tree like the body, as one float64 vector for each site and for all."""
    for site, names in [*SITES.items(), ("all", sum(SITES.values(), ()))]:
        leaves = [np.ravel(block[name]) for block in body["blocks"] for name in names]
        yield site, np.concatenate(leaves).astype(np.float64)


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown: estimates by site, then the rows."""
    columns = [*SITES, "all"]
    parts = [
        runs.introduction(result),
        f"**What an estimate is worth**: cosine to the exact gradient over {result['windows']} "
        f"windows of {result['window']} bytes, mean of {result['repeats']} estimates, for the "
        "matrices of each site and all of them; |estimate - gradient|^2 / |gradient|^2 of all. "
        "Each estimate has a batch of its own, whose share of the error is in the row of "
        "backpropagation.",
        page.table(
            ["updates before", "", "byte-forwards", *columns, "relative error"],
            [
                [
                    f"{c['start']:,}", c["name"], f"{c['byte_forwards']:,}",
                    *(f"{np.mean(c['sites'][site]['cosine']):.3f}" for site in columns),
                    f"{np.mean(c['sites']['all']['relative_error']):.3g}",
                ]
                for c in result["estimates"]
            ],
        ),
        "**What it is worth in training**, one expert from scratch:",
        runs.table(result["rows"]),
        "Outer products, and what leads errors back, count as the forwards that take as many "
        "operations.",
    ]  # fmt: skip
    parts.append(_gap(result["rows"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _gap(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much of the way from each estimator to backpropagation the best of them goes."""
    bound = runs.find(rows, "backpropagation")
    others = [row for row in rows if row is not bound]
    if bound is None or len(others) < 2:
        return ""
    best, *rest = sorted(others, key=lambda row: float(np.mean(row["test"])))
    lines = []
    for row in rest:
        before = np.subtract(row["test"], bound["test"])
        after = np.subtract(best["test"], bound["test"])
        lines.append(
            output.claim(
                f"{best['name']} halves the gap to backpropagation that {row['name']} has "
                f"({np.mean(before):.3f}, to {np.mean(after):.3f} nats/byte)",
                t_interval(before / 2 - after),
            )
        )
    return "\n".join(lines)


def _figure(result: dict[str, Any]) -> Any:
    figure, (cosine, operations, seconds) = figures.panels(15, 5, columns=3)
    names = list(dict.fromkeys(c["name"] for c in result["estimates"]))
    starts = list(dict.fromkeys(c["start"] for c in result["estimates"]))
    of_rows = list(zip(result["rows"], figures.cycle(), strict=False))
    for name in names:
        # A line for each K and law, in the color of the first row of its family.
        family = name.split(",")[0]
        color = next((c for row, c in of_rows if row["name"].startswith(family)), "black")
        cosines = [
            np.mean(c["sites"]["all"]["cosine"]) for c in result["estimates"] if c["name"] == name
        ]
        cosine.plot(range(len(starts)), cosines, "o-", color=color, ms=4)
    cosine.set_xticks(range(len(starts)), [f"{s:,}" for s in starts])
    cosine.set_xlabel("updates of backpropagation before")
    cosine.set_ylabel("cosine to the exact gradient")
    cosine.set_yscale("log")
    runs.draw_curves(operations, result["rows"])
    for row, color in of_rows:
        spent = np.array([[x for x, _ in curve] for curve in row["curves"]])
        y = np.mean([[loss for _, loss in curve] for curve in row["curves"]], axis=0)
        # A run's rate is constant: its seconds are spread as its operations are.
        x = spent.mean(0) / spent.max() * np.mean(row["seconds"])
        seconds.plot(x, y, color=color, marker=".")
    losses = [loss for row in result["rows"] for loss in row["valid"]]
    for axes in (operations, seconds):
        axes.set_ylim(min(losses) - 0.1, max(losses) + 0.3)
    seconds.set_xlabel("seconds of training")
    seconds.set_ylabel("validation nats/byte")
    figures.legend(figure, [operations])
    return figure
