"""What a model has to beat: byte n-grams and a compressor, on exactly the bytes it is scored on."""

import gzip
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from soma_jax.data.windows import CONTEXT, WINDOW, Text, Windows, scored_mask
from soma_jax.errors import SomaError

NAMES = ("unigram", "bigram", "trigram")
PRIOR = (128.0, 32.0, 32.0)  # weight of the next lower order, in bytes seen
PIECE = 1 << 20  # bytes counted at once: bounds the memory a large document takes


class NGram(NamedTuple):
    """Interpolated byte n-gram model of order `len(counts)`.

    p1(c) = (n(c) + 1/2) / (N + 128), p2(c|b) = (n(bc) + 32 p1(c)) / (n(b.) + 32) and
    p3(c|ab) = (n(abc) + 32 p2(c|b)) / (n(ab.) + 32). A context counts where a byte follows it in
    the same document, so every distribution sums to one. `NGram(model.counts[:k])` is the model of
    order k.
    """

    counts: tuple[npt.NDArray[np.int64], ...]  # k-grams, [256**k], for k = 1 .. order

    @classmethod
    def fit(cls, documents: Iterable[Text], order: int = 3) -> "NGram":
        """Counts the k-grams inside each document, reading the documents once.

        Order 3 holds a table of 128 MiB, of which text touches a small part.

        Raises:
            SomaError: the order is not 1, 2 or 3, or the documents hold no bytes.
        """
        if order not in (1, 2, 3):
            raise SomaError(f"n-gram order is {order}: choose 1, 2 or 3")
        counts = tuple(np.zeros(256**k, np.int64) for k in range(1, order + 1))
        for document in documents:
            ids = np.frombuffer(document, np.uint8) if isinstance(document, bytes) else document
            for start in range(0, len(ids), PIECE):
                for k, table in enumerate(counts, 1):
                    # k - 1 bytes of the next piece complete the k-grams that begin in this one.
                    np.add.at(table, _grams(ids[start : start + PIECE + k - 1], k), 1)
        if not counts[0].any():
            raise SomaError(
                "no training bytes to count n-grams in: were the documents read before?"
            )
        return cls(counts)

    def score(self, windows: Windows) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Sum of nats and number of scored targets of each window, [n] and [n].

        A target's context is the bytes before it in its window.
        """
        p: float | npt.NDArray[np.float64] = 1 / 256
        for k, (table, prior) in enumerate(zip(self.counts, PRIOR, strict=False), 1):
            grams = _grams(windows.ids[:, CONTEXT + 2 - k : WINDOW], k)
            seen = table.reshape(-1, 256).sum(1)[grams >> 8]
            p = (table[grams] + prior * p) / (seen + prior)
        mask = scored_mask(windows.lengths)
        return np.where(mask, -np.log(p), 0.0).sum(1), mask.sum(1)


def _grams(ids: npt.NDArray[np.uint8], k: int) -> npt.NDArray[np.int64]:
    """The k-grams along the last axis, [..., length - k + 1], as base-256 numbers."""
    length = max(ids.shape[-1] - k + 1, 0)
    grams = np.zeros((*ids.shape[:-1], length), np.int64)
    for offset in range(k):
        grams = grams * 256 + ids[..., offset : offset + length]
    return grams


def ngram_nats(trigram: NGram, windows: Windows) -> dict[str, float]:
    """nats/byte of a fitted trigram and of the bigram and unigram it holds.

    Raises:
        SomaError: nothing to score.
    """
    _scored_bytes(windows)
    nats = {}
    for order, name in enumerate(NAMES, 1):
        sums, scored = NGram(trigram.counts[:order]).score(windows)
        nats[name] = float(sums.sum() / scored.sum())
    return nats


def compressor_nats(windows: Windows) -> dict[str, float]:
    """nats/byte of gzip at level 9 over the scored bytes, concatenated in window order.

    The compressor sees neither training data nor the 257 unscored bytes of a window, but, unlike
    the models, it adapts to the scored bytes as it goes. Its 20-odd bytes of framing are counted.

    Raises:
        SomaError: nothing to score.
    """
    scored = _scored_bytes(windows)
    bits = 8 * len(gzip.compress(scored, compresslevel=9, mtime=0))
    return {"gzip -9": bits / len(scored) * math.log(2)}


def _scored_bytes(windows: Windows) -> bytes:
    scored = windows.ids[:, CONTEXT + 1 :][scored_mask(windows.lengths)].tobytes()
    if not scored:
        raise SomaError(
            f"the {len(windows)} windows score no byte: a document needs more than "
            f"{CONTEXT + 1} bytes"
        )
    return scored
