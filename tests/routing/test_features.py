"""Text features: what a row is, what it depends on, and what cannot be fitted."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax.errors import SomaError
from soma_jax.routing.features import TextFeatures

SEA = ["whale", "ship", "harpoon", "captain", "ocean", "sail", "wind", "deck"]
CODE = ["function", "return", "static", "pointer", "compile", "buffer", "loop", "index"]


def chunks(n: int = 60) -> list[bytes]:
    """Half about the sea and half about code, with stop words and one rare word in between."""
    rng = np.random.default_rng(0)
    return [
        ("the " + " of the ".join(rng.choice(SEA if i % 2 else CODE, 20)) + f" rare{i}").encode()
        for i in range(n)
    ]


def fit(texts: list[bytes], max_features: int = 50, min_df: int = 5, n_components: int = 8):
    return TextFeatures.fit(
        texts, max_features=max_features, min_df=min_df, n_components=n_components
    )


@pytest.fixture(scope="module")
def fitted() -> TextFeatures:
    return fit(chunks())


def by_hand(text: bytes) -> np.ndarray:
    """Two words, no projection, and the mean at a text that is all 'aa'."""
    return TextFeatures(
        terms=("aa", "bb"),
        idf=np.ones(2, np.float32),
        components=np.eye(2, dtype=np.float32),
        mean=np.array([1, 0], np.float32),
    ).transform([text])[0]


def test_words_are_those_frequent_enough_and_not_stop_words(fitted):
    assert fitted.terms == tuple(sorted(SEA + CODE))


def test_only_the_most_frequent_words_are_kept():
    texts = [*chunks(), *[b"whale pointer whale pointer"] * 60]
    assert fit(texts, max_features=2).terms == ("pointer", "whale")


def test_rows_follow_the_formula(fitted):
    texts = chunks()
    documents = [Counter(w for w in t.decode().split() if w in fitted.terms) for t in texts]
    expected = np.zeros((len(texts), len(fitted.terms)))
    for column, term in enumerate(fitted.terms):
        df = sum(term in document for document in documents)
        idf = math.log((1 + len(texts)) / (1 + df)) + 1
        for row, document in enumerate(documents):
            if document[term]:
                expected[row, column] = (1 + math.log(document[term])) * idf
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    expected = expected @ fitted.components
    expected -= expected.mean(0)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(fitted.transform(texts), expected, atol=1e-5)


def test_components_are_the_leading_singular_vectors():
    texts = chunks()
    full, two = fit(texts, n_components=16), fit(texts, n_components=2)
    np.testing.assert_allclose(two.components, full.components[:, :2], atol=1e-3)
    np.testing.assert_allclose(two.components.T @ two.components, np.eye(2), atol=1e-5)


def test_same_texts_give_the_same_map(fitted):
    again = fit(chunks())
    for name in ("idf", "components", "mean"):
        np.testing.assert_array_equal(getattr(again, name), getattr(fitted, name))


def test_a_row_depends_on_its_own_text_alone(fitted):
    texts = [*chunks(), b"", b"whale", b"loop the whale"]
    together = fitted.transform(texts)
    alone = np.concatenate([fitted.transform([text]) for text in texts])
    np.testing.assert_array_equal(alone, together)
    np.testing.assert_array_equal(fitted.transform(texts[::-1])[::-1], together)


@pytest.mark.parametrize(
    "text", [b"wha\xffle loop", b"\xa9 whale loop", b"whale loop \xe2\x82", b"WHALE, loop!"]
)
def test_bytes_that_are_not_utf8_are_left_out(fitted, text):
    np.testing.assert_array_equal(fitted.transform([text]), fitted.transform([b"whale loop"]))


@settings(max_examples=50, deadline=None)
@given(text=st.binary(max_size=60) | st.text(max_size=30).map(str.encode))
def test_every_byte_string_has_a_unit_row(fitted, text):
    row = fitted.transform([text])
    assert row.shape == (1, len(fitted.mean))
    assert row.dtype == np.float32
    assert np.linalg.norm(row) == pytest.approx(1, abs=1e-5)


def test_a_text_without_known_words_points_away_from_the_mean():
    np.testing.assert_allclose(by_hand(b"nothing known"), [-1, 0])
    np.testing.assert_allclose(by_hand(b"bb"), [-(0.5**0.5), 0.5**0.5], atol=1e-6)


def test_a_text_at_the_mean_has_a_zero_row():
    np.testing.assert_array_equal(by_hand(b"aa"), [0, 0])


def test_no_texts_and_no_features_give_empty_arrays(fitted):
    assert fitted.transform([]).shape == (0, len(fitted.mean))
    assert TextFeatures.none().transform([b"any", b"text"]).shape == (2, 0)


def test_components_are_no_more_than_the_sample_spans():
    texts = [b"whale ship", b"loop index buffer"] * 5
    assert fit(texts, n_components=128).components.shape == (5, 2)


@pytest.mark.parametrize(
    ("texts", "setting", "message"),
    [
        ([], {}, "none of the 0 sampled chunks holds a word"),
        ([b"", b"the of and", b"\xff\xfe", b"? !"] * 5, {}, "none of the 20 .* holds a word"),
        (chunks(4), {}, r"lower cluster\.min_df \(now 5\)"),
        (chunks(), {"min_df": 61}, r"lower cluster\.min_df \(now 61\)"),
        ([b"whale whale"] * 10, {}, "fewer than two words"),
        ([b"whale ship"] * 10, {}, "all alike"),
        ([f"whale ship rare{i}".encode() for i in range(10)], {}, r"lower cluster\.min_df"),
        (chunks(), {"min_df": 0}, r"cluster\.min_df is 0"),
        (chunks(), {"max_features": 1}, r"cluster\.max_features is 1"),
        (chunks(), {"n_components": -1}, r"cluster\.n_components is -1"),
    ],
)
def test_what_cannot_be_fitted_says_what_to_change(texts, setting, message):
    with pytest.raises(SomaError, match=message):
        fit(texts, **setting)


@pytest.mark.parametrize(
    "change",
    [
        {"idf": np.ones(3, np.float32)},
        {"components": np.eye(2)},  # float64
        {"mean": np.array([np.nan, 0], np.float32)},
        {"terms": ("aa",)},
    ],
)
def test_damaged_arrays_are_refused(change):
    good: dict[str, Any] = {
        "terms": ("aa", "bb"),
        "idf": np.ones(2, np.float32),
        "components": np.eye(2, dtype=np.float32),
        "mean": np.zeros(2, np.float32),
    }
    TextFeatures(**good)
    with pytest.raises(SomaError, match="damaged"):
        TextFeatures(**(good | change))
