"""The training windows of a shard, as a Grain dataset."""

import sys

import grain
import numpy as np
from grain.experimental import index_shuffle

from soma_jax.data.store import Store
from soma_jax.errors import SomaError


def shard_windows(
    store: Store, chunk_ids: np.ndarray, *, length: int, batch: int, seed: int
) -> grain.MapDataset:
    """An endless dataset of training batches, `ds[step]`: uint8 [batch, length].

    Each epoch visits every chunk of the shard once, in a new order, and takes a window at a random
    place inside it. A window longer than its chunk starts with it and runs on into the next; one
    that would leave its document is moved back to end with it; a
    document shorter than `length` is read from its start on into the next one (the last ones of
    the store are moved back). `ds[step]` is a pure function of the store and the arguments, so a
    run resumes at any step, and iteration gives the same batches as indexing.

    Args:
      store: the chunk store.
      chunk_ids: the shard, integers [chunks]: numbers of chunks in the store. It may be smaller
        than a batch, which then spans several epochs.
      length: bytes in a window (T + 1 for T predictions).
      batch: windows in a batch.
      seed: of the orders and the starts, 0 <= seed < 2**32; give each expert its own.

    Raises:
      SomaError: an empty shard, a chunk that is not in the store, a store shorter than a window, or
        an argument out of range.
    """
    chunk_ids = np.asarray(chunk_ids)
    if chunk_ids.ndim != 1 or not len(chunk_ids) or chunk_ids.dtype.kind not in "iu":
        raise SomaError(
            f"A shard is a flat, non-empty integer array of chunk numbers; got {chunk_ids.dtype} "
            f"{list(chunk_ids.shape)}. With few chunks, use fewer experts."
        )
    if chunk_ids.min() < 0 or chunk_ids.max() >= store.n_chunks:
        raise SomaError(f"A shard has chunks outside 0..{store.n_chunks - 1} of {store.directory}.")
    if length < 1 or batch < 1:
        raise SomaError(f"length={length}, batch={batch}: both are at least 1.")
    if store.n_bytes < length:
        raise SomaError(
            f"{store.directory}: {store.n_bytes} bytes, shorter than one window of {length}. "
            "Use a shorter context or a larger corpus."
        )
    if not 0 <= seed < 2**32:
        raise SomaError(f"seed={seed}: needs 0 <= seed < 2**32.")

    n_chunks = len(chunk_ids)
    # Epoch e is shuffled with seed + e, so that without a hash the orders of expert s + 1 would be
    # those of expert s one epoch late.
    order_seed, start_seed = map(int, np.random.SeedSequence(seed).generate_state(2))

    def visit(step: int) -> np.ndarray:
        # The order of range(n_chunks).shuffle(order_seed).repeat().batch(batch), which spends three
        # times as long in wrappers around each element. `index_shuffle` is a permutation computed
        # entry by entry: no order is ever held in memory.
        return chunk_ids[
            [
                index_shuffle(i % n_chunks, n_chunks - 1, (order_seed + i // n_chunks) % 2**32, 4)
                for i in range(step * batch, (step + 1) * batch)
            ]
        ]

    def draw(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        room = np.maximum(store.chunk_sizes(ids) - length, 0)
        starts = store.chunks[ids] + rng.integers(0, room + 1)
        return store.windows(place(starts, store, length), length)

    steps = grain.MapDataset.range(sys.maxsize // batch)
    return steps.map(visit).random_map(draw, seed=start_seed)


def streams(store: Store, chunk_ids: np.ndarray, *, length: int, batch: int) -> grain.MapDataset:
    """An endless dataset of `batch` streams, `ds[step]`: uint8 [batch, length].

    The shard's bytes, in order, are cut into `batch` equal parts. Each stream reads its part
    from the start, length - 1 bytes further at each step, and starts again at the end.

    Args:
      store: the chunk store.
      chunk_ids: the shard, integers [chunks].
      length: bytes in a window (T + 1 for T predictions).
      batch: streams.

    Raises:
      SomaError: a part is shorter than a window.
    """
    chunk_ids = np.sort(chunk_ids)
    ends = np.cumsum(store.chunk_sizes(chunk_ids))
    part = int(ends[-1]) // batch
    if part < length:
        raise SomaError(
            f"{store.directory}: {batch} streams of a shard of {ends[-1]} bytes have {part} bytes "
            f"each, fewer than a window of {length}. Use fewer streams or a larger corpus"
        )
    windows_in_part = (part - 1) // (length - 1)
    # Of a chunk's bytes: where they are in the store, less where they are in the shard.
    offsets = store.chunks[chunk_ids] - (ends - store.chunk_sizes(chunk_ids))

    def read(step: int) -> np.ndarray:
        within = step % windows_in_part * (length - 1) + np.arange(length)
        place = part * np.arange(batch)[:, None] + within  # among the shard's bytes
        chunk = np.searchsorted(ends, place, side="right")
        return store.bytes_[offsets[chunk] + place]

    return grain.MapDataset.range(sys.maxsize).map(read)


def place(starts: np.ndarray, store: Store, length: int) -> np.ndarray:
    """Moves window starts, int64 [n], back so that each window ends within its document; a window
    of a shorter document starts with it, or ends with the store."""
    document = np.searchsorted(store.offsets, starts, side="right")
    first, end = store.offsets[document - 1], store.offsets[document]
    within = np.maximum(first, np.minimum(starts, end - length))
    return np.minimum(within, store.n_bytes - length)


def split_shard(
    store: Store, chunk_ids: np.ndarray, *, validation_share: float, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """A shard's chunks for training and for validation (the paper: 99/1), by a draw of `seed`.

    Training chunks whose windows of `length` bytes could share a byte with a validation window are
    left out, unless there are no others.

    Raises:
      SomaError: fewer than two chunks, one for each part.
    """
    if len(chunk_ids) < 2:
        raise SomaError(
            f"a shard of {len(chunk_ids)} chunk(s): it needs one to train on and one to validate. "
            "Use fewer experts or a larger corpus"
        )
    shuffled = np.random.default_rng(seed).permutation(chunk_ids)
    count = min(max(1, round(validation_share * len(chunk_ids))), len(chunk_ids) - 1)
    validation, train = shuffled[:count], shuffled[count:]

    starts, sizes = store.chunks[train], store.chunk_sizes(train)
    begins = place(starts, store, length)
    ends = place(starts + np.maximum(sizes - length, 0), store, length) + length
    held_out = np.sort(validation)
    last = store.chunks[held_out] + store.chunk_sizes(held_out) - 1
    held_out_begins = place(store.chunks[held_out], store, length)
    held_out_ends = np.maximum.accumulate(place(last, store, length) + length)
    before = np.searchsorted(held_out_begins, ends)  # held-out windows that begin before each end
    clear = train[(before == 0) | (held_out_ends[before - 1] <= begins)]
    return (clear if len(clear) else train), validation


def validation_windows(
    store: Store, chunk_ids: np.ndarray, *, length: int, count: int
) -> np.ndarray:
    """The first `count` of the windows that tile validation chunks, uint8 [count, length].

    They start every length - 1 bytes; one that would leave its document is moved back. Where there
    are fewer, they repeat from the first: the count, and with it the compiled program, is every
    shard's.
    """
    pieces = [
        np.arange(start, start + size, length - 1)
        for start, size in zip(store.chunks[chunk_ids], store.chunk_sizes(chunk_ids), strict=True)
    ]
    starts = np.resize(np.concatenate(pieces), count)
    return store.windows(place(starts, store, length), length)
