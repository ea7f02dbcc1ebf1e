"""Probes: what a random direction z is.

A probe law is a function `law(key, j, params) -> z`: direction j of the update that `key` belongs
to, shaped like params. Coordinates of different leaves are independent: each leaf has a key of its
own. Vectors (LayerNorm gains) get +-1 from every law but the Gaussian.

`rank_one`, `low_rank_gaussian` and `flipout` stand for a matrix's direction without forming it.
Such a direction has what an estimator and a model do with a matrix: `x @ (p + scale * z)`, its
transpose and its rows, and `z.weighted_sum(w)`, the dense sum_j w_j z_j of stacked directions.
Under `jax.vmap` over directions the product `x @ p` is then one large product for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any
ProbeLaw = Callable[[jax.Array, jax.Array | int, PyTree], PyTree]

_node = jax.tree_util.register_dataclass


@_node
@dataclasses.dataclass(frozen=True)
class Perturbed:
    """The sum of a matrix and a structured direction: a model multiplies by it from the left, by
    its transpose, and looks up its rows."""

    matrix: jax.Array  # [m, n]
    direction: LowRank | Flipout

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        return x @ self.matrix + self.direction.product(x)

    def __getitem__(self, rows: jax.Array) -> jax.Array:
        return self.matrix[rows] + self.direction[rows]

    @property
    def T(self) -> Perturbed:
        return Perturbed(self.matrix.T, self.direction.T)


@_node
@dataclasses.dataclass(frozen=True)
class LowRank:
    """sum_i columns_i rows_i^T."""

    columns: jax.Array  # [r, m]
    rows: jax.Array  # [r, n]

    __array_ufunc__ = None  # numpy leaves `p + z` and `scale * z` to us

    def __rmul__(self, scale: jax.Array | float) -> LowRank:
        return LowRank(self.columns, scale * self.rows)

    def __radd__(self, matrix: jax.Array) -> Perturbed:
        return Perturbed(matrix, self)

    def __rmatmul__(self, matrix: jax.Array) -> LowRank:
        return LowRank(self.columns @ matrix.T, self.rows)

    def __getitem__(self, rows: jax.Array) -> jax.Array:
        return self._expand([column[rows] for column in self.columns])

    @property
    def T(self) -> LowRank:
        return LowRank(self.rows, self.columns)

    def product(self, x: jax.Array) -> jax.Array:
        # Not (x * column).sum(-1): XLA's CPU backend (seen in jax 0.10.2) fuses such a sum with
        # what follows and gets it wrong beyond 32,768 elements.
        return self._expand([x @ column for column in self.columns])

    def _expand(self, coefficients: list[jax.Array]) -> jax.Array:
        # Term by term: for the one or few terms there are, cheaper than a product of that depth.
        terms = zip(coefficients, self.rows, strict=True)
        return functools.reduce(operator.add, (c[..., None] * row for c, row in terms))

    def weighted_sum(self, weights: jax.Array) -> jax.Array:
        rows = weights.astype(self.rows.dtype)[:, None, None] * self.rows
        columns, rows = (x.reshape(-1, x.shape[-1]) for x in (self.columns, rows))
        return jnp.matmul(columns.T, rows, precision="highest")


@_node
@dataclasses.dataclass(frozen=True)
class Flipout:
    """base * signs, elementwise; an update's directions share the base."""

    base: jax.Array  # [m, n]
    signs: LowRank  # of rank one

    __array_ufunc__ = None

    def __rmul__(self, scale: jax.Array | float) -> Flipout:
        return Flipout(self.base, scale * self.signs)

    def __radd__(self, matrix: jax.Array) -> Perturbed:
        return Perturbed(matrix, self)

    def __getitem__(self, rows: jax.Array) -> jax.Array:
        return self.base[rows] * self.signs[rows]

    @property
    def T(self) -> Flipout:
        return Flipout(self.base.T, self.signs.T)

    def product(self, x: jax.Array) -> jax.Array:
        return ((x * self.signs.columns[0]) @ self.base) * self.signs.rows[0]

    def weighted_sum(self, weights: jax.Array) -> jax.Array:
        return self.base[0] * self.signs.weighted_sum(weights)


