"""SPSA: a gradient estimate from forward passes only, as an optax transformation.

For directions z_1 ... z_n and the probe radius eps (paper, Eq. 2 and 8):

    g = 1/n sum_j [L(theta + eps z_j) - L(theta - eps z_j)] / (2 eps) * z_j

This file needs jax and optax only (and a probe law), and works on any pytree and any loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

PyTree = Any


class SPSAState(NamedTuple):
    """State of `spsa`."""

    loss: jax.Array  # float32 []: mean loss over the last update's 2 n_pert perturbed forwards
    deviation: jax.Array  # float32 []: standard deviation of the 2 n_pert losses


def _add_scaled(params: PyTree, scale: jax.Array | float, direction: PyTree) -> PyTree:
    return jax.tree.map(lambda p, z: p + jnp.asarray(scale, p.dtype) * z, params, direction)


def _weighted_sum(weights: jax.Array, directions: Any) -> jax.Array:
    """sum_j w_j z_j of stacked directions, dense or structured."""
    if hasattr(directions, "weighted_sum"):
        return directions.weighted_sum(weights)
    return jnp.tensordot(weights.astype(directions.dtype), directions, 1, precision="highest")


def _scan_chunks(f: Callable, init: PyTree, xs: Any, chunk: int) -> tuple[PyTree, Any]:
    """`lax.scan` over chunks of equal size: the largest divisor of the length that is at most
    `chunk`; `f` gets and gives whole chunks."""
    length = len(jax.tree.leaves(xs)[0])
    size = max(c for c in range(1, min(chunk, length) + 1) if length % c == 0)
    chunks = jax.tree.map(lambda x: x.reshape(length // size, size, *x.shape[1:]), xs)
    carry, ys = lax.scan(f, init, chunks)
    return carry, jax.tree.map(lambda y: y.reshape(length, *y.shape[2:]), ys)


def spsa(
    n_pert: int,
    eps: jax.Array | float,
    *,
    law: Callable[[jax.Array, jax.Array, PyTree], PyTree],
    own_batch: bool = False,
    chunk: int = 1,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces the updates by a simultaneous-perturbation estimate of the gradient.

    Both signs of a direction see the same batch, and their losses are subtracted sequence by
    sequence in float32 (float64 where the loss is) before they are averaged. Directions are made
    from keys when they are needed and never held more than `chunk` at a time.

    Args:
      n_pert: number of directions an update.
      eps: probe radius; may be traced (`optax.inject_hyperparams`).
      law: `law(key, j, params) -> z`, direction j of an update, shaped like the parameters
        (`soma_jax.probes`).
      own_batch: False, all directions share the batch (the paper). True, direction j sees
        `batch[j]` alone: the same number of forwards sees n_pert times the data.
      chunk: directions evaluated at once by `jax.vmap`; a matter of speed and memory only.
      axis_name: a `jax.shard_map` axis over which the directions are split (the paper's DDPP): each
        device evaluates n_pert / axis size of them, and the estimates are averaged; devices of
        several processes exchange losses instead, where these are fewer. With `own_batch` a device
        gets its own directions' part of the batch.

    Returns:
      A transformation whose `update(updates, state, params, *, value_fn, key, batch=None)` ignores
      `updates` and needs `params`. `value_fn(params, batch)` returns losses, a scalar or an array
      over sequences. `key` must be new for each update.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from soma_jax import probes
      >>> tx = optax.chain(spsa(64, 1e-3, law=probes.dense_rademacher), optax.scale(-0.1))
      >>> x = {"w": jnp.ones(3)}
      >>> state = tx.init(x)
      >>> loss = lambda x, batch: (x["w"] ** 2).sum()
      >>> step, state = tx.update(x, state, x, value_fn=loss, key=jax.random.key(0))
      >>> bool(loss(optax.apply_updates(x, step), None) < loss(x, None))
      True

    References:
      Spall, "Multivariate stochastic approximation using a simultaneous perturbation gradient
      approximation", 1992; "Scaling Zero-Order Pretraining Through Model Sharding", section 2.
    """
    if n_pert < 1 or chunk < 1:
        raise ValueError(f"n_pert and chunk must be at least 1, not {n_pert} and {chunk}")

    def init(params: PyTree) -> SPSAState:
        del params
        return SPSAState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def update(
        updates: PyTree,
        state: SPSAState,
        params: PyTree | None = None,
        *,
        value_fn: Callable[[PyTree, Any], jax.Array],
        key: jax.Array,
        batch: Any = None,
        **extra: Any,
    ) -> tuple[PyTree, SPSAState]:
        del updates, state, extra
        if params is None:
            raise ValueError("spsa needs params: call update(updates, state, params, ...)")
        for leaf in jax.tree.leaves(params):
            if isinstance(eps, float) and eps < jnp.finfo(leaf.dtype).eps:
                raise ValueError(
                    f"eps={eps} rounds away on {leaf.dtype} parameters of order 1 (their spacing "
                    f"is {jnp.finfo(leaf.dtype).eps}): perturb float32 ones and let the loss cast"
                )
        devices = 1 if axis_name is None else lax.axis_size(axis_name)
        if n_pert % devices:
            raise ValueError(f"n_pert={n_pert} cannot be split over {devices} devices evenly")
        mine = n_pert // devices
        first = 0 if axis_name is None else lax.axis_index(axis_name) * mine

        def probe(j: jax.Array, batch_j: Any) -> tuple[PyTree, jax.Array, jax.Array]:
            """Direction j, half the difference of its two losses, and their mean."""
            z = law(key, j, params)
            losses = jax.vmap(lambda sign: value_fn(_add_scaled(params, sign * eps, z), batch_j))(
                jnp.array([1.0, -1.0])
            )
            losses = losses.astype(jnp.promote_types(losses.dtype, jnp.float32))
            return z, (losses[0] - losses[1]).mean() / 2, losses.mean()

        def add(estimate: PyTree, half: jax.Array, z: PyTree) -> PyTree:
            return jax.tree.map(lambda g, z: g + _weighted_sum(half / eps, z), estimate, z)

        def forwards(estimate, xs):
            js, batches = xs
            z, half, mean = jax.vmap(probe, in_axes=(0, 0 if own_batch else None))(
                js, batches if own_batch else batch
            )
            return estimate if exchanges_losses else add(estimate, half, z), (half, mean)

        def from_losses(estimate, xs):
            js, half = xs
            return add(estimate, half, jax.vmap(lambda j: law(key, j, params))(js)), None

        # Every device can make every direction, so processes exchange losses where these are fewer
        # than coordinates. In one process an exchange is cheaper than directions made again.
        size = sum(x.size for x in jax.tree.leaves(params))
        exchanges_losses = axis_name is not None and jax.process_count() > 1 and 2 * n_pert < size
        zero = varying = jax.tree.map(jnp.zeros_like, params)
        if axis_name is not None and not exchanges_losses:  # what is summed differs by device
            varying = jax.tree.map(lambda x: lax.pcast(x, axis_name, to="varying"), zero)
        xs = (first + jnp.arange(mine), batch if own_batch else None)
        total, losses = _scan_chunks(forwards, varying, xs, chunk)
        if axis_name is not None:
            # Each device's losses at their place among all, so that one sum joins everything.
            losses = [jnp.zeros(n_pert, x.dtype).at[xs[0]].set(x) for x in losses]
            if exchanges_losses:
                losses = lax.psum(losses, axis_name)
                total, _ = _scan_chunks(from_losses, zero, (jnp.arange(n_pert), losses[0]), chunk)
            else:
                total, losses = lax.psum((total, losses), axis_name)
        half, mean = (x.astype(jnp.float32) for x in losses)
        loss = mean.mean()
        deviation = jnp.sqrt(jnp.square(half).mean() + jnp.square(mean - loss).mean())
        return jax.tree.map(lambda x: x / n_pert, total), SPSAState(loss, deviation)

    return optax.GradientTransformationExtraArgs(init, update)
