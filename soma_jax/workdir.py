"""A workdir is the run: its config, corpora, seed, router, experts, metrics and report.

config.json        the resolved config; a run under another one is refused
data/{train,valid,test}/   the corpora as chunk stores, with their fingerprints
seed/              checkpoints/ and metrics.jsonl of the seed
router/            the router; assignment.npy: the expert of each training chunk
experts/NNN/       checkpoints/ and metrics.jsonl of each expert
curve.jsonl        the ensemble's validation loss while it trains
stages.json        seconds each stage took, all jobs together
report/            report.md, summary.json, figures
lock               locked byte by byte, by the jobs that work here

Several jobs may share a workdir: each trains experts of its own (config.run.only), and what all
of them need is made by one of them while the others wait.
"""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import ml_collections

from soma_jax import distributed
from soma_jax.config import Config, resolve
from soma_jax.errors import SomaError
from soma_jax.files import naming_the_disk, read_json, write_json
from soma_jax.progress import console

# Bytes of the lock file. Record locks: one open file has any number of them, they are seen through
# network file systems, and they end with the process, however it ends.
SHARED = 0  # the corpora, the router, the seed, the scores: made by one job, once
STAGES = 1  # stages.json
_EXPERTS = 2  # from here on, one for each expert


class Workdir:
    """Paths of a run, and the two rules: one job for an expert, and one config for its life."""

    def __init__(self, path: Path):
        self.path = Path(path).absolute()
        self.config = self.path / "config.json"
        self.corpora = self.path / "corpora.json"
        self.data = self.path / "data"
        self.screened = self.path / "screened.json"
        self.seed = self.path / "seed"
        self.router = self.path / "router"
        self.assignment = self.path / "assignment.npy"
        self.curve = self.path / "curve.jsonl"
        self.stages = self.path / "stages.json"
        self.report = self.path / "report"
        self.summary = self.report / "summary.json"

    def store(self, split: str) -> Path:
        return self.data / split

    def expert(self, index: int) -> Path:
        return self.path / "experts" / f"{index:03d}"

    @contextmanager
    def lock(self, experts: Sequence[int] | None = None) -> Iterator[None]:
        """Inside, these experts (None: all there can be) are this job's alone.

        The lock file is the first of a workdir, and so the sign that a directory is one.

        Raises:
          SomaError: another job has one of them, or the directory holds something else.
        """
        if not distributed.leads():  # process 0 has them for all of its job
            yield
            return
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / "lock").exists():
            raise SomaError(
                f"{self.path} holds files and is not a workdir; choose another --workdir"
            )
        with naming_the_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: BinaryIO = (self.path / "lock").open("ab")
        with self._lock:
            for expert in [None] if experts is None else experts:
                if not self._locked(*((_EXPERTS, 0) if expert is None else (_EXPERTS + expert, 1))):
                    what = "" if expert is None else f"expert {expert} of "
                    raise SomaError(
                        f"another run is using {what}{self.path}; wait for it, or choose "
                        f"{'another --workdir' if expert is None else 'other experts'}"
                    )
            yield

    @contextmanager
    def alone(self, part: int = SHARED) -> Iterator[None]:
        """Inside `lock`: one job at a time is here, the others wait."""
        if not distributed.leads():
            yield
            return
        if not self._locked(part, 1):
            if part == SHARED:
                console.print("waiting for another job, which makes what all of them need")
            fcntl.lockf(self._lock, fcntl.LOCK_EX, 1, part)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, part)

    def _locked(self, start: int, length: int) -> bool:
        """Locks bytes (0: all from `start` on) unless another process has one of them."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except (BlockingIOError, PermissionError):  # which of them depends on the system
            return False
        return True

    def check(self, config: Config) -> None:
        """Checks that a resumed run has the config it was started with.

        Raises:
          SomaError: naming the fields that changed. What is under `run` may.
        """
        if not self.config.exists():
            return
        changed = _differences(self._recorded(), dataclasses.asdict(config), "config")
        if changed := [c for c in changed if not c.startswith("config.run.")]:
            raise SomaError(
                f"{self.path} was started with another config: {'; '.join(changed)}. Use the same "
                "config, or another --workdir"
            )

    def adopt(self, config: Config, fingerprints: dict[str, str]) -> None:
        """Makes this the workdir of a run with this config on these corpora.

        Args:
          config: of the run; its input is known to be good by now.
          fingerprints: of the corpus of each split.

        Raises:
          SomaError: the run was started on other texts.
        """
        if not self.config.exists():
            write_json(self.corpora, fingerprints)
            write_json(self.config, dataclasses.asdict(config))
        for split, fingerprint in read_json(self.corpora).items():
            if fingerprints[split] != fingerprint:
                raise SomaError(
                    f"config.data.{split} holds another text than when {self.path} was started. "
                    "Restore it, or choose another --workdir"
                )

    def read_config(self) -> Config:
        """The config of an existing run.

        Raises:
          SomaError: this is not a workdir.
        """
        if not self.config.exists():
            raise SomaError(f"{self.path} is not a workdir: it has no config.json")
        return resolve(ml_collections.ConfigDict(self._recorded()))

    def _recorded(self) -> dict[str, Any]:
        """config.json. What it lacks is of a later version than the run's, which did as the
        defaults do."""
        recorded = read_json(self.config)
        return recorded | {
            name: default | recorded.get(name, {})
            if isinstance(default, dict)
            else recorded.get(name, default)
            for name, default in dataclasses.asdict(Config()).items()
        }


def _differences(old: dict[str, Any], new: dict[str, Any], path: str) -> list[str]:
    result = []
    for name in sorted(set(old) | set(new)):
        where, before, now = f"{path}.{name}", old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            result += _differences(before, now, where)
        elif before != now:
            result.append(f"{where} was {before!r}, now {now!r}")
    return result
