"""Checkpoints: Orbax, and nothing else knows about it.

A checkpoint carries a digest of its content, so that a flipped byte, a truncated file or a changed
dtype is found on restore, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from soma_jax.errors import SomaError

PyTree = Any
_WIDTH = 8  # digits of a step's directory, so that names sort


def _digest(tree: PyTree) -> str:
    result = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        result.update(f"{jax.tree_util.keystr(path)}{array.dtype.str}{array.shape}".encode())
        result.update(np.ascontiguousarray(array).tobytes())
    return result.hexdigest()


class Checkpoints:
    """The checkpoints of one expert, by update; the newest `keep` are kept.

    Saving is synchronous: when `save` returns the state is on disk, under its final name.
    """

    def __init__(self, directory: Path, keep: int = 2):
        self._directory = Path(directory).absolute()  # Orbax fails late on a relative path
        self._keep = keep
        self._orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler())

    def steps(self) -> list[int]:
        """Updates of which there is a checkpoint, whole or not, the oldest first."""
        if not self._directory.is_dir():
            return []
        return sorted(int(p.name) for p in self._directory.iterdir() if p.name.isdigit())

    def save(self, step: int, state: PyTree) -> None:
        """Saves a state of arrays, then deletes what is older than the newest `keep`.

        Raises:
          SomaError: when it cannot be written, or there is one of this update already; what is
            there is then untouched.
        """
        state = jax.tree.map(np.asarray, jax.device_get(state))
        target = self._path(step)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover)  # of a save that was killed
            self._orbax.save(
                target,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    digest=ocp.args.JsonSave({"sha256": _digest(state)}),
                ),
            )
        except Exception as error:  # a full disk comes as OSError, ValueError, XlaRuntimeError
            raise SomaError(
                f"cannot save update {step} under {self._directory}: {_first_line(error)}. Make "
                "room (or mend the permissions) and run the same command again: it goes on from "
                "the last complete checkpoint"
            ) from error
        for old in self.steps()[: -self._keep]:
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
                found = self._orbax.restore(
                    self._path(step),
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(target), digest=ocp.args.JsonRestore()
                    ),
                )
        except Exception as error:  # whatever a damaged file makes of the readers below Orbax
            raise SomaError(f"{self._path(step)} cannot be read: {_first_line(error)}") from error
        if _digest(found.state) != found.digest["sha256"]:
            raise SomaError(f"{self._path(step)} is damaged: its content is not what was saved")
        for (path, want), got in zip(
            jax.tree_util.tree_leaves_with_path(like), jax.tree.leaves(found.state), strict=True
        ):
            if (want.shape, want.dtype) != (got.shape, got.dtype):
                raise SomaError(
                    f"{self._path(step)}{jax.tree_util.keystr(path)} is {got.dtype}{got.shape}, "
                    f"and {want.dtype}{want.shape} is wanted: it is of another model"
                )
        return found.state

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

    def _path(self, step: int) -> Path:
        return self._directory / f"{step:0{_WIDTH}d}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
