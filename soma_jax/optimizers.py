"""From a stage's settings to optax chains, and the schedule that ties the rate and eps together."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from soma_jax import probes
from soma_jax.config import Stage
from soma_jax.spsa import spsa


def _coupled_adam(stage: Stage, learning_rate: jax.Array) -> list[optax.GradientTransformation]:
    """Weight decay is added to the estimate before the moments (paper, section 2)."""
    return [
        optax.add_decayed_weights(stage.weight_decay),
        optax.scale_by_adam(stage.b1, stage.b2, stage.adam_eps),
        optax.scale_by_learning_rate(learning_rate),
    ]


def body(
    stage: Stage, *, chunk: int = 1, axis_name: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """SPSA, coupled decay, Adam; `learning_rate` and `eps` are injected hyperparameters."""

    @optax.inject_hyperparams
    def chain(learning_rate, eps):
        estimator = spsa(
            stage.n_pert,
            eps,
            law=probes.LAWS[stage.probe],
            own_batch=stage.own_batch,
            chunk=chunk,
            axis_name=axis_name,
        )
        return optax.chain(estimator, *_coupled_adam(stage, learning_rate))

    return chain(learning_rate=stage.learning_rate, eps=stage.eps)


def head(stage: Stage) -> optax.GradientTransformationExtraArgs:
    """The same chain for E, fed by the delta rule."""

    @optax.inject_hyperparams
    def chain(learning_rate):
        return optax.chain(*_coupled_adam(stage, learning_rate))

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
