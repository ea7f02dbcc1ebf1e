"""What a person sees while a stage runs: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

console = Console(highlight=False, soft_wrap=True)

_SECONDS_BETWEEN_LINES = 20.0


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


@contextmanager
def activity(words: str) -> Iterator[Callable[[str], None]]:
    """Something that takes a while: a moving sign on a terminal, a line elsewhere.

    Yields a function that shows other words (on a terminal).
    """
    if console.is_terminal:
        with console.status(words) as status:
            yield status.update
    else:
        console.print(words)
        yield lambda _: None


class StageProgress:
    """Progress of one training stage.

    Args:
      name: of the stage.
      total: updates.
      done: updates done in an earlier run.
      work: byte-forwards of an update, all experts together.
    """

    def __init__(self, name: str, total: int, done: int, work: int):
        self._name, self._total, self._done, self._work = name, total, done, work
        self._first: tuple[int, float] | None = None  # updates and time once compiled
        self._last_line = 0.0
        self._bar: Progress | None = None
        self._task: Any = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=10),  # all of it fits a line of 80 columns
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                console=console,
            )
            self._task = self._bar.add_task(name, total=total, completed=done, facts="compiling")

    def __enter__(self) -> StageProgress:
        if self._bar:
            self._bar.start()
        else:
            console.print(f"{self._name}: {self._total - self._done} updates to do, compiling")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, done: int, loss: float) -> None:
        """Shows `done` updates and their mean loss (nats/byte), and from the second call on the
        byte-forwards per second and the time left."""
        now = time.monotonic()
        facts = f"loss {loss:.3f}" if self._bar else f"loss {loss:.3f} nats/byte"
        if self._first is None:
            self._first = done, now
        else:
            per_update = (now - self._first[1]) / max(done - self._first[0], 1)
            facts += f", {self._work / max(per_update, 1e-9) / 1e6:.2f}M byte-forwards/s"
            facts += f", {_time(per_update * (self._total - done))} left"
        if self._bar:
            self._bar.update(self._task, completed=done, facts=facts)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES or done == self._total:
            self._last_line = now
            console.print(f"{self._name}: update {done}/{self._total}, {facts}")