def _per_leaf(draw: Callable[[jax.Array, jax.Array | int, jax.Array], Any]) -> ProbeLaw:
    def law(key: jax.Array, j: jax.Array | int, params: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(params)
        keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        return jax.tree.unflatten(
            structure, [draw(k, j, x) for k, x in zip(keys, leaves, strict=True)]
        )

    return law


def _independent(draw: Callable[[jax.Array, jax.Array], Any]) -> ProbeLaw:
    """A law whose directions have nothing in common."""
    law = _per_leaf(lambda key, _, x: draw(key, x))
    return lambda key, j, params: law(jax.random.fold_in(key, j), 0, params)


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


def _signs(key: jax.Array, x: jax.Array) -> jax.Array:
    bit = _random_fields(key, x.size, 1).astype(jnp.int32)
    return (2 * bit - 1).astype(x.dtype).reshape(x.shape)


def _sparse(key: jax.Array, x: jax.Array) -> jax.Array:
    if x.ndim < 2:
        return _signs(key, x)
    field = _random_fields(key, x.size, 2).astype(jnp.int32)
    # 0, 1, 2, 3 -> 0, -1, 0, +1: the low bit is the activity, the high bit the sign.
    return ((field & 1) * (field - 2)).astype(x.dtype).reshape(x.shape)


def _rank_one(key: jax.Array, x: jax.Array) -> Any:
    if x.ndim != 2:
        return _signs(key, x)
    signs = _signs(key, jnp.zeros((1, sum(x.shape)), x.dtype))
    return LowRank(signs[:, : x.shape[0]], signs[:, x.shape[0] :])


def low_rank_gaussian(rank: int) -> ProbeLaw:
    """EGGROLL's directions: a matrix's is A B^T / sqrt(rank), with A [m, rank] and B [n, rank] of
    N(0, 1) entries; a vector's has N(0, 1) coordinates (Sarkar et al., 2025)."""

    def draw(key: jax.Array, x: jax.Array) -> Any:
        if x.ndim != 2:
            return jax.random.normal(key, x.shape, x.dtype)
        factors = jax.random.normal(key, (rank, sum(x.shape)), x.dtype)
        return LowRank(factors[:, : x.shape[0]], factors[:, x.shape[0] :] / jnp.sqrt(rank))

    return _independent(draw)


def _flipout(key: jax.Array, j: jax.Array | int, x: jax.Array) -> Any:
    of_direction = _rank_one(jax.random.fold_in(key, j), x)
    if x.ndim != 2:
        return of_direction
    return Flipout(_signs(jax.random.fold_in(key, 2**32 - 1), x), of_direction)


dense_rademacher = _independent(_signs)
dense_rademacher.__doc__ = """Every coordinate is +-1 with equal probability (paper, section 6)."""

sparse_rademacher = _independent(_sparse)
sparse_rademacher.__doc__ = """The paper's training probe (section 2): a matrix's coordinate is 0
with probability 1/2, else +-1; vectors (LayerNorm gains) are always +-1. E[z z^T] is diag(q) with
q = 1/2 or 1, and the estimate is not rescaled by it."""

gaussian = _independent(lambda key, x: jax.random.normal(key, x.shape, x.dtype))
gaussian.__doc__ = """Every coordinate is N(0, 1): MeZO's and evolution strategies' probe."""

rank_one_rademacher = _independent(_rank_one)
rank_one_rademacher.__doc__ = """A matrix's z is column row^T with independent signs: m + n random
bits in place of m n, and E[z z^T] = I and |z|^2 = m n as for dense signs."""

flipout = _per_leaf(_flipout)
flipout.__doc__ = """A full-rank relative of `rank_one_rademacher`: one matrix of signs an update,
shared by its directions, times a direction's own column row^T (Wen et al., 2018)."""

LAWS: dict[str, ProbeLaw] = {
    "sparse": sparse_rademacher,
    "dense": dense_rademacher,
    "gaussian": gaussian,
    "rank_one": rank_one_rademacher,
    "flipout": flipout,
}

STRUCTURED = ("rank_one", "flipout")  # laws whose directions share products
