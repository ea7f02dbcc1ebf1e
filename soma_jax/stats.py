"""Intervals over documents for nats/byte and its differences (paper, section 4)."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

from soma_jax.errors import SomaError

BLOCK = 1 << 22  # documents drawn at once: bounds the memory to about 100 MiB


class Interval(NamedTuple):
    """A mean and its 95% interval; each has the trailing shape of the sums (a scalar if none)."""

    mean: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


def paired_bootstrap(
    sums: npt.ArrayLike, counts: npt.ArrayLike, draws: int = 10_000, seed: int = 0
) -> Interval:
    """The ratio of total `sums` to total `counts`, with a 95% interval over documents.

    Documents are drawn with replacement, and one draw serves every system: the bootstrap is paired.
    The difference of two systems scored on the same bytes has the interval
    `paired_bootstrap(sums[:, 0] - sums[:, 1], counts)`.

    Args:
        sums: [documents, ...], nats of each document under each system.
        counts: [documents], scored bytes of each document.
        draws: bootstrap draws (the paper's are 10,000).
        seed: of the draws.

    Raises:
        SomaError: shapes that do not match, a document that scores nothing, sums that are not
            finite, or no draws.
    """
    sums, counts = np.asarray(sums, np.float64), np.asarray(counts, np.float64)
    if counts.ndim != 1 or not len(counts) or sums.shape[:1] != counts.shape:
        raise SomaError(
            f"sums {sums.shape} and counts {counts.shape} must both have one row for each document"
        )
    if (empty := np.flatnonzero(~(counts > 0))).size:
        raise SomaError(
            f"document {empty[0]} has {counts[empty[0]]:g} scored bytes: "
            "leave out documents that score nothing"
        )
    if (broken := np.argwhere(~np.isfinite(sums))).size:
        raise SomaError(f"document {broken[0, 0]} has a sum that is not finite: look at its losses")
    if draws < 1:
        raise SomaError(f"draws is {draws}: ask for at least one")

    documents, trailing = len(counts), sums.shape[1:]
    columns = np.column_stack([sums.reshape(documents, -1), counts])
    rng = np.random.default_rng(seed)
    totals = np.empty((draws, columns.shape[1]))
    rows = max(1, BLOCK // documents)
    for start in range(0, draws, rows):
        block = totals[start : start + rows]
        drawn = rng.integers(documents, size=(len(block), documents))
        # How often each document is drawn turns the sums over documents into one product.
        drawn += documents * np.arange(len(block))[:, None]
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        block[:] = times @ columns
    low, high = np.quantile(totals[:, :-1] / totals[:, -1:], [0.025, 0.975], axis=0)
    mean = sums.sum(0) / counts.sum()
    return Interval(mean, low.reshape(trailing)[()], high.reshape(trailing)[()])


def t_interval(values: npt.ArrayLike) -> Interval:
    """The mean of independent runs [n] with Student's 95% interval; of one run, the run alone."""
    values = np.asarray(values, np.float64)
    mean = np.asarray(values.mean())
    if len(values) < 2:
        return Interval(mean, mean, mean)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return Interval(mean, mean - half, mean + half)
