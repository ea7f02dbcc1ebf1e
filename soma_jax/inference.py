"""Routed scoring of many texts: each expert reads all that is routed to it, and no other expert's.

Texts are grouped by expert, and a group is cut into pieces of equal size, so that one compiled
program serves every group, and each device takes a piece. A byte's log-probability depends on its
text and expert alone, not on what else is scored.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from soma_jax import model
from soma_jax.data.windows import CONTEXT
from soma_jax.routing.router import Router

# Bytes after which a text shorter than CONTEXT is routed anew: better than 64, 128 or all experts
# on the validation text (launch/evaluate.py --data=embedded:valid --cold_start).
REROUTE = 16
START = b"\n"  # what the first byte of a text is predicted from


def log_probabilities(
    experts: Sequence[model.Params], ids: np.ndarray, routes: np.ndarray, skip: int = 0
) -> np.ndarray:
    """Log-probability of every byte of texts but the first `skip` + 1, under each of their experts.

    The forward is float32; a text starts from the zero state. An expert that occurs several times
    in a text's routes reads it once.

    Args:
      experts: parameters of the N experts; only those in `routes` are looked up.
      ids: texts of one length, uint8 [n, L].
      routes: the experts of each text, [n, k].
      skip: how many bytes after the first are read without being scored.

    Returns:
      float32 [n, k, L - 1 - skip].
    """
    n, scored = len(ids), ids.shape[1] - 1 - skip
    if not routes.size:
        return np.zeros((*routes.shape, scored), np.float32)
    numbers = routes.astype(np.int64) * n + np.arange(n)[:, None]
    pairs, where = np.unique(numbers, return_inverse=True)  # expert by expert
    expert, row = np.divmod(pairs, n)
    together, rows, block = _sizes()
    position = np.arange(len(pairs)) - np.searchsorted(expert, expert)  # in its expert's group
    pieces = np.split(np.arange(len(pairs)), np.flatnonzero(position % rows == 0)[1:])

    result = np.empty((len(pairs), scored), np.float32)
    placement, at_once = NamedSharding(_mesh(), P("piece")), len(_devices()) * together
    on_devices: list[int] = []
    running: list[tuple[list[np.ndarray], jax.Array]] = []

    def collect() -> None:
        some, log_p = running.pop()
        for piece, values in zip(some, np.asarray(log_p), strict=False):
            result[piece] = values[: len(piece)]

    for start in range(0, len(pieces), at_once):
        some = pieces[start : start + at_once]
        wanted = [int(expert[piece[0]]) for piece in some]
        wanted += wanted[-1:] * (at_once - len(some))  # what is left over reads zeros
        if wanted != on_devices:
            stacked = jax.tree.map(lambda *x: np.stack(x), *(experts[i] for i in wanted))
            params, on_devices = jax.device_put(stacked, placement), wanted
        texts = np.zeros((at_once, rows, ids.shape[1]), np.uint8)
        for place, piece in enumerate(some):
            texts[place, : len(piece)] = ids[row[piece]]
        # The next pieces are made ready while the devices are busy with these.
        log_p = _forward()(params, jax.device_put(texts, placement), skip, block)
        if running:
            collect()
        running.append((some, log_p))
    collect()
    return result[where.reshape(routes.shape)]


def mixture(log_p: np.ndarray) -> np.ndarray:
    """Log of the plain mean of k experts' probabilities: [n, k, T] to [n, T] of the same dtype."""
    top = log_p.max(1)
    return top + np.log(np.exp(log_p - top[:, None]).mean(1))


def beginnings(
    experts: Sequence[model.Params],
    router: Router,
    texts: Sequence[bytes],
    k: int,
    reroute: int = REROUTE,
) -> np.ndarray:
    """Log-probability of the first 257 bytes of texts, each given those before it alone.

    The cold-start rule, which the paper leaves open: a text begins after a newline; after every
    `reroute` bytes (0: never) it is routed anew on the bytes that are there, at most 256, and its
    new experts have read it from the start. From byte 256 on, routing is the paper's.

    Returns:
      float32 [n, 257]; what lies beyond a text's end means nothing.
    """
    length = CONTEXT + 1
    ids = np.zeros((len(texts), 1 + length), np.uint8)
    for row, text in zip(ids, texts, strict=True):
        some = START + text[:length]
        row[: len(some)] = np.frombuffer(some, np.uint8)
    starts = sorted({*range(0, CONTEXT, reroute or CONTEXT), CONTEXT if reroute else 0})
    routes = np.stack([router.route([t[:s] for t in texts], k, CONTEXT) for s in starts], 1)
    log_p = log_probabilities(experts, ids, routes.reshape(len(texts), -1))
    log_p = log_p.reshape(*routes.shape, length)
    spans = itertools.pairwise([*starts, length])
    return np.concatenate(
        [mixture(log_p[:, i, :, slice(*span)]) for i, span in enumerate(spans)], axis=1
    )


def _sizes() -> tuple[int, int, int]:
    """Pieces a device takes at once, texts of a piece, and bytes whose activations exist at a time
    (0: all; see `expert.chunk_and_block`).

    16 rows are nearly as fast as more on a CPU at every width, and small groups are not padded with
    much: an expert of 256 sees few of a batch's texts. An accelerator needs all the work at once.
    """
    return (1, 16, 64) if jax.default_backend() == "cpu" else (16, 64, 0)


def _devices() -> list[jax.Device]:
    return jax.local_devices()[:8]  # more would mostly score padding


@cache
def _mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((len(_devices()),), ("piece",), (AxisType.Auto,), devices=_devices())


@cache
def _forward():
    @partial(jax.jit, static_argnums=(2, 3))
    def forward(params: model.Params, ids: jax.Array, skip: int, block: int) -> jax.Array:
        def of_piece(params: model.Params, ids: jax.Array) -> jax.Array:
            with jax.default_matmul_precision("highest"):  # float32 also where TF32 is the default
                losses = model.byte_losses(params, ids, block)
            return -losses[:, skip:].astype(jnp.float32)

        return jax.shard_map(
            jax.vmap(of_piece),
            mesh=_mesh(),
            in_specs=P("piece"),
            out_specs=P("piece"),
            check_vma=False,
        )(params, ids)

    return forward
