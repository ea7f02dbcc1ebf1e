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
_BEGINNINGS = 128  # the same of their first bytes, under many more experts each


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


def cold_start(
    experts: Sequence[model.Params], router: Router, windows: Windows, k: int
) -> dict[str, float]:
    """Loss on bytes 0..255 of windows by the rule that chooses their experts, nats/byte.

    The paper routes on these bytes and does not score them. A generator must choose before it has
    them: see `inference.beginnings`. Routed on all 256, a byte would choose its own judges; that is
    a bound, and no rule.
    """
    n = len(experts)
    rules = {
        "routed on nothing": (k, 0),
        f"all {n} experts": (n, 0),
        **{f"routed anew every {every} bytes": (k, every) for every in (128, 64, 16)},
    }
    sums = dict.fromkeys([*rules, "routed on all 256 bytes (not causal)"], 0.0)
    for start in range(0, len(windows), _BEGINNINGS):
        ids = windows.ids[start : start + _BEGINNINGS, :CONTEXT]
        texts = [some.tobytes() for some in ids]
        log_p = [
            inference.beginnings(experts, router, texts, active, every)[:, :CONTEXT]
            for active, every in rules.values()
        ]
        begun = np.pad(ids, ((0, 0), (1, 0)), constant_values=inference.START[0])
        known = inference.log_probabilities(experts, begun, router.route(texts, k, CONTEXT))
        for rule, values in zip(sums, [*log_p, inference.mixture(known)], strict=True):
            sums[rule] -= values.sum(dtype=np.float64)
    return {rule: total / (len(windows) * CONTEXT) for rule, total in sums.items()}
