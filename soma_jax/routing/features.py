"""Text features of byte chunks: TF-IDF, truncated SVD, centred, length 1 (recipe, step 2).

`TextFeatures.transform` is the one text processing of the project: the clusters are fitted on it,
and chunks and prompts are routed with it.
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from soma_jax.errors import SomaError

_NO_DIRECTION = 1e-6  # distance from the mean below which only float32 rounding is left


@dataclasses.dataclass(frozen=True, eq=False)
class TextFeatures:
    """A fitted map from byte strings to unit vectors: all that is needed to apply it again.

    V is the number of words and dim the number of SVD components. V = 0 is the map to no features
    at all (dim 0), which is what a single expert needs.
    """

    terms: tuple[str, ...]  # V words, in column order
    idf: np.ndarray  # [V] float32, inverse document frequencies
    components: np.ndarray  # [V, dim] float32, right singular vectors as columns
    mean: np.ndarray  # [dim] float32, of the fitted sample after the SVD

    def __post_init__(self) -> None:
        size, dim = len(self.terms), len(self.mean)
        check_finite("idf", self.idf, (size,))
        check_finite("components", self.components, (size, dim))
        check_finite("mean", self.mean, (dim,))

    @classmethod
    def none(cls) -> "TextFeatures":
        """The map to no features."""
        empty = np.zeros(0, np.float32)
        return cls(terms=(), idf=empty, components=np.zeros((0, 0), np.float32), mean=empty)

    @classmethod
    def fit(
        cls, texts: Sequence[bytes], *, max_features: int, min_df: int, n_components: int
    ) -> "TextFeatures":
        """Fits the map on a sample of chunks. Draws nothing: the same texts give the same map.

        Args:
          texts: the chunks.
          max_features: most words kept, the most frequent ones; 2 or more.
          min_df: a word must occur in at least this many of the texts.
          n_components: SVD components, fewer where the vocabulary or the sample has fewer.

        Raises:
          SomaError: too few words are frequent enough, or all texts have the same words.
        """
        from sklearn.decomposition import TruncatedSVD

        for name, value, least in (
            ("max_features", max_features, 2),
            ("min_df", min_df, 1),
            ("n_components", n_components, 1),
        ):
            if value < least:
                raise SomaError(f"cluster.{name} is {value}: it must be {least} or more")
        vectorizer = _tfidf_vectorizer(max_features=max_features, min_df=min_df)
        try:
            tfidf = vectorizer.fit_transform(texts)
        except ValueError as error:
            raise _no_words(texts, min_df, vectorizer) from error
        if tfidf.shape[1] < 2:
            raise _no_words(texts, min_df, vectorizer)
        svd = TruncatedSVD(min(n_components, *tfidf.shape), random_state=0)
        with np.errstate(divide="ignore", invalid="ignore"):  # shares of a variance of zero
            svd.fit(tfidf)
        # Directions that the sample does not span are rounding noise, and not features.
        spanned = svd.singular_values_ > _NO_DIRECTION * svd.singular_values_[0]
        components = np.ascontiguousarray(svd.components_[spanned].T, np.float32)
        projected = tfidf @ components
        mean = projected.mean(0, dtype=np.float64).astype(np.float32)
        if np.linalg.norm(projected - mean, axis=1).max() < _NO_DIRECTION:
            raise SomaError(
                f"the {len(texts)} sampled chunks are all alike to the router (the same "
                f"{tfidf.shape[1]} words in each): use more varied text, or lower cluster.min_df "
                f"(now {min_df}) so that rarer words count"
            )
        terms = tuple(str(term) for term in vectorizer.get_feature_names_out())
        return cls(terms, vectorizer.idf_.astype(np.float32), components, mean)

    def transform(self, texts: Sequence[bytes]) -> np.ndarray:
        """Maps texts to rows of length 1, [n, dim] float32; a row depends on its own text only.

        Bytes that are not UTF-8 are left out. A text without a known word has a zero TF-IDF row and
        so points from the sample's mean to the origin. A text exactly at the mean has no direction:
        its row is zero.
        """
        rows = np.zeros((len(texts), len(self.mean)), np.float32)
        if not rows.size:
            return rows
        # A sparse product adds up each row by itself, so other texts cannot change its rounding.
        centred = self._vectorizer.transform(texts) @ self.components - self.mean
        length = np.linalg.norm(centred, axis=1, keepdims=True)
        return np.divide(centred, length, out=rows, where=length > _NO_DIRECTION)

    @cached_property
    def _vectorizer(self) -> Any:
        vectorizer = _tfidf_vectorizer(vocabulary=self.terms)
        vectorizer.idf_ = self.idf
        return vectorizer


def check_finite(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raises SomaError unless the array is float32, finite and of the given shape."""
    if array.shape != shape or array.dtype != np.float32 or not np.isfinite(array).all():
        raise SomaError(
            f"the router's {name} is damaged: expected finite float32 {list(shape)}, "
            f"found {array.dtype} {list(array.shape)}; fit the router again"
        )


def _tfidf_vectorizer(**kwargs: Any) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(
        decode_error="ignore", sublinear_tf=True, stop_words="english", dtype=np.float32, **kwargs
    )


def _no_words(texts: Sequence[bytes], min_df: int, vectorizer: Any) -> SomaError:
    """Why a vocabulary has fewer than two words, and what to change."""
    analyze = vectorizer.build_analyzer()
    if not any(analyze(text) for text in texts):
        return SomaError(
            f"none of the {len(texts)} sampled chunks holds a word (two letters or digits in a row "
            "that are no English stop word): the router needs text, so use n_experts=1"
        )
    return SomaError(
        f"fewer than two words occur in at least {min_df} of the {len(texts)} sampled chunks: "
        f"lower cluster.min_df (now {min_df}) or sample more chunks"
    )
