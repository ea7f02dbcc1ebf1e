"""Whitening: directions drawn in coordinates in which a matrix's inputs are uncorrelated.

The curvature of the loss along a column of a matrix's direction follows the second moment
C = E[x x^T] of the matrix's inputs x, whose eigenvalues spread over three orders. A random
direction then moves the loss mostly along the few inputs that everything shares, and its noise
limits the rate for all others. With

    z' = S z,   S S^T proportional to (C / c + damping I)^-1,   |S|^2 = rows

(c: the mean of C's diagonal) all inputs count alike. LayerNorm leaves one direction in which there
is no input at all; it takes a share of |S|^2 that grows as damping falls, so damping has a part in
the rate, too. The estimate sum_j d_j z'_j is then that of S S^T g: the input half of a
Kronecker-factored natural gradient, from forward passes alone (C comes with any forward).

References:
  Martens and Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature",
  2015; Benzing, "Gradient descent on neurons and its link to approximate second-order
  optimization", 2022 (the input half does most of the work).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from soma_jax.probes import ProbeLaw


def second_moments(inputs: Any) -> Any:
    """E[x x^T], [rows, rows], of what a matrix multiplies (`model.forward`); None for a vector."""

    def of_matrix(x: jax.Array) -> jax.Array:
        x = x.reshape(-1, x.shape[-1])
        return jnp.matmul(x.T, x, precision="highest") / x.shape[0]

    return jax.tree.map(of_matrix, inputs)


def factors(second_moments: Any, damping: float) -> Any:
    """S of every matrix of the body, [rows, rows], upper triangular; a scalar 1 for a vector.

    Args:
      second_moments: of the inputs of each matrix; None for a vector.
      damping: what is added to the eigenvalues of C / c, whose mean is 1.
    """

    def of_leaf(second: jax.Array | None) -> jax.Array:
        if second is None:
            return jnp.ones(())
        rows = second.shape[0]
        identity = jnp.eye(rows, dtype=second.dtype)
        mean = jnp.maximum(jnp.trace(second) / rows, jnp.finfo(second.dtype).tiny)
        lower = jnp.linalg.cholesky(second / mean + damping * identity)
        factor = solve_triangular(lower, identity, lower=True).T
        return factor * jnp.sqrt(rows / jnp.square(factor).sum())

    return jax.tree.map(of_leaf, second_moments, is_leaf=lambda x: x is None)


def whitened(law: ProbeLaw, factors: Any) -> ProbeLaw:
    """The law whose directions of matrices are S z, for z of `law` (not of flipout)."""

    def of_leaf(p: jax.Array, z: Any, factor: jax.Array) -> Any:
        return factor @ z if factor.ndim else z

    return lambda key, j, params: jax.tree.map(of_leaf, params, law(key, j, params), factors)
