"""Scoring windows: which bytes of which documents a model is scored on (paper, section 4).

A window is 1,025 bytes. A model reads the first 1,024, is routed on the first 256, and is scored on
the targets at byte indices 257..1024: 768 of them, so windows 768 bytes apart tile a document.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from soma_jax.errors import SomaError

CONTEXT = 256  # bytes a window is routed on
WINDOW = 1025  # bytes in a window: 1,024 inputs, each with the next byte as its target
Text = bytes | npt.NDArray[np.uint8]  # of one document; arrays may be memory-mapped
STRIDE = WINDOW - CONTEXT - 1  # 768: scored targets in a window, and the step between windows


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of bytes, ready to be scored."""

    ids: npt.NDArray[np.uint8]  # [n, 1025], zeros after the valid bytes
    lengths: npt.NDArray[np.int32]  # [n], valid bytes of each window
    document: npt.NDArray[np.int32]  # [n], index of the document each window was cut from

    def __len__(self) -> int:
        return len(self.ids)


def scored_mask(lengths: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which of `ids[:, 257:]` are scored targets, bool [n, 768]: those within the valid bytes."""
    return np.arange(CONTEXT + 1, WINDOW) < np.asarray(lengths)[:, None]


def one_per_document(documents: Sequence[Text], *, count: int = 4096, seed: int) -> Windows:
    """The test protocol: one full window inside each of at most `count` documents.

    Documents shorter than 1,025 bytes are left out. Which of the others are drawn, and where in
    each the window lies, is a function of `seed`, `count` and the documents in the order given, so
    give them in the corpus's own order. Windows come in that order too.

    Raises:
        SomaError: no document is long enough, or `count` is not positive.
    """
    eligible = np.flatnonzero([len(text) >= WINDOW for text in documents])
    if not len(eligible):
        raise SomaError(
            f"none of the {len(documents)} documents holds the {WINDOW:,} bytes of a window: "
            "score longer documents"
        )
    if count < 1:
        raise SomaError(f"count is {count}: ask for at least one document")
    rng = np.random.default_rng(seed)
    drawn = np.sort(rng.choice(eligible, min(count, len(eligible)), replace=False))
    return _cut(documents, [(i, int(rng.integers(len(documents[i]) - WINDOW + 1))) for i in drawn])


def strided(segments: Sequence[Text], *, drop_incomplete: bool) -> Windows:
    """Windows at offsets 0, 768, 1536, ... of each segment, in order.

    With `drop_incomplete` only full windows are kept (the WikiText protocol). Without it the last
    window may be short, and every byte of a segment after its first 257 is scored exactly once.
    """
    rounding = 0 if drop_incomplete else STRIDE - 1
    starts = [
        (index, STRIDE * step)
        for index, text in enumerate(segments)
        for step in range((len(text) - CONTEXT - 1 + rounding) // STRIDE)
    ]
    return _cut(segments, starts)


def _cut(documents: Sequence[Text], starts: Sequence[tuple[int, int]]) -> Windows:
    """One window for each (document, offset)."""
    windows = Windows(
        ids=np.zeros((len(starts), WINDOW), np.uint8),
        lengths=np.zeros(len(starts), np.int32),
        document=np.array([index for index, _ in starts], np.int32),
    )
    for row, (index, start) in enumerate(starts):
        piece = np.frombuffer(documents[index][start : start + WINDOW], np.uint8)
        windows.ids[row, : len(piece)] = piece
        windows.lengths[row] = len(piece)
    return windows


# A title is a line ` = Title = ` between blank lines. Subheadings have more '=' on each side; prose
# that merely starts and ends with '=' (the test file has two such lines) has no blank lines around.
_TITLE = re.compile(
    rb"(?:\A|^[ \t]*\n)(?P<title> = (?![ =])[^\n]*(?<![ =]) = \n)(?=[ \t]*(?:\n|\Z))", re.MULTILINE
)


def wikitext_segments(raw: bytes) -> list[bytes]:
    """The articles of a WikiText raw file, each from its title line to the next one's.

    Blank lines before the first title are dropped; text before it is a segment of its own.

    Raises:
        SomaError: the file has no title line.
    """
    starts = [match.start("title") for match in _TITLE.finditer(raw)]
    if not starts:
        raise SomaError(
            "no title line (' = Title = ' between blank lines): give the raw WikiText file "
            "with its line ends (LF) and blank lines as published"
        )
    if raw[: starts[0]].strip():
        starts.insert(0, 0)
    return [raw[start:end] for start, end in zip(starts, [*starts[1:], len(raw)], strict=True)]


def screen(train_documents: Iterable[Text], test_documents: Iterable[Text]) -> list[int]:
    """Indices of the test documents whose full text occurs as a training document.

    Texts are compared after NFKC, case folding and collapsing of whitespace. Equal texts have equal
    normal forms, so this finds exact copies too. Training documents are read once, one at a time;
    only the digests of the test documents are held.
    """
    digests = [_digest(text) for text in test_documents]
    wanted = set(digests)
    seen = {digest for digest in map(_digest, train_documents) if digest in wanted}
    return [index for index, digest in enumerate(digests) if digest in seen]


def _digest(text: Text) -> bytes:
    digest = hashlib.blake2b()
    for piece in _pieces(text):
        decoded = piece.decode(errors="surrogateescape")  # keeps what is not UTF-8 apart
        for word in unicodedata.normalize("NFKC", decoded).casefold().split():
            digest.update(word.encode(errors="surrogateescape") + b" ")
    return digest.digest()


def _pieces(text: Text, size: int = 1 << 20) -> Iterator[bytes]:
    """A text in pieces that end with a space or line end, where words and NFKC can be cut."""
    start = 0
    while start < len(text):
        end = start + size
        while end < len(text) and text[end - 1] not in b" \n":
            end += 1
        yield bytes(text[start:end])
        start = end
