"""What a person sees while a stage runs: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

console = Console(highlight=False, soft_wrap=True)

_SECONDS_BETWEEN_LINES = 20.0


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


class StageProgress:
    """Progress of one training stage.

    Args:
      name: of the stage.
      total: updates.
      done: updates done in an earlier run.
    """

    def __init__(self, name: str, total: int, done: int):
        self._name, self._total, self._done = name, total, done
        self._start, self._first = time.monotonic(), done
        self._last_line = -_SECONDS_BETWEEN_LINES
        self._bar: Progress | None = None
        self._task: Any = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(name, total=total, completed=done, facts="compiling")

    def __enter__(self) -> StageProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, loss: float, rate: float) -> None:
        """Shows `done` updates, the mean loss (nats/byte) and byte-forwards per second."""
        facts = f"loss {loss:.3f} nats/byte, {rate / 1e6:.2f}M byte-forwards/s"
        if self._bar:
            self._bar.update(self._task, completed=done, facts=facts)
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or done == self._total:
            self._last_line = now
            left = (now - self._start) / max(done - self._first, 1) * (self._total - done)
            console.print(f"{self._name}: update {done}/{self._total}, {facts}, {_time(left)} left")
