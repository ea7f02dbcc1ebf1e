import gzip
import json
import math
from collections import Counter
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax import baselines
from soma_jax.baselines import NGram, compressor_nats, ngram_nats
from soma_jax.data.windows import Windows, one_per_document, strided
from soma_jax.errors import SomaError


def letters(rng: np.random.Generator, length: int) -> bytes:
    """Few enough letters that trigrams repeat, bytes 0 and 255 among them."""
    return rng.choice(
        np.array([0, 97, 98, 255], np.uint8), length, p=[0.1, 0.4, 0.3, 0.2]
    ).tobytes()


def probability(train: list[bytes], history: bytes, target: int) -> float:
    """The interpolated model, from counts in a dictionary."""
    grams = Counter(
        text[start : start + k]
        for text in train
        for k in (1, 2, 3)
        for start in range(len(text) - k + 1)
    )
    total = sum(map(len, train))
    p = (grams[bytes([target])] + 0.5) / (total + 128)
    for k in range(1, len(history) + 1):
        context = history[-k:]
        followed = sum(grams[context + bytes([byte])] for byte in range(256))
        p = (grams[context + bytes([target])] + 32 * p) / (followed + 32)
    return p


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 60), max_size=4), st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_scores_equal_a_dictionary_of_counts(seed, lengths, order):
    rng = np.random.default_rng(seed)
    train = [letters(rng, length) for length in [1, *lengths]]
    document = letters(rng, 300)
    windows = strided([document], drop_incomplete=False)
    expected = sum(
        -math.log(probability(train, document[i - order + 1 : i], document[i]))
        for i in range(257, 257 + 20)
    )
    first_20 = Windows(windows.ids, np.array([257 + 20], np.int32), windows.document)
    sums, counts = NGram.fit(train, order).score(first_20)
    assert counts.tolist() == [20]
    np.testing.assert_allclose(sums, [expected], rtol=1e-12)


def test_scores_are_per_window_and_over_scored_targets_only():
    rng = np.random.default_rng(0)
    documents = [rng.integers(97, 101, n, dtype=np.uint8).tobytes() for n in (1500, 300)]
    model = NGram.fit(documents)
    together = strided(documents, drop_incomplete=False)
    sums, counts = model.score(together)
    assert counts.tolist() == [768, 1500 - 257 - 768, 300 - 257]
    alone, _ = model.score(strided(documents[1:], drop_incomplete=False))
    assert sums[2] == alone[0]

    edited = together.ids.copy()
    edited[:, :255] = 0  # two bytes of context for the first target remain
    changed = Windows(edited, together.lengths, together.document)
    np.testing.assert_array_equal(model.score(changed)[0], sums)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_distributions_sum_to_one(order):
    ids = np.zeros((256, 1025), np.uint8)
    ids[:, 255:257] = list(b"ab")
    ids[:, 257] = np.arange(256)
    windows = Windows(ids, np.full(256, 258, np.int32), np.zeros(256, np.int32))
    sums, _ = NGram.fit([b"abcabdab"], order).score(windows)
    assert np.exp(-sums).sum() == pytest.approx(1, abs=1e-12)


def test_grams_do_not_cross_documents_and_pieces_do_not_cut_them(monkeypatch):
    text = bytes(np.random.default_rng(0).integers(256, size=1000, dtype=np.uint8))
    whole = NGram.fit([text])
    assert [counts.sum() for counts in whole.counts] == [1000, 999, 998]
    halves = NGram.fit(iter([text[:500], b"", b"x", text[500:]]))
    assert [counts.sum() for counts in halves.counts] == [1001, 998, 996]

    monkeypatch.setattr(baselines, "PIECE", 7)
    in_pieces = NGram.fit([np.frombuffer(text, np.uint8)])
    for counts, expected in zip(in_pieces.counts, whole.counts, strict=True):
        np.testing.assert_array_equal(counts, expected)


def test_a_lower_order_is_a_slice_of_the_counts():
    documents = [bytes(range(97, 123)) * 20]
    windows = strided(documents, drop_incomplete=False)
    for order in (1, 2):
        sliced = NGram(NGram.fit(documents).counts[:order]).score(windows)[0]
        np.testing.assert_array_equal(sliced, NGram.fit(documents, order).score(windows)[0])


def test_gzip_counts_the_scored_bytes_alone():
    rng = np.random.default_rng(0)
    noise = rng.integers(256, size=257 + 768, dtype=np.uint8).tobytes()
    assert compressor_nats(strided([noise], drop_incomplete=True)) == pytest.approx(
        {"gzip -9": 8 * len(gzip.compress(noise[257:], 9)) / 768 * math.log(2)}
    )
    # Noise costs 8 ln 2 nats a byte and a run of one letter next to nothing.
    in_order = strided([noise, b"a" * 1025], drop_incomplete=True)
    assert compressor_nats(in_order)["gzip -9"] == pytest.approx(4 * math.log(2), rel=0.1)


@pytest.mark.parametrize("order", [0, 4])
def test_other_orders_are_refused(order):
    with pytest.raises(SomaError, match=f"order is {order}"):
        NGram.fit([b"text"], order)


def test_nothing_to_fit_or_to_score_is_refused():
    with pytest.raises(SomaError, match="no training bytes"):
        NGram.fit(iter([b""]))
    nothing = strided([b"x" * 257], drop_incomplete=False)
    with pytest.raises(SomaError, match="score no byte"):
        ngram_nats(NGram.fit([b"text"]), nothing)
    with pytest.raises(SomaError, match="score no byte"):
        compressor_nats(nothing)


def test_figures_of_the_embedded_test_set():
    """What a model trained on the embedded corpus is compared with, in nats/byte."""
    folder = files("soma_jax") / "data" / "embedded"
    train, test = (
        [
            json.loads(line)["text"].encode()
            for line in gzip.decompress((folder / f"{split}.jsonl.gz").read_bytes()).splitlines()
        ]
        for split in ("train", "test")
    )
    windows = one_per_document(test, seed=0)
    assert len(windows) == 74
    nats = ngram_nats(NGram.fit(iter(train)), windows) | compressor_nats(windows)
    assert nats == pytest.approx(
        {"unigram": 3.4342, "bigram": 2.7898, "trigram": 2.1879, "gzip -9": 2.2677}, abs=1e-4
    )
