"""The router: fitted once, then frozen; says which experts a text belongs to (recipe, 2 and 7)."""

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from soma_jax.errors import SomaError
from soma_jax.files import write_bytes, write_json
from soma_jax.routing.features import TextFeatures, check_finite
from soma_jax.routing.kmeans import balanced_spherical_kmeans

_FORMAT = "soma_jax router 1"
_BLOCK = 1024  # texts held as features at once, so that memory does not grow with the corpus


@dataclasses.dataclass(frozen=True, eq=False)
class Router:
    """Text features and one unit centroid per expert.

    A text's scores are computed from that text alone, so its experts never depend on the batch it
    comes in.
    """

    text_features: TextFeatures
    centroids: np.ndarray  # [N, dim] float32

    def __post_init__(self) -> None:
        n_experts = max(1, len(self.centroids))
        check_finite("centroids", self.centroids, (n_experts, len(self.text_features.mean)))

    @classmethod
    def fit(
        cls,
        texts: Sequence[bytes],
        n_experts: int,
        *,
        seed: int,
        max_features: int = 50_000,
        min_df: int = 5,
        n_components: int = 128,
    ) -> "Router":
        """Fits features and balanced centroids on a sample of chunks.

        A single expert needs no text: its router sends everything to expert 0 and is fitted, and
        applied, without reading any.

        Args:
          texts: the sampled chunks (the paper: 400,000 of 1,024 bytes).
          n_experts: N.
          seed: of the clustering.
          max_features, min_df, n_components: see `TextFeatures.fit`.

        Raises:
          SomaError: the sample is too small, too uniform or without words for N clusters.
        """
        if n_experts == 1:
            return cls(TextFeatures.none(), np.zeros((1, 0), np.float32))
        text_features = TextFeatures.fit(
            texts, max_features=max_features, min_df=min_df, n_components=n_components
        )
        # The more clusters, the less the outcome depends on the start, and the longer one takes.
        centroids, _ = balanced_spherical_kmeans(
            text_features.transform(texts), n_experts, seed, n_init=4 if n_experts <= 32 else 1
        )
        return cls(text_features, centroids)

    def restricted(self, experts: Sequence[int]) -> "Router":
        """The router among some of the experts, which it numbers by their place among these."""
        return dataclasses.replace(self, centroids=self.centroids[list(experts)])

    @property
    def n_experts(self) -> int:
        """N."""
        return len(self.centroids)

    def features(self, texts: Sequence[bytes]) -> np.ndarray:
        """Text features, [n, dim] float32: see `TextFeatures.transform`."""
        return self.text_features.transform(texts)

    def similarities(self, texts: Sequence[bytes]) -> np.ndarray:
        """Cosine of each text with each centroid, [n, N] float32."""
        # One dot product per pair: a matrix product would round differently with the batch size.
        return np.vecdot(self.features(texts)[:, None], self.centroids)

    def assign(self, texts: Sequence[bytes]) -> np.ndarray:
        """The expert of each chunk, [n] int32: the nearest centroid of the whole chunk."""
        return self._nearest(texts, 1)[:, 0]

    def route(self, texts: Sequence[bytes], k: int, prefix_bytes: int = 256) -> np.ndarray:
        """The experts for each text, nearest first, [n, min(k, N)] int32; ties go by index.

        Only the first `prefix_bytes` bytes of a text are looked at. Any text is accepted, also an
        empty one (see `TextFeatures.transform` for what it means).

        Raises:
          SomaError: k or prefix_bytes is below 1.
        """
        if k < 1 or prefix_bytes < 1:
            raise SomaError(
                f"k={k} and prefix_bytes={prefix_bytes}: routing needs 1 or more of both"
            )
        return self._nearest([text[:prefix_bytes] for text in texts], min(k, self.n_experts))

    def _nearest(self, texts: Sequence[bytes], k: int) -> np.ndarray:
        nearest = np.empty((len(texts), k), np.int32)
        for start in range(0, len(texts), _BLOCK):
            block = slice(start, start + _BLOCK)
            similarity = self.similarities(texts[block])
            nearest[block] = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
        return nearest

    def top_terms(self, n: int = 10) -> list[list[str]]:
        """For each expert, the up to n words its cluster has most above the sample's mean."""
        terms = self.text_features.terms
        excess = self.centroids @ self.text_features.components.T  # [N, V], in units of TF-IDF
        return [
            [terms[v] for v in np.argsort(-above, kind="stable")[:n] if above[v] > 0]
            for above in excess
        ]

    def compact(self) -> "Router":
        """A router that sends texts to the same experts with N numbers for a word, not dim.

        A text's direction is only compared with the centroids. Its length before it is normalised
        does not change which is nearest, so the products of words and centroids are all it takes.
        They are rounded to half precision, which halves the file: experts whose products with a
        text of length 1 differ by less than 2^-10 may change places. Its features are no longer
        those that the clusters were fitted on.
        """
        if self.n_experts >= len(self.text_features.mean):
            return self
        products = self.text_features.components @ self.centroids.T
        features = dataclasses.replace(
            self.text_features,
            components=np.ascontiguousarray(products.astype(np.float16).astype(np.float32)),
            mean=self.centroids @ self.text_features.mean,
        )
        return Router(features, np.eye(self.n_experts, dtype=np.float32))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides where a text goes, as hexadecimal digits."""
        digest = hashlib.sha256()
        for name, array in self._arrays().items():
            digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    def _arrays(self) -> dict[str, np.ndarray]:
        text = self.text_features
        return {
            "terms": np.frombuffer("\n".join(text.terms).encode(), np.uint8),
            "idf": text.idf,
            "components": text.components,
            "mean": text.mean,
            "centroids": self.centroids,
        }

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes router.npz and router.json; until router.json is there, there is no router."""
        directory = Path(directory)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **self._arrays())
        about = {
            "format": _FORMAT,
            "n_experts": self.n_experts,
            "n_terms": len(self.text_features.terms),
            "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
        }
        (directory / "router.json").unlink(missing_ok=True)  # never beside arrays it does not match
        write_bytes(directory / "router.npz", buffer.getvalue())
        write_json(directory / "router.json", about)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> "Router":
        """Reads what `save` wrote.

        Raises:
          SomaError: there is no complete router, or it is damaged.
        """
        directory = Path(directory)
        try:
            about = json.loads((directory / "router.json").read_bytes())
            content = (directory / "router.npz").read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise SomaError(
                f"{directory} holds no router ({error.filename} is missing): fit one first"
            ) from error
        except ValueError:  # neither UTF-8 nor JSON
            about, content = None, b""
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise SomaError(
                f"{directory / 'router.json'} does not describe a '{_FORMAT}': delete {directory} "
                "and fit the router again, or restore it from a copy"
            )
        if hashlib.sha256(content).hexdigest() != about.get("sha256"):
            raise SomaError(
                f"{directory / 'router.npz'} is damaged (its SHA-256 is not the one in "
                "router.json): restore it from a copy, or delete it and fit the router again"
            )
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            words = arrays["terms"].tobytes().decode()
            text_features = TextFeatures(
                terms=tuple(words.split("\n")) if words else (),
                idf=arrays["idf"],
                components=arrays["components"],
                mean=arrays["mean"],
            )
            return cls(text_features, arrays["centroids"])
