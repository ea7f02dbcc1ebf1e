"""Continues a text byte by byte with the routed ensemble (paper, section 3: inference).

The next byte is drawn from the plain mean of the routed experts' probabilities; every expert
carries its own LSTM state on from the prompt, however long the text grows.

The cold-start rule, which the paper leaves open: a prompt is routed on its first 256 bytes, a
shorter one on the bytes it has, and its experts then stay the same. An empty prompt starts after a
newline byte.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from soma_jax import model, randomness
from soma_jax.data.windows import CONTEXT
from soma_jax.errors import SomaError
from soma_jax.routing.router import Router

_TINY = 1e-30  # as good as zero, and far enough from where float32 underflows


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How bytes are drawn.

    Raises:
      SomaError: a value out of range.
    """

    temperature: float = 1.0  # of the mean distribution, p^(1/T); 0 takes the most probable byte
    top_p: float = 1.0  # draws from the fewest bytes that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise SomaError(f"temperature is {self.temperature}: it must be 0 or more, and finite")
        if not 0 < self.top_p <= 1:
            raise SomaError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise SomaError(f"seed is {self.seed}: it must be in 0..{2**32 - 1}")


def generate(
    experts: Sequence[model.Params],
    router: Router,
    prompt: bytes,
    length: int,
    k: int,
    sampling: Sampling = Sampling(),
) -> Iterator[int]:
    """Yields the `length` bytes that follow a prompt, each as it is drawn.

    They are a function of the arguments. Memory does not grow with `length`.

    Args:
      experts: parameters of the N experts.
      router: says which experts the prompt goes to.
      prompt: any bytes; see the module for short and empty ones.
      length: how many bytes.
      k: how many experts are averaged, at most N.
      sampling: temperature, top_p and seed.

    Raises:
      SomaError: k is below 1.
    """
    prompt = prompt or b"\n"
    (routed,) = router.route([prompt], k, CONTEXT)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(experts[i] for i in routed))
    key = randomness.key(sampling.seed, "generate")
    ids, state = np.frombuffer(prompt, np.uint8), None
    for position in range(length):
        byte, state = _advance(
            stacked,
            state,
            ids,
            jax.random.fold_in(key, position),
            sampling.temperature,
            sampling.top_p,
        )
        yield int(byte)
        ids = np.array([byte], np.uint8)


@jax.jit
def _advance(
    experts: model.Params,
    state: model.State | None,
    ids_T: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
) -> tuple[jax.Array, model.State]:
    """Reads bytes (the prompt, then one at a time) with k stacked experts and draws the next."""
    ids_1xT = ids_T[None].astype(jnp.int32)
    logits, state = jax.vmap(model.apply, (0, None, 0))(experts, ids_1xT, state)
    return sample(key, jax.nn.softmax(logits[:, 0, -1]).mean(0), temperature, top_p), state


def sample(
    key: jax.Array, probs: jax.Array, temperature: float | jax.Array, top_p: float | jax.Array
) -> jax.Array:
    """Draws an index from a distribution, int32 [].

    Args:
      key: of the draw.
      probs: [V], at least one of them positive.
      temperature: draws from p^(1/T), normalised; 0 takes the most probable, ties by index.
      top_p: then only from the most probable indices, as few as reach this probability.
    """
    log_p = jnp.log(probs)
    order = jnp.argsort(-log_p)
    # The largest is subtracted first, and 1/T kept in float32's range: no temperature overflows.
    log_p = (log_p - log_p.max())[order] / jnp.clip(temperature, _TINY, 1 / _TINY)
    p = jax.nn.softmax(log_p)
    kept = jnp.cumsum(p) - p < jnp.where(top_p < 1, jnp.maximum(top_p, _TINY), jnp.inf)
    drawn = jax.random.categorical(key, jnp.where(kept, log_p, -jnp.inf))
    return order[jnp.where(temperature > 0, drawn, 0)].astype(jnp.int32)
