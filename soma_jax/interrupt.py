"""SIGTERM and Ctrl-C: save where there is something to save, then stop and say how to go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(BaseException):
    """The run was asked to stop by a signal, and what it had done is on disk."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Interruptions:
    """Handles SIGTERM and SIGINT: at once, or at the next `check` inside `postponed`.

    At once is safe wherever state on disk is complete or absent; training postpones to the end of
    an update. A second signal is not postponed.
    """

    def __init__(self) -> None:
        self._postpone = False
        self._pending: int | None = None

    def __enter__(self) -> Interruptions:
        self._previous = {
            s: signal.signal(s, self._handle) for s in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, *_: Any) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, _: Any) -> None:
        if self._postpone and self._pending is None:
            self._pending = signum
        else:
            raise Interrupted(signum)

    @property
    def pending(self) -> int:
        """The signal that is postponed, or 0."""
        return self._pending or 0

    def check(self) -> None:
        """Raises the postponed interruption, if there is one."""
        if self._pending is not None:
            raise Interrupted(self._pending)

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """Inside, the first signal only sets `pending`; it is raised at the end at the latest."""
        self._postpone = True
        try:
            yield
        finally:
            self._postpone = False
        self.check()
