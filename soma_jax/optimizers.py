"""From a stage's settings to optax chains, and the schedule that ties the rate and eps together."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from soma_jax.config import Stage
from soma_jax.estimators import ESTIMATORS


def _descent(
    stage: Stage, learning_rate: jax.Array, whitened: bool = False
) -> list[optax.GradientTransformation]:
    """Weight decay is added to the estimate before the moments (paper, section 2)."""
    moments = []
    if stage.optimizer == "adam":
        scale = scale_by_leaf_adam if whitened else optax.scale_by_adam
        moments.append(scale(stage.b1, stage.b2, stage.adam_eps))
    return [
        optax.add_decayed_weights(stage.weight_decay),
        *moments,
        optax.scale_by_learning_rate(learning_rate),
    ]


class LeafAdamState(NamedTuple):
    """State of `scale_by_leaf_adam`."""

    step: jax.Array  # int32 []: updates
    mu: optax.Updates  # like the parameters
    nu: optax.Updates  # a scalar for each leaf


def scale_by_leaf_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam with one second moment for each leaf, the mean over its coordinates.

    Noise of a SPSA estimate has one variance within a leaf, in the coordinates that its directions
    are drawn in. Adam's own second moments would undo what whitening does to the coordinates.
    """

    def init(params: optax.Params) -> LeafAdamState:
        return LeafAdamState(
            step=jnp.zeros((), jnp.int32),
            mu=jax.tree.map(jnp.zeros_like, params),
            nu=jax.tree.map(lambda p: jnp.zeros((), p.dtype), params),
        )

    def update(
        updates: optax.Updates, state: LeafAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, LeafAdamState]:
        del params
        step = state.step + 1
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        squares = jax.tree.map(lambda g: jnp.square(g).mean(), updates)
        nu = optax.tree.update_moment(squares, state.nu, b2, 1)
        scaled = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v) + eps),
            optax.tree.bias_correction(mu, b1, step),
            optax.tree.bias_correction(nu, b2, step),
        )
        return scaled, LeafAdamState(step, mu, nu)

    return optax.GradientTransformation(init, update)


def body(
    stage: Stage, *, factors: Any = None, chunk: int = 1, axis_name: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """The estimator, coupled decay, Adam; `learning_rate` and `eps` are injected hyperparameters.

    `factors` (whitening.factors) whiten the directions of a stage that asks for it.
    """

    @optax.inject_hyperparams
    def chain(learning_rate, eps):
        build = ESTIMATORS[stage.estimator].build
        return optax.chain(
            build(stage, eps, factors, chunk, axis_name),
            *_descent(stage, learning_rate, whitened=stage.whitening > 0),
        )

    return chain(learning_rate=stage.learning_rate, eps=stage.eps)


def head(stage: Stage) -> optax.GradientTransformationExtraArgs:
    """The same chain for E, fed by the delta rule."""

    @optax.inject_hyperparams
    def chain(learning_rate):
        return optax.chain(*_descent(stage, learning_rate))

    return chain(learning_rate=stage.learning_rate)


def plateau(stage: Stage) -> optax.GradientTransformationExtraArgs:
    """Halves its `scale` after `patience` updates without a 1e-8 better validation loss."""
    return contrib.reduce_on_plateau(
        factor=0.5, patience=stage.patience // stage.validate_every, rtol=0.0, atol=1e-8
    )


def scaled(stage: Stage, start: float, scale: jax.Array, update: jax.Array) -> jax.Array:
    """The rate or eps at an update: its start times the plateau's scale times the cosine from 1 to
    `decay_to`, and never below the floor."""
    progress = update / max(stage.updates, 1)
    cosine = stage.decay_to + (1 - stage.decay_to) * (1 + jnp.cos(jnp.pi * progress)) / 2
    return jnp.maximum(start * scale * cosine, min(start, stage.floor))
