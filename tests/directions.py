"""What tests of directions share."""

import jax
import jax.numpy as jnp

from soma_jax import probes


def structured(z) -> bool:
    return isinstance(z, probes.LowRank | probes.Flipout)


def as_matrix(z):
    """What a direction of a leaf stands for, from its parts alone."""
    if isinstance(z, probes.LowRank):
        return jnp.einsum("rm,rn->mn", z.columns, z.rows, precision="highest")
    return z.base * as_matrix(z.signs) if isinstance(z, probes.Flipout) else z


def dense(z):
    """A direction with every structured part as the matrix that it stands for."""
    return jax.tree.map(as_matrix, z, is_leaf=structured)
