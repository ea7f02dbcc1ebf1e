import gzip
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax.data.windows import (
    CONTEXT,
    STRIDE,
    WINDOW,
    one_per_document,
    scored_mask,
    screen,
    strided,
    wikitext_segments,
)
from soma_jax.errors import SomaError


def text_of(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(256, size=length, dtype=np.uint8).tobytes()


def scored_bytes(windows) -> bytes:
    return windows.ids[:, CONTEXT + 1 :][scored_mask(windows.lengths)].tobytes()


def test_protocol_constants():
    """Paper, section 4: 1,025 bytes, route on 256, score 768."""
    assert (WINDOW, CONTEXT, STRIDE) == (1025, 256, 768)


def test_scored_targets_are_byte_indices_257_to_1024_within_the_valid_bytes():
    mask = scored_mask([0, 257, 258, 1024, 1025])
    assert mask.shape == (5, 768)
    assert mask.sum(1).tolist() == [0, 0, 1, 767, 768]
    assert mask[2, 0]
    assert not mask[3, -1]


@pytest.mark.parametrize(
    ("length", "windows", "full"),
    [
        *[(length, 0, 0) for length in (0, 1, 256, 257)],
        (258, 1, 0),
        (1024, 1, 0),
        (1025, 1, 1),
        (1026, 2, 1),
        (1025 + 768, 2, 2),
        (1025 + 768 + 1, 3, 2),
    ],
)
def test_strided_counts(length, windows, full):
    document = text_of(length)
    every = strided([document], drop_incomplete=False)
    assert len(every) == windows
    assert scored_mask(every.lengths).sum() == max(0, length - 257)
    complete = strided([document], drop_incomplete=True)
    assert len(complete) == full
    assert (complete.lengths == WINDOW).all()
    assert np.array_equal(complete.ids, every.ids[:full])


@given(st.lists(st.integers(0, 4000), max_size=4), st.booleans())
@settings(deadline=None, max_examples=60)
def test_strided_scores_each_byte_once_with_its_own_context(lengths, drop_incomplete):
    documents = [text_of(length, seed) for seed, length in enumerate(lengths)]
    windows = strided(documents, drop_incomplete=drop_incomplete)
    assert windows.ids.dtype == np.uint8
    assert windows.lengths.dtype == windows.document.dtype == np.int32

    expected = b""
    for index, document in enumerate(documents):
        (rows,) = np.nonzero(windows.document == index)
        for step, row in enumerate(rows):
            valid = document[STRIDE * step :][:WINDOW]
            assert windows.ids[row].tobytes() == valid.ljust(WINDOW, b"\0")
            assert windows.lengths[row] == len(valid)
        end = 257 + STRIDE * ((len(document) - 257) // STRIDE) if drop_incomplete else None
        expected += document[257:end] if len(document) > 257 else b""
    assert scored_bytes(windows) == expected


def test_one_per_document_cuts_one_full_window_inside_each_long_document():
    documents = [text_of(length, length) for length in (3000, 1024, 1025, 0, 1500)]
    windows = one_per_document(documents, seed=0)
    assert windows.document.tolist() == [0, 2, 4]
    assert windows.lengths.tolist() == [WINDOW] * 3
    assert scored_mask(windows.lengths).all()
    for row, index in enumerate(windows.document):
        assert windows.ids[row].tobytes() in documents[index]


def test_one_per_document_reaches_every_offset():
    document = text_of(1027)
    drawn = {one_per_document([document], seed=s).ids.tobytes() for s in range(40)}
    assert drawn == {document[start : start + WINDOW] for start in range(3)}


def test_one_per_document_draws_at_most_count_documents_by_the_seed():
    documents = [text_of(2000, seed) for seed in range(50)]
    draws = [one_per_document(documents, count=10, seed=seed) for seed in (0, 0, 1)]
    assert all(len(set(draw.document)) == 10 for draw in draws)
    assert all((np.diff(draw.document) > 0).all() for draw in draws)
    assert np.array_equal(draws[0].ids, draws[1].ids)
    assert not np.array_equal(draws[0].document, draws[2].document)
    # A test set is a function of its seed on every machine and under every NumPy.
    assert draws[0].document.tolist() == [0, 1, 3, 8, 11, 13, 21, 26, 34, 40]
    offsets = [
        documents[i].index(w.tobytes())
        for i, w in zip(draws[0].document, draws[0].ids, strict=True)
    ]
    assert offsets == [912, 270, 796, 654, 2, 384, 836, 541, 32, 746]


@pytest.mark.parametrize(
    ("documents", "count", "message"),
    [
        ([], 4096, "none of the 0 documents"),
        ([b"x" * 1024] * 2, 4096, "none of the 2 documents holds the 1,025 bytes"),
        ([b"x" * 1025], 0, "count is 0"),
    ],
)
def test_one_per_document_refuses(documents, count, message):
    with pytest.raises(SomaError, match=message):
        one_per_document(documents, count=count, seed=0)


def test_wikitext_segments_split_at_titles_only():
    articles = [
        b" = A = \n \n text \n = 1 rad / s and k = \n 1 ohm \n \n = = Sub = = \n \n more \n \n",
        b" = B ( x = y ) = \n \n = = odd = \n \n = odd = = \n \n Q \n = Qualified \n \n \n",
        b" = Blank on one side = \n \n = before = \n text \n = after = \n \n",
        b" = C = \n \n",
        b" = D = \n",
    ]
    raw = b"".join(articles)
    assert wikitext_segments(raw) == articles
    assert wikitext_segments(b" \n\n" + raw) == articles
    assert wikitext_segments(b"loose text \n \n" + raw) == [b"loose text \n \n", *articles]


@pytest.mark.parametrize("raw", [b"", b"plain\n", b" = = Sub = = \n \n", b" = A = \r\n \r\n"])
def test_wikitext_without_a_title_is_refused(raw):
    with pytest.raises(SomaError, match="no title line"):
        wikitext_segments(raw)


def test_wikitext_103_test_has_60_articles_and_the_papers_number_of_targets():
    """Paper, section 4: 1.25M scored test targets."""
    path = files("soma_jax") / "data" / "wikitext" / "wiki.test.raw.gz"
    raw = gzip.decompress(path.read_bytes())
    segments = wikitext_segments(raw)
    assert len(segments) == 60
    assert segments[0].startswith(b" = Robert Boulter = \n")
    assert segments[-1].startswith(b" = The Hustler ( film ) = \n")
    assert b"".join(segments) == raw[raw.index(b" = Robert Boulter = ") :]
    windows = strided(segments, drop_incomplete=True)
    assert scored_mask(windows.lengths).sum() == 1632 * 768 == 1_253_376


def test_screen_finds_exact_and_normalised_copies():
    test = [
        b"exact copy",
        "\uff11 Stra\u00dfe".encode(),  # a full-width digit and a sharp s
        b" Spaced\tout \n",
        b"only in the test set",
        b"exact copy, but longer",
        b"not UTF-8 \xff",
    ]
    train = [b"exact copy", b"1 STRASSE", b"spaced OUT", b"only in the", b"not UTF-8 \xfe"]
    assert screen(iter(train), test) == [0, 1, 2]
    assert screen(iter([test[5]]), test) == [5]
    assert screen(iter([]), test) == []
    assert screen(iter(train), []) == []
