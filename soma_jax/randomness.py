"""Randomness is a function of (seed, stream name, indices): resume and placement change nothing."""

from __future__ import annotations

import zlib

import jax
import numpy as np


def key(random_seed: int, stream: str, *indices: int) -> jax.Array:
    """A Threefry key for a named stream, e.g. `key(0, "probes", expert)`.

    Threefry, because rbg keys are not invariant under vmap: a probe would depend on placement.
    """
    result = jax.random.key(random_seed, impl="threefry2x32")
    for word in (zlib.crc32(stream.encode()), *indices):
        result = jax.random.fold_in(result, word)
    return result


def integer(random_seed: int, stream: str, *indices: int) -> int:
    """A seed below 2**31 of a named stream, for libraries that take integers (Grain, numpy)."""
    # The count keeps (0,) and (0, 0) apart: SeedSequence pads with zeros.
    words = (random_seed, zlib.crc32(stream.encode()), len(indices), *indices)
    return int(np.random.SeedSequence(words).generate_state(1)[0]) % 2**31
