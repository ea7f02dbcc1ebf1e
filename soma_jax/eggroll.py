"""EGGROLL: an evolution strategy with low-rank Gaussian directions, as an optax transformation.

For a population of 2 n_pert members theta +- sigma E_j, with E_j = A_j B_j^T / sqrt(rank) for each
matrix, and losses standardised over the population (paper, sections 5 and 6):

    g = 1/(2 n_pert) sum_i (L_i - mean L) / std L * E_i

Members come in pairs of opposite sign, so the mean drops out: this is the SPSA estimate along the
same directions, in units of the population's standard deviation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from soma_jax.probes import low_rank_gaussian
from soma_jax.spsa import spsa

PyTree = Any


def eggroll(
    n_pert: int,
    sigma: jax.Array | float,
    *,
    rank: int = 1,
    own_batch: bool = False,
    chunk: int = 1,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces the updates by EGGROLL's estimate; the authors follow it with a plain rate alpha.

    Args:
      n_pert: pairs of members, half the population.
      sigma: scale of a member's perturbation.
      rank: of a matrix's perturbation.
      own_batch: each pair sees a batch of its own (`spsa`).
      chunk: pairs evaluated at once.
      axis_name: a `jax.shard_map` axis over which the population is split.

    Returns:
      A transformation with the interface and the state of `spsa`.

    References:
      Sarkar et al., "Evolution Strategies at the Hyperscale", 2025.
    """
    estimator = spsa(
        n_pert,
        sigma,
        law=low_rank_gaussian(rank),
        own_batch=own_batch,
        chunk=chunk,
        axis_name=axis_name,
    )

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> Any:
        estimate, state = estimator.update(updates, state, params, **extra)
        # All losses equal: nothing to learn from, and nothing to divide by.
        scale = jnp.where(state.deviation > 0, sigma / state.deviation, 0.0)
        return jax.tree.map(lambda g: (scale * g).astype(g.dtype), estimate), state

    return optax.GradientTransformationExtraArgs(estimator.init, update)
