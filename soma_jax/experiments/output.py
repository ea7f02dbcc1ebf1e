"""What an experiment leaves in its workdir: result.json, table.csv, NAME.md and NAME.png."""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import soma_jax
from soma_jax.errors import SomaError
from soma_jax.files import write_json, write_text
from soma_jax.progress import console
from soma_jax.report import figures
from soma_jax.stats import Interval


def check_seeds(seeds: Any) -> None:
    """Refuses random seeds that are none, out of range or named twice.

    Raises:
      SomaError: naming config.random_seeds.
    """
    if not seeds or not all(isinstance(s, int) and 0 <= s < 2**32 for s in seeds):
        raise SomaError(f"config.random_seeds must be numbers below 2**32, not {seeds!r}")
    if len(set(seeds)) < len(seeds):
        raise SomaError(f"config.random_seeds names one twice: {seeds!r}")


def circumstances(command: str, random_seeds: Sequence[int]) -> dict[str, Any]:
    """How a result came about: the fields that every result.json begins with."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "random_seeds": list(random_seeds),
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "soma_jax": soma_jax.__version__,
    }


def claim(words: str, difference: Interval) -> str:
    """A line of a page: a claim, and what an interval of the difference that it says is positive
    makes of it."""
    mean, low, high = difference
    if low == high:
        verdict = "one run, and so no interval"
    elif low > 0:
        verdict = "reproduced"
    elif high < 0:
        verdict = "**not reproduced**: it is the other way round"
    else:
        verdict = "**undecided**"
    return f"- {words}: {verdict} ({mean:+.4f}, 95% {low:+.4f} to {high:+.4f})."


def write(
    directory: Path,
    name: str,
    result: dict[str, Any],
    markdown: str,
    table: tuple[Sequence[str], Sequence[Sequence[Any]]],
    figure: Any,
) -> None:
    """Writes an experiment's files.

    Args:
      directory: its workdir.
      name: of the experiment.
      result: for result.json, from which the others can be made again.
      markdown: the page: the command, tables, what came out.
      table: column names and rows of table.csv.
      figure: a matplotlib figure.

    Raises:
      SomaError: the disk is full.
    """
    write_json(directory / "result.json", result)
    lines = io.StringIO()
    csv.writer(lines, lineterminator="\n").writerows([table[0], *table[1]])
    write_text(directory / "table.csv", lines.getvalue())
    figures.save(figure, directory / f"{name}.png")
    write_text(directory / f"{name}.md", markdown)  # last: where it is, the others are
    console.print(f"[bold]{directory / f'{name}.md'}[/bold]")
