"""The report of a run: a page, its figures and a table for the terminal.

Everything is made from what the workdir holds, so a report can be made again at any time.
"""

from __future__ import annotations

from pathlib import Path

from soma_jax.errors import SomaError
from soma_jax.files import read_json, read_json_lines, write_text
from soma_jax.progress import console
from soma_jax.report import figures, page
from soma_jax.report.page import terminal_table
from soma_jax.workdir import Workdir

__all__ = ["show", "terminal_table", "write"]


def write(workdir: Workdir) -> str:
    """Writes report/report.md and its figures and returns the page.

    Raises:
      SomaError: the run is not finished, a file of it is damaged, or the disk is full.
    """
    if not workdir.summary.exists():
        raise SomaError(f"{workdir.path} has no {workdir.summary.name} yet: finish the run first")
    summary = read_json(workdir.summary)
    drawn = figures.draw(
        workdir.report,
        summary,
        read_json_lines(workdir.seed / "metrics.jsonl"),
        [
            read_json_lines(workdir.expert(i) / "metrics.jsonl")
            for i in range(len(summary["experts"]))
        ],
        read_json_lines(workdir.curve) if workdir.curve.exists() else [],  # none without updates
    )
    text = page.markdown(summary, drawn)
    write_text(_page(workdir), text)  # last: where there is a page, its figures are there too
    return text


def show(workdir: Workdir) -> None:
    """Prints the table of a finished run and where its report is.

    The report is made where it is missing or older than the summary.
    """
    console.print(terminal_table(read_json(workdir.summary)))
    where = _page(workdir)
    if not where.exists() or where.stat().st_mtime < workdir.summary.stat().st_mtime:
        write(workdir)
    console.print(f"report: {where}")


def _page(workdir: Workdir) -> Path:
    return workdir.report / "report.md"
