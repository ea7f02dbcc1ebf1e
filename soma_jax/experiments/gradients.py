"""An estimate against the exact gradient: what the experiments on its error measure with.

With a = (parameters - 1) and nu the variance of a window's gradient over |g|^2, the relative
variance E|g' - g|^2 / |g|^2 of an estimate from n directions is (paper, section 6)

    shared batch of B windows:      v = a/n + nu/B + a nu/(n B)
    B windows of a direction's own: v = [a + (a + 1) nu/B] / n

Reverse mode is used to measure here, and nowhere to train.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from soma_jax import expert, model
from soma_jax.config import Stage
from soma_jax.data import pipeline
from soma_jax.data.store import Store
from soma_jax.estimators import ESTIMATORS
from soma_jax.stats import t_interval


@dataclasses.dataclass(frozen=True)
class Exact:
    """The gradient of an expert's mean loss over some windows, with respect to its body."""

    params: model.Params
    windows: np.ndarray  # uint8 [count, T + 1]: all there are; batches are drawn from them
    gradient: np.ndarray  # float64 [parameters of the body]
    nu: float  # variance of one window's gradient over |gradient|^2

    @property
    def squared_norm(self) -> float:
        return float(self.gradient @ self.gradient)

    def predicted(self, stage: Stage) -> float:
        """The relative variance of a stage's estimate, after the paper."""
        return predicted_variance(
            self.gradient.size, self.nu, stage.n_pert, stage.sequences, stage.own_batch
        )


def predicted_variance(
    parameters: int, nu: float, n_pert: float, sequences: float, own: bool
) -> float:
    """Relative variance of SPSA with dense or structured signs (paper, section 6)."""
    a = parameters - 1
    if own:
        return (a + (a + 1) * nu / sequences) / n_pert
    return a / n_pert + nu / sequences + a * nu / (n_pert * sequences)


def draw_windows(
    corpus: Store, chunks: np.ndarray, count: int, window: int, rng: np.random.Generator
) -> np.ndarray:
    """Windows that start with chunks of a shard, drawn with replacement: uint8 [count, T + 1]."""
    starts = corpus.chunks[chunks[rng.integers(0, len(chunks), count)]]
    return corpus.windows(pipeline.place(starts, corpus, window + 1), window + 1)


def draw_batches(count: int, stage: Stage, repeats: int, rng: np.random.Generator) -> np.ndarray:
    """Which of `count` windows each of `repeats` estimates sees: integers [repeats, B], or
    [repeats, n_pert, B] where directions have windows of their own.

    Each is drawn uniformly and independently of the others of its estimate. Over the repeats, each
    place sees all windows equally often: a few windows have most of nu, and would otherwise decide
    the mean by how often they happen to come.
    """
    shape = (stage.n_pert, stage.sequences) if stage.own_batch else (stage.sequences,)
    rounds = -(-repeats // count)
    places = np.tile(np.arange(count), (math.prod(shape), rounds))
    return rng.permuted(places, axis=1)[:, :repeats].T.reshape(repeats, *shape)


def exact(params: model.Params, windows: np.ndarray) -> Exact:
    """By reverse mode, window by window, accumulated in float64.

    Args:
      params: of the expert.
      windows: uint8 [count, T + 1].
    """
    params = jax.tree.map(jnp.asarray, params)  # a restored expert is of numpy arrays
    squares, mean = 0.0, np.zeros(sum(x.size for x in jax.tree.leaves(params["body"])))
    for g in _rows(_gradient(), params, windows):
        squares += float(g @ g) / len(windows)
        mean += g / len(windows)
    return Exact(params, windows, mean, squares / float(mean @ mean) - 1)


def errors(
    exact: Exact, stage: Stage, keys: Sequence[jax.Array], batches: Iterable[np.ndarray]
) -> np.ndarray:
    """|estimate - gradient|^2 / |gradient|^2 of one estimate for each key, float64 [repeats].

    Args:
      exact: what is estimated.
      stage: how: its estimator, n_pert, probe, eps, own_batch.
      keys: of the directions.
      batches: which windows, each [B], or [n_pert, B] where directions have their own.
    """
    draws = ((key, exact.windows[batch]) for key, batch in zip(keys, batches, strict=True))
    differences = (g - exact.gradient for g in _rows(_estimate(stage), exact.params, draws))
    return np.array([d @ d for d in differences]) / exact.squared_norm


def measure(
    exact: Exact, stage: Stage, keys: Sequence[jax.Array], batches: Iterable[np.ndarray]
) -> dict[str, Any]:
    """The mean of `errors` with its 95% interval over the repeats, beside what is predicted."""
    interval = t_interval(errors(exact, stage, keys, batches))
    return {
        "probe": stage.probe,
        "n_pert": stage.n_pert,
        "sequences": stage.sequences,
        "own_batch": stage.own_batch,
        "measured": float(interval.mean),
        "interval": [float(interval.low), float(interval.high)],
        "predicted": exact.predicted(stage),
    }


def _rows(compiled: Callable, params: model.Params, rows: Iterable[Any]) -> Iterator[np.ndarray]:
    """A float64 vector for each row, as many at a time as there are devices."""
    rows, count = iter(rows), len(jax.devices())
    while some := list(itertools.islice(rows, count)):
        padded = some + some[-1:] * (count - len(some))
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *padded)
        yield from np.asarray(compiled(params, stacked), np.float64)[: len(some)]


def _on_all_devices(one: Callable[[model.Params, Any], jax.Array]) -> Callable:
    mesh = jax.make_mesh((len(jax.devices()),), ("row",), (AxisType.Auto,))
    return jax.jit(
        jax.shard_map(
            lambda params, rows: lax.map(lambda row: one(params, row), rows),
            mesh=mesh,
            in_specs=(P(), P("row")),
            out_specs=P("row"),
            check_vma=False,
        )
    )


# Compiled once for all experts of a shape.
@cache
def _gradient() -> Callable:
    def one(params: model.Params, window: jax.Array) -> jax.Array:
        def loss(body: Any) -> jax.Array:
            return model.sequence_losses({"head": params["head"], "body": body}, window[None])[0]

        gradient = jax.grad(loss)(params["body"])
        return ravel_pytree(gradient)[0]

    return _on_all_devices(one)


@cache
def _estimate(stage: Stage) -> Callable:
    chunk, block = expert.chunk_and_block(stage)
    tx = ESTIMATORS[stage.estimator].build(stage, stage.eps, None, chunk, None)

    def one(params: model.Params, draw: tuple[jax.Array, jax.Array]) -> jax.Array:
        key, batch = draw
        body = params["body"]

        def losses(body: Any, some: jax.Array) -> jax.Array:
            return model.sequence_losses({"head": params["head"], "body": body}, some, block)

        estimate, _ = tx.update(body, tx.init(body), body, value_fn=losses, key=key, batch=batch)
        return ravel_pytree(estimate)[0]

    return _on_all_devices(one)
