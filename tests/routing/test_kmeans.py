"""Balanced spherical k-means: equal sizes, unit centroids, and what cannot be clustered."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax.errors import SomaError
from soma_jax.routing import kmeans
from soma_jax.routing.kmeans import balanced_assignment, balanced_spherical_kmeans


def unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def random_rows(n: int, dim: int, seed: int = 0) -> np.ndarray:
    return unit(np.random.default_rng(seed).normal(size=(n, dim)))


def rounded_copies(distinct: int, copies: int) -> np.ndarray:
    """Rows that would be equal but for the rounding of their lengths."""
    scale = np.random.default_rng(2).uniform(0.1, 9, size=(copies, 1, 1))
    return unit((scale * random_rows(distinct, 64)).astype(np.float32)).reshape(-1, 64)


def blobs(sizes: list[int], noise: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Rows around the axes, and the axis of each row."""
    label = np.repeat(np.arange(len(sizes)), sizes)
    noise_rows = noise * np.random.default_rng(1).normal(size=(len(label), len(sizes)))
    return unit(np.eye(len(sizes))[label] + noise_rows), label


def mean_similarity(x: np.ndarray, centroids: np.ndarray, cluster: np.ndarray) -> float:
    return float((x * centroids[cluster]).sum(1).mean())


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(1, 60), dim=st.integers(5, 9), seed=st.integers(0, 99))
def test_sizes_differ_by_at_most_one_and_centroids_are_unit(data, n, dim, seed):
    n_clusters = data.draw(st.integers(1, n))
    centroids, cluster = balanced_spherical_kmeans(
        random_rows(n, dim, seed), n_clusters, seed, max_iter=5, n_init=2
    )
    sizes = np.bincount(cluster, minlength=n_clusters)
    assert sizes.shape == (n_clusters,)
    assert sizes.max() - sizes.min() <= 1
    assert (centroids.dtype, cluster.dtype) == (np.float32, np.int32)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_equal_blobs_are_found(seed):
    x, label = blobs([50, 50, 50, 50])
    centroids, cluster = balanced_spherical_kmeans(x, 4, seed)
    axis = centroids.argmax(1)
    assert sorted(axis) == [0, 1, 2, 3]
    np.testing.assert_array_equal(axis[cluster], label)


def test_a_large_blob_is_shared_out():
    x, _ = blobs([160, 20, 20])
    centroids, cluster = balanced_spherical_kmeans(x, 4, 0)
    assert np.bincount(cluster).tolist() == [50, 50, 50, 50]
    assert np.bincount((x @ centroids.T).argmax(1)).max() < 160


def test_the_result_is_a_fixed_point():
    x, _ = blobs([30, 50, 40], noise=0.4)
    centroids, cluster = balanced_spherical_kmeans(x, 3, 0, max_iter=200)
    np.testing.assert_array_equal(balanced_assignment(x, centroids), cluster)
    means = np.stack([x[cluster == k].mean(0) for k in range(3)])
    np.testing.assert_allclose(centroids, unit(means), atol=1e-6)


def test_same_seed_same_result_and_more_starts_are_no_worse():
    x = random_rows(300, 8)
    one, again, four = (
        balanced_spherical_kmeans(x, 6, seed=3, n_init=n_init) for n_init in (1, 1, 4)
    )
    np.testing.assert_array_equal(one[0], again[0])
    np.testing.assert_array_equal(one[1], again[1])
    assert mean_similarity(x, *four) >= mean_similarity(x, *one)
    best = max(
        mean_similarity(x, *balanced_spherical_kmeans(x, 6, seed, n_init=1)) for seed in range(4)
    )
    assert mean_similarity(x, *four) > 0.97 * best


def test_clustering_beats_an_arbitrary_equal_split():
    x = random_rows(400, 8)
    found = mean_similarity(x, *balanced_spherical_kmeans(x, 8, 0))
    split = np.arange(400) % 8
    arbitrary = unit(np.stack([x[split == k].mean(0) for k in range(8)]))
    assert found > 1.5 * mean_similarity(x, arbitrary, split)


def test_a_full_centroid_keeps_its_nearest_rows():
    degrees = np.deg2rad([0, 5, 10, 15, 20, 90])
    x = np.stack([np.cos(degrees), np.sin(degrees)], 1).astype(np.float32)
    centroids = np.eye(2, dtype=np.float32)  # at 0 and 90 degrees
    assert balanced_assignment(x, centroids).tolist() == [0, 0, 0, 1, 1, 1]
    assert balanced_assignment(x[:5], centroids).tolist() == [0, 0, 0, 1, 1]


def test_the_block_size_changes_nothing(monkeypatch):
    x, _ = blobs([30, 50, 40], noise=0.3)
    whole = balanced_spherical_kmeans(x, 3, 0)
    monkeypatch.setattr(kmeans, "_BLOCK", 7)
    in_blocks = balanced_spherical_kmeans(x, 3, 0)
    np.testing.assert_array_equal(whole[1], in_blocks[1])


def test_rows_that_cancel_out_give_no_nan():
    x = np.array([[1, 0], [-1, 0]], np.float32)
    centroids, cluster = balanced_spherical_kmeans(x, 1, 0)
    assert abs(centroids[0, 0]) == 1
    assert cluster.tolist() == [0, 0]


def test_a_row_without_direction_is_clustered_but_is_no_seed():
    x = np.concatenate([np.zeros((3, 2), np.float32), np.eye(2, dtype=np.float32)])
    for seed in range(10):
        centroids, cluster = balanced_spherical_kmeans(x, 2, seed, n_init=1)
        np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-6)
        assert sorted(np.bincount(cluster)) == [2, 3]


@pytest.mark.parametrize(
    ("x", "n_clusters", "message"),
    [
        (random_rows(3, 4), 4, "3 chunks cannot make 4 clusters"),
        (random_rows(0, 4), 1, "0 chunks cannot make 1 clusters"),
        (random_rows(3, 4), 0, "cannot make 0 clusters"),
        (np.repeat(random_rows(1, 4), 9, 0), 2, "only 1 of the 9 chunks .* fewer than the 2"),
        (rounded_copies(3, 50), 4, "only 3 of the 150 chunks"),
        (np.zeros((5, 4), np.float32), 1, "only 0 of the 5 chunks"),
        (np.full((5, 4), np.nan, np.float32), 2, "NaN"),
    ],
)
def test_what_cannot_be_clustered_says_why(x, n_clusters, message):
    with pytest.raises(SomaError, match=message):
        balanced_spherical_kmeans(x, n_clusters, 0)


def test_as_many_clusters_as_distinct_rows_are_allowed():
    x = rounded_copies(3, 50)
    centroids, cluster = balanced_spherical_kmeans(x, 3, 0)
    np.testing.assert_allclose(centroids[cluster], x, atol=1e-6)
