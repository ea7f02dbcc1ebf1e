"""Backpropagation with the interface of the estimators: the upper bound they are compared with.

The only reverse mode that trains anything here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class BackpropState(NamedTuple):
    """State of `backprop`."""

    loss: jax.Array  # float32 []: mean loss of the last update


def backprop() -> optax.GradientTransformationExtraArgs:
    """Replaces the updates by the exact gradient of the mean loss (through time, for an RNN).

    Returns:
      A transformation whose `update(updates, state, params, *, value_fn, batch=None)` ignores
      `updates`; `value_fn(params, batch)` returns losses, a scalar or an array over sequences.
    """

    def init(params: PyTree) -> BackpropState:
        del params
        return BackpropState(jnp.zeros((), jnp.float32))

    def update(
        updates: PyTree,
        state: BackpropState,
        params: PyTree | None = None,
        *,
        value_fn: Callable[[PyTree, Any], jax.Array],
        batch: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, BackpropState]:
        del updates, state, extra
        loss, gradient = jax.value_and_grad(lambda p: value_fn(p, batch).mean())(params)
        return gradient, BackpropState(loss.astype(jnp.float32))

    return optax.GradientTransformationExtraArgs(init, update)
