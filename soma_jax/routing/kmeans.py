"""Balanced spherical k-means: unit centroids whose clusters have equal sizes (recipe, step 2).

Plain k-means on text finds a few huge clusters and many tiny ones, and an expert that sees almost
no data learns nothing. Here every iteration assigns the rows under a capacity, so that each
centroid is the mean direction of an equal share of the rows.
"""

import numpy as np

from soma_jax.errors import SomaError

_BLOCK = 4096  # rows compared with all centroids at once: a [rows, n_clusters] buffer, not [n, ...]
_SAME = 1e-6  # 1 - cosine below which two rows count as one: above float32 rounding


def balanced_spherical_kmeans(
    x: np.ndarray, n_clusters: int, seed: int, max_iter: int = 50, n_init: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Clusters unit rows by cosine similarity into clusters of equal size.

    Each start is seeded in the manner of k-means++, then alternates a balanced assignment with
    centroids at the mean direction of their rows until the assignment stops changing. Of `n_init`
    starts, the one with the highest mean similarity of a row to its centroid is kept.

    Args:
      x: [n, dim] float32, rows of length 1; a row of zeros (no direction) is never a seed.
      n_clusters: N, from 1 to the number of distinct rows.
      seed: of the starts. The same rows and seed give the same result.
      max_iter: most assignments in one start.
      n_init: number of starts.

    Returns:
      centroids [N, dim] float32 of length 1, and the balanced assignment [n] int32, in which
      cluster sizes differ by at most one.

    Raises:
      SomaError: there are fewer rows, or fewer distinct rows, than clusters, or x is not finite.
    """
    if not 1 <= n_clusters <= len(x):
        raise SomaError(
            f"{len(x)} chunks cannot make {n_clusters} clusters: "
            "choose between 1 expert and as many as there are chunks, or use a larger corpus"
        )
    if not np.isfinite(x).all():
        raise SomaError("the rows to be clustered hold NaN or infinity")
    rng = np.random.default_rng(seed)
    starts = [_one_start(x, n_clusters, rng, max_iter) for _ in range(n_init)]
    return max(starts, key=lambda start: np.vecdot(x, start[0][start[1]]).mean(dtype=np.float64))


def balanced_assignment(x: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Gives every row a centroid, the same number of rows to each, by greedy rounds.

    In a round every waiting row asks for the nearest centroid that still has room, and each
    centroid takes the rows nearest to it; the others wait for the next round. A round either
    places all rows or fills a centroid, so there are at most N rounds for each capacity.

    Args:
      x: [n, dim] float32, n >= N.
      centroids: [N, dim] float32.

    Returns:
      [n] int32; every centroid has n // N rows, and n % N of them have one more.
    """
    n, n_clusters = len(x), len(centroids)
    cluster = np.full(n, -1, np.int32)
    waiting = np.arange(n)
    for capacity in (n // n_clusters, 1):  # equal shares first, then the remainder, one each
        room = np.full(n_clusters, capacity)
        while waiting.size and room.any():
            is_open = np.flatnonzero(room)
            choice, similarity = _nearest(x, waiting, centroids[is_open])
            choice = is_open[choice]
            order = np.lexsort((-similarity, choice))  # by centroid, its nearest rows first
            asked = choice[order]
            rank = np.arange(len(asked)) - np.searchsorted(asked, asked)
            taken = order[rank < room[asked]]
            cluster[waiting[taken]] = choice[taken]
            room -= np.bincount(choice[taken], minlength=n_clusters)
            waiting = np.delete(waiting, taken)
    return cluster


def _one_start(
    x: np.ndarray, n_clusters: int, rng: np.random.Generator, max_iter: int
) -> tuple[np.ndarray, np.ndarray]:
    centroids = _seeds(x, n_clusters, rng)
    cluster = np.full(len(x), -1, np.int32)
    for _ in range(max_iter):
        previous, cluster = cluster, balanced_assignment(x, centroids)
        if np.array_equal(cluster, previous):
            break
        centroids = _mean_directions(x, cluster, centroids)
    return centroids, cluster


def _seeds(x: np.ndarray, n_clusters: int, rng: np.random.Generator) -> np.ndarray:
    """k-means++ on the sphere: the next seed is drawn by 1 - cosine to the nearest so far."""
    squared = np.vecdot(x, x)  # 1, or 0 for a row without a direction
    weight = squared.astype(np.float64)
    nearest = np.full(len(x), -np.inf, np.float32)
    seeds: list[np.ndarray] = []
    while len(seeds) < n_clusters:
        if not weight.any():
            raise SomaError(
                f"only {len(seeds)} of the {len(x)} chunks to be clustered differ from each other, "
                f"fewer than the {n_clusters} clusters asked for: use fewer experts or more varied "
                "text"
            )
        seeds.append(x[rng.choice(len(x), p=weight / weight.sum())])
        np.maximum(nearest, x @ seeds[-1], out=nearest)
        distance = squared - nearest
        weight = np.where(distance > _SAME, distance, 0).astype(np.float64)
    return np.stack(seeds)


def _mean_directions(x: np.ndarray, cluster: np.ndarray, previous: np.ndarray) -> np.ndarray:
    from scipy.sparse import csr_array

    rows = np.arange(len(x))
    members = csr_array((np.ones(len(x), np.float32), (cluster, rows)))  # [N, n], one 1 a column
    sums = members @ x
    length = np.linalg.norm(sums, axis=1, keepdims=True)
    # Rows that cancel out have no mean direction: their centroid stays where it is.
    has_direction = length > _SAME * len(x) / len(previous)
    return np.divide(sums, length, out=previous.copy(), where=has_direction)


def _nearest(
    x: np.ndarray, rows: np.ndarray, centroids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The index of the nearest centroid of x[rows], and the similarity to it."""
    index = np.empty(len(rows), np.intp)
    similarity = np.empty(len(rows), np.float32)
    for start in range(0, len(rows), _BLOCK):
        block = slice(start, start + _BLOCK)
        scores = x[rows[block]] @ centroids.T
        index[block] = scores.argmax(1)
        similarity[block] = scores.max(1)
    return index, similarity
