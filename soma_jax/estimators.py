"""The estimators a stage can name. An own one is an entry of `ESTIMATORS`: examples/ has one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optax

from soma_jax import activity, probes
from soma_jax.backprop import backprop
from soma_jax.eggroll import eggroll
from soma_jax.spsa import spsa
from soma_jax.whitening import whitened

if TYPE_CHECKING:
    from soma_jax.config import Stage


@dataclasses.dataclass(frozen=True)
class Estimator:
    """How a gradient is estimated, and what an estimate costs.

    `build(stage, eps, factors, chunk, axis_name)` returns an optax transformation whose state has
    the field `loss`, and whose `update` takes `value_fn`, `key` and `batch` as `spsa`'s does, and
    `complete` as `activity.perturbation`'s. `eps` may be traced, `factors` are those of
    `soma_jax.whitening` or None, `axis_name` the mesh axis that splits the directions or None.

    `forwards(stage)` counts forwards of one window in an update; what else is computed counts as
    the forwards that take as many operations.
    """

    build: Callable[[Stage, Any, Any, int, str | None], optax.GradientTransformationExtraArgs]
    forwards: Callable[[Stage], int]


def _spsa(stage: Stage, eps: Any, factors: Any, chunk: int, axis_name: str | None) -> Any:
    law = probes.LAWS[stage.probe]
    return spsa(
        stage.n_pert,
        eps,
        law=law if factors is None else whitened(law, factors),
        own_batch=stage.own_batch,
        chunk=chunk,
        axis_name=axis_name,
    )


def _eggroll(stage: Stage, eps: Any, factors: Any, chunk: int, axis_name: str | None) -> Any:
    del factors
    return eggroll(
        stage.n_pert,
        eps,
        rank=stage.rank,
        own_batch=stage.own_batch,
        chunk=chunk,
        axis_name=axis_name,
    )


def _node_perturbation(
    stage: Stage, eps: Any, factors: Any, chunk: int, axis_name: str | None
) -> Any:
    del factors, chunk
    return activity.perturbation(eps, stage.credit, axis_name=axis_name)


def _feedback(stage: Stage, eps: Any, factors: Any, chunk: int, axis_name: str | None) -> Any:
    del factors, chunk
    return activity.feedback(eps, stage.n_pert, stage.credit, axis_name=axis_name)


def _two_for_each_direction(stage: Stage) -> int:
    return 2 * stage.n_pert * stage.sequences


ESTIMATORS: dict[str, Estimator] = {
    "spsa": Estimator(_spsa, _two_for_each_direction),
    "eggroll": Estimator(_eggroll, _two_for_each_direction),
    # Each product of the forward has two in the backward pass.
    "backprop": Estimator(lambda *_: backprop(), lambda stage: 3 * stage.sequences),
    # An outer product for each product of the forward is a third one.
    "node_perturbation": Estimator(_node_perturbation, lambda stage: 3 * stage.sequences),
    # The outer products, and less than another forward for what leads errors back; of the windows
    # that are perturbed, too, two forwards and less than another for what is learned from them.
    "feedback": Estimator(_feedback, lambda stage: 3 * stage.sequences + 3 * stage.n_pert),
}

ACTIVITY = ("node_perturbation", "feedback")  # noise in activities: soma_jax.activity
