import numpy as np
import pytest

from soma_jax import stats
from soma_jax.errors import SomaError
from soma_jax.stats import paired_bootstrap


def losses(documents: int, systems: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, 769, documents)
    return counts[:, None] * rng.normal(2, 0.3, (documents, systems)), counts


@pytest.mark.parametrize("block", [1, 100, 1 << 22])
def test_interval_equals_resampling_document_by_document(monkeypatch, block):
    monkeypatch.setattr(stats, "BLOCK", block)
    sums, counts = losses(30, 2)
    drawn = np.random.default_rng(5).integers(30, size=(200, 30))
    ratios = np.array([sums[rows].sum(0) / counts[rows].sum() for rows in drawn])
    interval = paired_bootstrap(sums, counts, draws=200, seed=5)
    np.testing.assert_allclose(interval.mean, sums.sum(0) / counts.sum(), rtol=1e-12)
    np.testing.assert_allclose(interval.low, np.percentile(ratios, 2.5, axis=0), rtol=1e-12)
    np.testing.assert_allclose(interval.high, np.percentile(ratios, 97.5, axis=0), rtol=1e-12)


def test_interval_of_a_mean_is_the_normal_one():
    values = np.random.default_rng(0).normal(2, 0.5, 2000)
    mean, low, high = paired_bootstrap(values * 768, np.full(2000, 768), draws=4000)
    half_width = 1.96 * values.std() / np.sqrt(2000)
    assert mean == pytest.approx(values.mean())
    assert [mean - low, high - mean] == pytest.approx([half_width] * 2, rel=0.1)


def test_systems_share_their_draws():
    """A constant advantage is certain, however much the documents differ."""
    sums, counts = losses(40, 1)
    pair = np.concatenate([sums, sums - 0.1 * counts[:, None]], axis=1)
    both = paired_bootstrap(pair, counts, draws=500)
    np.testing.assert_allclose([b[0] - b[1] for b in both], 0.1, rtol=1e-9)
    assert both.high[0] - both.low[0] > 0.05
    difference = paired_bootstrap(pair[:, 0] - pair[:, 1], counts, draws=500)
    np.testing.assert_allclose(difference, 0.1, rtol=1e-9)


def test_interval_has_the_trailing_shape_and_is_a_function_of_the_seed():
    sums, counts = losses(12, 6)
    first = paired_bootstrap(sums.reshape(12, 2, 3), counts, draws=50, seed=3)
    assert [part.shape for part in first] == [(2, 3)] * 3
    again, other = (paired_bootstrap(sums, counts, draws=50, seed=seed) for seed in (3, 4))
    np.testing.assert_array_equal(first.low.ravel(), again.low)
    assert (again.low != other.low).any()


@pytest.mark.parametrize(
    ("sums", "counts", "draws", "message"),
    [
        ([1.0, 2.0], [1], 10, "one row for each document"),
        ([], [], 10, "one row for each document"),
        ([1.0, 2.0], [[1, 2]], 10, "one row for each document"),
        ([1.0, 0.0], [3, 0], 10, "document 1 has 0 scored bytes"),
        ([1.0, np.nan], [3, 3], 10, "document 1 has a sum that is not finite"),
        ([1.0, 2.0], [3, 3], 0, "draws is 0"),
    ],
)
def test_bad_input_is_refused(sums, counts, draws, message):
    with pytest.raises(SomaError, match=message):
        paired_bootstrap(sums, counts, draws=draws)


def test_t_interval_is_students():
    """2.484138 is 4.302653, the table's t of two degrees of freedom, over sqrt(3)."""
    interval = stats.t_interval([1.0, 2.0, 3.0])
    np.testing.assert_allclose(interval, [2, 2 - 2.484138, 2 + 2.484138], rtol=1e-6)
    assert stats.t_interval([7.0]) == (7, 7, 7)
