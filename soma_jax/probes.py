"""Probes: what a random direction z is.

A probe law is a function `law(key, params) -> z` with z shaped like params. Coordinates of
different leaves are independent: each leaf has a key of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
ProbeLaw = Callable[[jax.Array, PyTree], PyTree]


def _per_leaf(draw: Callable[[jax.Array, jax.Array], jax.Array]) -> ProbeLaw:
    def law(key: jax.Array, params: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(params)
        keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        return jax.tree.unflatten(
            structure, [draw(k, x) for k, x in zip(keys, leaves, strict=True)]
        )

    return law


def _random_fields(key: jax.Array, size: int, bits: int) -> jax.Array:
    """`size` independent unsigned integers of `bits` random bits each.

    Threefry makes 32 bits at a time; a sign needs one. Unpacking them makes a probe 16 to 32 times
    cheaper than a random word per coordinate, which would cost as much as a short forward.
    """
    per_word = 32 // bits
    words = jax.random.bits(key, (-(-size // per_word),), jnp.uint32)
    shifts = jnp.arange(0, 32, bits, dtype=jnp.uint32)
    # Shifts on the slow axis: each is one pass over contiguous words.
    fields = (words[None, :] >> shifts[:, None]) & jnp.uint32(2**bits - 1)
    return fields.reshape(-1)[:size]


def _dense(key: jax.Array, x: jax.Array) -> jax.Array:
    bit = _random_fields(key, x.size, 1).astype(jnp.int32)
    return (2 * bit - 1).astype(x.dtype).reshape(x.shape)


def _sparse(key: jax.Array, x: jax.Array) -> jax.Array:
    if x.ndim < 2:
        return _dense(key, x)
    field = _random_fields(key, x.size, 2).astype(jnp.int32)
    # 0, 1, 2, 3 -> 0, -1, 0, +1: the low bit is the activity, the high bit the sign.
    return ((field & 1) * (field - 2)).astype(x.dtype).reshape(x.shape)


dense_rademacher = _per_leaf(_dense)
dense_rademacher.__doc__ = """Every coordinate is +-1 with equal probability (paper, section 6)."""

sparse_rademacher = _per_leaf(_sparse)
sparse_rademacher.__doc__ = """The paper's training probe (section 2): a matrix's coordinate is 0
with probability 1/2, else +-1; vectors (LayerNorm gains) are always +-1. E[z z^T] is diag(q) with
q = 1/2 or 1, and the estimate is not rescaled by it."""

LAWS: dict[str, ProbeLaw] = {"sparse": sparse_rademacher, "dense": dense_rademacher}
