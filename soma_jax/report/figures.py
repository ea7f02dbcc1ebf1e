"""The figures of a report, drawn from a run's numbers alone.

Experts are drawn one by one up to 8 of them; beyond, as their median and 10-90% band.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from soma_jax.files import write_bytes
from soma_jax.report.page import TEXTS, active

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Lines = Sequence[dict[str, Any]]  # of a metrics.jsonl or curve.jsonl
Points = np.ndarray  # [n, 2]: byte-forwards, nats/byte

# Paul Tol's muted scheme: told apart in every common form of colour blindness.
COLORS = (
    *("#CC6677", "#332288", "#117733", "#88CCEE"),
    *("#882255", "#44AA99", "#999933", "#AA4499"),
)
_GREY = "#666666"
_BARS = 16  # clusters drawn one by one
_DPI = 150
_THICK: dict[str, Any] = {"lw": 1.8}
_THIN: dict[str, Any] = {"lw": 0.8, "alpha": 0.6}


def draw(
    directory: Path, summary: dict[str, Any], seed: Lines, experts: Sequence[Lines], curve: Lines
) -> list[str]:
    """Writes the figures there is something for, as PNG, and returns their file names.

    Args:
      directory: of the report.
      summary: of the run.
      seed: metric lines of the seed.
      experts: metric lines of each expert.
      curve: the ensemble's validation losses.
    """
    figures = {}
    if len(summary["experts"]) > 1:
        figures["clusters.png"] = clusters(summary["experts"])
    if seed or any(experts):
        figures["loss.png"] = loss(summary, seed, experts, curve)
    if len(summary["test"]["by_k"]) > 1:
        figures["loss_by_k.png"] = loss_by_k(summary)
    for name, figure in figures.items():
        save(figure, directory / name)
    return list(figures)


def loss(summary: dict[str, Any], seed: Lines, experts: Sequence[Lines], curve: Lines) -> Figure:
    """Loss against the byte-forwards of one expert, whose curve starts where the seed's ended.

    The whole run above; below it the experts' part, where there is one.
    """
    rows = 2 if any(experts) else 1
    figure, (whole, *zoomed) = panels(8, 1 + 3.8 * rows, rows=rows)
    branch = summary["byte_forwards_by_stage"]["seed"]
    ensemble = _ensemble_points(summary, curve)
    for axes in (whole, *zoomed):
        _plot(axes, _smooth(_points(seed, "loss")), color="black", **_THIN)
        _plot(axes, _points(seed, "validation"), color="black", label="seed", **_THICK)
        if any(experts):
            own_shards = _plot_experts(axes, experts, branch)
        style = {"ls": "--", "lw": 1, "marker": "D", "ms": 4}
        _plot(axes, ensemble, color="black", label="ensemble (validation corpus)", **style)
        for name, dashes in (("bigram", "-."), ("trigram", ":")):
            label = f"{name} (test text)"
            axes.axhline(summary["test"][name], color=_GREY, ls=dashes, lw=1.4, label=label)
        axes.set_xlabel("byte-forwards of one expert, its seed's included")
        axes.set_ylabel("nats/byte")
        axes.xaxis.set_major_formatter(engineering())
    whole.set_title("Loss over the whole run (thick: validation, thin: training)")
    for axes in zoomed:
        axes.set_title("The experts' part of it")
        shown = np.concatenate([own_shards, ensemble[ensemble[:, 0] >= branch]])
        axes.set_xlim(*_padded(shown[:, 0]))
        axes.set_ylim(*_padded(shown[:, 1]))
    legend(figure, [whole])
    return figure


def _points(lines: Lines, key: str, start: float = 0) -> Points:
    return np.array(
        [(start + line["byte_forwards"], line[key]) for line in lines if key in line], float
    ).reshape(-1, 2)


def _smooth(points: Points) -> Points:
    """The running mean over a twentieth of the points."""
    if not len(points):
        return points
    width = max(1, len(points) // 20)
    return np.lib.stride_tricks.sliding_window_view(points, width, axis=0).mean(-1)


def _ensemble_points(summary: dict[str, Any], curve: Lines) -> Points:
    """The lines of curve.jsonl, at the byte-forwards of one expert."""
    spent, settings = summary["byte_forwards_by_stage"], summary["config"]

    def compute(line: dict[str, Any]) -> float:
        if line["stage"] == "seed":
            return spent["seed"] * line["update"] / settings["seed"]["updates"]
        own = spent["experts"] / settings["experts"]
        return spent["seed"] + own * line["update"] / settings["expert"]["updates"]

    return np.array([(compute(line), line["nats_per_byte"]) for line in curve]).reshape(-1, 2)


def _plot(axes: Axes, points: Points, **style: Any) -> None:
    if len(points):
        dot = {"marker": "o"} if len(points) == 1 else {}  # a line of one point is not seen
        axes.plot(*points.T, **(dot | style))


def _plot_experts(axes: Axes, experts: Sequence[Lines], branch: float) -> Points:
    """Draws the experts' losses and returns the points of validation it drew."""
    training, validation = (
        [_points(lines, key, branch) for lines in experts] for key in ("loss", "validation")
    )
    if len(experts) <= len(COLORS):
        for i, color in zip(range(len(experts)), COLORS, strict=False):
            _plot(axes, _smooth(training[i]), color=color, **_THIN)
            _plot(axes, validation[i], color=color, label=f"expert {i}", **_THICK)
        return np.concatenate(validation)
    _, median, _ = _quantiles(training)
    _plot(axes, _smooth(median), color=COLORS[1], **_THIN)
    low, median, high = _quantiles(validation)
    _plot(axes, median, color=COLORS[1], label=f"{len(experts)} experts, median", **_THICK)
    band: dict[str, Any] = {"color": COLORS[1], "alpha": 0.2, "lw": 0, "label": "10-90% of them"}
    axes.fill_between(low[:, 0], low[:, 1], high[:, 1], **band)
    return np.concatenate([low, high])


