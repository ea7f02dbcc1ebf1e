"""Continues texts byte by byte with the routed ensemble (paper, section 3: inference).

The next byte is drawn from the plain mean of the routed experts' probabilities; every expert
carries its own LSTM state on from the prompt, however long the text grows.

The cold-start rule, which the paper leaves open: a text is routed on its first 256 bytes. While it
has fewer, it is routed anew after every so many bytes on those it has, and experts that are new to
it read it from the start. Every text begins after a newline byte, as in `inference.beginnings`.
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
from soma_jax.inference import REROUTE, START
from soma_jax.routing.router import Router

_PIECES = (256, 16, 1)  # bytes of a prompt read at once: three programs read any length
_TINY = 1e-30  # as good as zero, and far enough from where float32 underflows


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How bytes are drawn.

    Raises:
      SomaError: a value out of range.
    """

    temperature: float = 1.0  # of the mean distribution, p^(1/T); 0 takes the most probable byte
    top_k: int = 0  # draws from so many of the most probable bytes; 0: from all
    top_p: float = 1.0  # then from the fewest bytes that together have this probability
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise SomaError(f"temperature is {self.temperature}: it must be 0 or more, and finite")
        if self.top_k < 0:
            raise SomaError(f"top_k is {self.top_k}: it must be 0 (all bytes) or more")
        if not 0 < self.top_p <= 1:
            raise SomaError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**32:
            raise SomaError(f"seed is {self.seed}: it must be in 0..{2**32 - 1}")


def generate(
    experts: Sequence[model.Params],
    router: Router,
    prompts: Sequence[bytes],
    length: int,
    k: int,
    sampling: Sampling = Sampling(),
    reroute: int = REROUTE,
) -> Iterator[bytes]:
    """Yields the next byte of every text, `length` times, each as it is drawn.

    A text is a function of its prompt and the other arguments, and not of the other prompts. Memory
    does not grow with `length`.

    Args:
      experts: parameters of the N experts; only those that are routed to are looked up.
      router: says which experts a text goes to.
      prompts: any bytes; see the module for short ones.
      length: how many bytes.
      k: how many experts are averaged, at most N.
      sampling: temperature, top_k, top_p and seed.
      reroute: bytes after which a text shorter than 256 is routed anew; 0: never.

    Raises:
      SomaError: k is below 1, or reroute below 0.
    """
    if reroute < 0:
        raise SomaError(f"reroute is {reroute}: it must be 0 (never) or more")
    routes = router.route(prompts, k, CONTEXT)
    rows = [_read(experts, *row) for row in zip(routes, prompts, strict=True)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
    last = np.array([(START + prompt)[-1] for prompt in prompts], np.uint8)
    texts = [prompt[:CONTEXT] for prompt in prompts]  # the part that routes
    key = randomness.key(sampling.seed, "generate")
    for position in range(length):
        params, state = stacked
        drawn, state = _advance(
            params,
            state,
            last,
            jax.random.fold_in(key, position),
            sampling.temperature,
            min(sampling.top_k, model.VOCABULARY),
            sampling.top_p,
        )
        stacked, last = (params, state), np.asarray(drawn)
        yield last.tobytes()
        for row, text in enumerate(texts):
            if len(text) == CONTEXT or not reroute:
                continue
            texts[row] = text = text + last[row : row + 1].tobytes()
            if len(text) % reroute == 0 or len(text) == CONTEXT:
                (routed,) = router.route([text], k, CONTEXT)
                if set(routed) != set(routes[row]):
                    routes[row] = routed
                    again = _read(experts, routed, text)
                    stacked = jax.tree.map(lambda x, y, at=row: x.at[at].set(y), stacked, again)


def _read(
    experts: Sequence[model.Params], routed: np.ndarray, text: bytes
) -> tuple[model.Params, model.State]:
    """A text's experts, stacked [k, ...], and their states before its last byte."""
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(experts[i] for i in routed))
    state = jax.vmap(lambda one: model.initial_state(one, 1))(params)
    ids, start = np.frombuffer(START + text, np.uint8)[:-1], 0
    for size in _PIECES:
        while len(ids) - start >= size:
            state = _state_after(params, state, ids[start : start + size])
            start += size
    return params, state


@jax.jit
def _state_after(params: model.Params, state: model.State, ids_T: jax.Array) -> model.State:
    ids_1xT = ids_T[None].astype(jnp.int32)
    return jax.vmap(model.features, (0, None, 0))(params, ids_1xT, state)[1]


@jax.jit
def _advance(
    params: model.Params,
    state: model.State,
    ids_B: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> tuple[jax.Array, model.State]:
    """Reads a byte of each of B texts with its k experts, [B, k, ...], and draws the next."""

    def advance(params, state, byte):
        ids_1x1 = byte.astype(jnp.int32)[None, None]
        logits, state = jax.vmap(model.apply, (0, None, 0))(params, ids_1x1, state)
        probs = jax.nn.softmax(logits[:, 0, 0]).mean(0)
        # The same key in every row: what is drawn for a text does not depend on its place.
        return sample(key, probs, temperature, top_k, top_p).astype(jnp.uint8), state

    return jax.vmap(advance)(params, state, ids_B)


def sample(
    key: jax.Array,
    probs: jax.Array,
    temperature: float | jax.Array,
    top_k: int | jax.Array,
    top_p: float | jax.Array,
) -> jax.Array:
    """Draws an index from a distribution, int32 [].

    Args:
      key: of the draw.
      probs: [V], at least one of them positive.
      temperature: draws from p^(1/T), normalised; 0 takes the most probable, ties by index.
      top_k: only from so many of the most probable indices; 0: from all.
      top_p: then only from the most probable of these, as few as reach this probability of theirs.
    """
    log_p = jnp.log(probs)
    order = jnp.argsort(-log_p)
    # The largest is subtracted first, and 1/T kept in float32's range: no temperature overflows.
    log_p = (log_p - log_p.max())[order] / jnp.clip(temperature, _TINY, 1 / _TINY)
    log_p = jnp.where((jnp.arange(len(probs)) < top_k) | (top_k == 0), log_p, -jnp.inf)
    p = jax.nn.softmax(log_p)
    kept = jnp.cumsum(p) - p < jnp.where(top_p < 1, jnp.maximum(top_p, _TINY), jnp.inf)
    drawn = jax.random.categorical(key, jnp.where(kept, log_p, -jnp.inf))
    return order[jnp.where(temperature > 0, drawn, 0)].astype(jnp.int32)
