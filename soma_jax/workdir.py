"""A workdir is the run: its config, corpora, seed, router, experts, metrics and report.

config.json        the resolved config; a run under another one is refused
data/{train,valid,test}/   the corpora as chunk stores, with their fingerprints
seed/              checkpoints/ and metrics.jsonl of the seed
router/            the router; assignment.npy: the expert of each training chunk
experts/NNN/       checkpoints/ and metrics.jsonl of each expert
curve.jsonl        the ensemble's validation loss while it trains
stages.json        seconds each stage took
report/            report.md, summary.json, figures
"""

from __future__ import annotations

import dataclasses
import fcntl
from pathlib import Path
from typing import Any

import ml_collections

from soma_jax.config import Config, resolve
from soma_jax.errors import SomaError
from soma_jax.files import naming_the_disk, read_json, write_json


class Workdir:
    """Paths of a run, and the two rules: one run at a time, and one config for its life."""

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

    def lock(self) -> Any:
        """Takes the workdir for this process, until the returned file closes or the process dies.

        The lock is the first file of a workdir, and so the sign that a directory is one.

        Raises:
          SomaError: another run has it, or the directory holds something else.
        """
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / "lock").exists():
            raise SomaError(
                f"{self.path} holds files and is not a workdir; choose another --workdir"
            )
        with naming_the_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / "lock").open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise SomaError(
                f"another run is using {self.path}; wait for it, or choose another --workdir"
            ) from None
        return file

    def check(self, config: Config) -> None:
        """Checks that a resumed run has the config it was started with.

        Raises:
          SomaError: naming the fields that changed. What is under `run` may.
        """
        if not self.config.exists():
            return
        changed = _differences(read_json(self.config), dataclasses.asdict(config), "config")
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
        return resolve(ml_collections.ConfigDict(read_json(self.config)))


def _differences(old: dict[str, Any], new: dict[str, Any], path: str) -> list[str]:
    result = []
    for name in sorted(set(old) | set(new)):
        where, before, now = f"{path}.{name}", old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            result += _differences(before, now, where)
        elif before != now:
            result.append(f"{where} was {before!r}, now {now!r}")
    return result
