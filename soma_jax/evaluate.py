"""Scoring: route on 256 bytes, average the probabilities, score the next 768 (paper, section 4)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from soma_jax import inference, model
from soma_jax.data.windows import CONTEXT, Windows, scored_mask
from soma_jax.routing.router import Router

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
        log_p = inference.log_probabilities(experts, windows.ids[block], routes[block], CONTEXT)
        mixture = np.logaddexp.accumulate(log_p.astype(np.float64), axis=1)
        mixture -= np.log(np.arange(1, routes.shape[1] + 1))[:, None]
        sums[block] = -np.where(mask[block, None], mixture, 0.0).sum(-1)
    return Scores(sums, mask.sum(1, dtype=np.int64), routes)