def _quantiles(curves: Sequence[Points]) -> Points:
    """10%, 50% and 90% over the experts, [3, n, 2], at the points that all of them have."""
    shortest = min(map(len, curves))  # they train in step, so their lines are at the same updates
    return np.quantile([curve[:shortest] for curve in curves], (0.1, 0.5, 0.9), axis=0)


def _padded(values: np.ndarray) -> tuple[float, float]:
    margin = 0.06 * (np.ptp(values) or abs(values[0]))
    return values.min() - margin, values.max() + margin


def clusters(experts: Sequence[dict[str, Any]]) -> Figure:
    """What each cluster holds: its size and its words; of many clusters, how the sizes spread."""
    sizes = np.array([expert["bytes"] for expert in experts])
    if len(experts) > _BARS:
        figure, (axes,) = panels(8, 4)
        axes.hist(sizes, bins=min(40, len(experts) // 4), color=COLORS[3], edgecolor="white")
        axes.set_ylabel("number of shards")
    else:
        figure, (axes,) = panels(8, 1.5 + 0.55 * len(experts))
        rows = np.arange(len(experts))
        axes.barh(rows, sizes, height=0.4, color=COLORS[3])
        for row, expert in zip(rows, experts, strict=True):
            words = shorten(", ".join(expert["top_terms"]), 90, placeholder=" ...")
            axes.annotate(
                _drawable(words) or "(no words stand out)",
                (0, row - 0.2),
                xytext=(3, 1),
                textcoords="offset points",
                va="bottom",
                fontsize=9,
                parse_math=False,
                bbox={"color": "white", "pad": 0.5},  # over the line of equal shares
            )
        axes.set_yticks(rows, [f"expert {i}" for i in rows])
        axes.set_ylim(len(experts) - 0.6, -0.7)
        axes.grid(visible=False, axis="y")
    axes.axvline(sizes.mean(), color="black", ls="--", lw=1.2, label="equal shares")
    axes.set_xlim(0, 1.1 * sizes.max())
    axes.set_xlabel("size of the shard (bytes)")
    axes.xaxis.set_major_formatter(engineering())
    axes.set_title("What the text was split into")
    legend(figure, [axes])
    return figure


def _drawable(text: str) -> str:
    """The text with ? for characters the figure's font does not have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    glyphs = get_font(findfont(FontProperties())).get_charmap()
    return "".join(c if ord(c) in glyphs else "?" for c in text)


def loss_by_k(summary: dict[str, Any]) -> Figure:
    """Loss by the number of experts whose probabilities are averaged, a panel for each text."""
    texts = [name for name in TEXTS if name in summary]
    figure, both = panels(4.2 * len(texts) if len(texts) > 1 else 5.5, 3.8, columns=len(texts))
    for axes, name in zip(both, texts, strict=True):
        text = summary[name]
        k = np.arange(1, len(text["by_k"]) + 1)
        axes.plot(k, text["by_k"], "o-", color=COLORS[1], label="routed ensemble")
        used = active(summary)
        ring: dict[str, Any] = {"ms": 11, "mfc": "none", "mec": "black", "ls": ""}
        axes.plot(used, text["by_k"][used - 1], "o", **ring, label=f"this run, k = {used}")
        axes.axhline(text["seed"], color="black", ls="--", lw=1.4, label="seed alone")
        axes.margins(0.12, 0.2)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("active experts k")
        axes.set_ylabel("nats/byte")
        axes.set_title(TEXTS[name])
    legend(figure, [axes])
    return figure


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """A figure of the given inches and its panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#dddddd", lw=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def legend(figure: Figure, some: Sequence[Axes]) -> None:
    """A legend under the panels, with each label of theirs once."""
    entries = {
        label: handle
        for axes in some
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    style: dict[str, Any] = {"loc": "outside lower center", "ncols": 3, "frameon": False}
    figure.legend(entries.values(), entries.keys(), **style)


def cycle() -> Iterator[str]:
    """The colours, over and over."""
    return itertools.cycle(COLORS)


def engineering() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter()


def save(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    write_bytes(path, content.getvalue())
