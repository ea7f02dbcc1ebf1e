"""Scoring: route on 256 bytes, average the probabilities, score the next 768 (paper, section 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from soma_jax import model
from soma_jax.data.windows import CONTEXT, Windows, scored_mask
from soma_jax.routing.router import Router

_ROWS = 32  # windows a device scores at once; fixed, so that a score does not depend on the batch
_BLOCK = (
    1024  # windows whose probabilities are held at once: 3 MiB for each expert that scores them
)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Nats of each window under the mean of its 1, 2, ... k nearest experts."""

    sums: np.ndarray  # float64 [n, k]: column j is for j + 1 experts
    counts: np.ndarray  # int64 [n]: scored bytes
    routes: np.ndarray  # int32 [n, k]: the experts, nearest first

    def nats(self, k: int) -> float:
        """Mean nats/byte with k experts; nan when nothing is scored."""
        total = self.counts.sum()
        return float(self.sums[:, k - 1].sum() / total) if total else float("nan")


def score(
    experts: Sequence[model.Params], router: Router | None, windows: Windows, k: int
) -> Scores:
    """Scores windows with a routed ensemble.

    The forward is float32; the mixture and all sums are float64. Every window starts from the zero
    state.

    Args:
      experts: parameters of the N experts.
      router: says which experts a window goes to; None for a single expert.
      windows: what to score.
      k: up to how many experts are averaged.
    """
    routes = (
        router.route(
            [w.tobytes()[:n] for w, n in zip(windows.ids, windows.lengths, strict=True)], k, CONTEXT
        )
        if router is not None
        else np.zeros((len(windows), 1), np.int32)
    )
    mask = scored_mask(windows.lengths)
    sums = np.zeros(routes.shape, np.float64)
    for start in range(0, len(windows), _BLOCK):
        block = slice(start, start + _BLOCK)
        log_p = _routed(experts, windows.ids[block], routes[block]).astype(np.float64)
        mixture = np.logaddexp.accumulate(log_p, axis=1)
        mixture -= np.log(np.arange(1, routes.shape[1] + 1))[:, None]
        sums[block] = -np.where(mask[block, None], mixture, 0.0).sum(-1)
    return Scores(sums, mask.sum(1, dtype=np.int64), routes)


def _routed(experts: Sequence[model.Params], ids: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """Log-probability of each target under each expert of its window, float32 [n, k, 768]."""
    result = np.zeros((*routes.shape, ids.shape[1] - CONTEXT - 1), np.float32)
    for index, params in enumerate(experts):
        row, slot = np.nonzero(routes == index)
        result[row, slot] = target_log_probabilities(params, ids[row])
    return result


def target_log_probabilities(params: model.Params, ids: np.ndarray) -> np.ndarray:
    """Log-probabilities float32 [n, 768] of the targets at byte indices 257..1024 of windows
    uint8 [n, 1025], under one expert."""
    rows = _ROWS * len(_devices())
    result = np.zeros((len(ids), ids.shape[1] - CONTEXT - 1), np.float32)
    for start in range(0, len(ids), rows):
        some = ids[start : start + rows]
        padded = np.zeros((rows, ids.shape[1]), np.uint8)
        padded[: len(some)] = some
        result[start : start + rows] = np.asarray(_score_rows()(params, padded))[: len(some)]
    return result


def _devices() -> list[jax.Device]:
    return jax.local_devices()[:8]  # more would mostly score padding


@cache
def _score_rows():
    devices = _devices()
    mesh = jax.make_mesh((len(devices),), ("rows",), (AxisType.Auto,), devices=devices)

    def rows(params: model.Params, ids: jax.Array) -> jax.Array:
        with jax.default_matmul_precision("highest"):  # float32 also where TF32 is the default
            return -model.byte_losses(params, ids)[:, CONTEXT:].astype(jnp.float32)

    return jax.jit(
        jax.shard_map(
            rows, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P("rows"), check_vma=False
        )
    )
