"""Checkpoints: Orbax, and nothing else knows about it.

A checkpoint carries a digest of its content, so that a flipped byte, a truncated file or a changed
dtype is found on restore, and the one before it is used. It holds arrays and JSON alone: nothing in
it can run code.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from soma_jax.errors import SomaError
from soma_jax.files import read_json

PyTree = Any
_WIDTH = 8  # digits of a step's directory, so that names sort


def _digest(tree: PyTree) -> str:
    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)}{array.dtype.str}{array.shape}".encode())
        result.update(np.ascontiguousarray(array).tobytes())
    return result.hexdigest()


@cache
def _orbax() -> ocp.Checkpointer:
    """Saves and restores for this process alone: Orbax's own would wait for all of a job's."""
    here, alone = jax.process_index(), jax.process_count() == 1
    options = ocp.options.MultiprocessingOptions(
        primary_host=here,
        active_processes=None if alone else {here},
        barrier_sync_key_prefix=None if alone else f"process_{here}",
    )
    handler = ocp.CompositeCheckpointHandler(  # each part of it has a barrier of its own
        composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        state=ocp.StandardCheckpointHandler(multiprocessing_options=options),
        about=ocp.JsonCheckpointHandler(multiprocessing_options=options),
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)


class Checkpoints:
    """The checkpoints of one expert, by update: the newest `keep`, and the one of least loss.

    When `save` returns the state is on disk, under its final name.
    """

    def __init__(self, directory: Path, keep: int = 2):
        self._directory = Path(directory).absolute()  # Orbax fails late on a relative path
        self._keep = keep

    def steps(self) -> list[int]:
        """Updates of which there is a checkpoint, whole or not, the oldest first."""
        if not self._directory.is_dir():
            return []
        return sorted(int(p.name) for p in self._directory.iterdir() if p.name.isdigit())

    def save(self, step: int, state: PyTree, loss: float = math.nan) -> None:
        """Saves a state of arrays, then deletes what is older than the newest `keep`, except the
        one whose loss (of the expert's last validation; finite ones count) is the least.

        Raises:
          SomaError: when it cannot be written, or there is one of this update already; what is
            there is then untouched.
        """
        state = jax.tree.map(np.asarray, jax.device_get(state))
        about = {"sha256": _digest(state), "loss": loss if math.isfinite(loss) else None}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover)  # of a save that was killed
            _orbax().save(
                self._path(step),
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about)
                ),
            )
        except Exception as error:  # a full disk comes as OSError, ValueError, XlaRuntimeError
            raise SomaError(
                f"cannot save update {step} under {self._directory}: {_first_line(error)}. Make "
                "room (or mend the permissions) and run the same command again: it goes on from "
                "the last complete checkpoint"
            ) from error
        steps = self.steps()
        best = min(reversed(steps), key=self._loss)
        for old in set(steps[: -self._keep]) - {best}:
            shutil.rmtree(self._path(old), ignore_errors=True)

    def restore(self, step: int, like: PyTree) -> PyTree:
        """The state saved at an update, as numpy arrays in the structure of `like`.

        Raises:
          SomaError: when it is damaged, or of another shape than `like`.
        """
        target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # damage is reported below, once
                found = _orbax().restore(
                    self._path(step),
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(target), about=ocp.args.JsonRestore()
                    ),
                )
            state, digest = found.state, found.about["sha256"]
        except Exception as error:  # whatever a damaged file makes of the readers below Orbax
            raise SomaError(f"{self._path(step)} cannot be read: {_first_line(error)}") from error
        if _digest(state) != digest:
            raise SomaError(f"{self._path(step)} is damaged: its content is not what was saved")
        for (path, want), got in zip(
            jax.tree_util.tree_leaves_with_path(like), jax.tree.leaves(state), strict=True
        ):
            if (want.shape, want.dtype) != (got.shape, got.dtype):
                raise SomaError(
                    f"{self._path(step)}{jax.tree_util.keystr(path)} is {got.dtype}{got.shape}, "
                    f"and {want.dtype}{want.shape} is wanted: it is of another model"
                )
        return state

    def newest(self, like: PyTree, at_most: int | None = None) -> tuple[int, PyTree] | None:
        """The newest whole checkpoint (of update `at_most` or before), or None if none was saved.

        A damaged one is named in a warning and the one before it is used.

        Raises:
          SomaError: when there are checkpoints and none of them is whole.
        """
        before = self.steps()
        steps = [s for s in before if at_most is None or s <= at_most]
        for step in reversed(steps):
            try:
                return step, self.restore(step, like)
            except SomaError as error:
                logging.warning("%s; trying the one before it", error)
        if steps and self.steps() != before:  # a run that goes on has replaced them meanwhile
            return self.newest(like, at_most)
        if steps:
            raise SomaError(
                f"none of the checkpoints under {self._directory} is whole. Restore them from a "
                "copy; this expert is lost otherwise"
            )
        return None

    def delete_after(self, step: int) -> None:
        """Deletes the checkpoints of later updates."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self._path(later), ignore_errors=True)

    def _loss(self, step: int) -> float:
        """What was saved with a checkpoint; infinite when it was not finite or cannot be read."""
        try:
            loss = read_json(self._path(step) / "about" / "metadata")["loss"]
        except Exception:  # damaged; `restore` says so
            return math.inf
        return math.inf if loss is None else float(loss)

    def _path(self, step: int) -> Path:
        return self._directory / f"{step:0{_WIDTH}d}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
