"""Checkpoints: one file for a state, in numpy's own format, and nothing else knows about it.

An ensemble saves as many states as it has experts, so a checkpoint is one write and one rename. It
carries a digest of its content: a flipped byte, a truncated file or a changed dtype is found on
restore, and the one before it is used. Nothing in it can run code: there are only plain arrays.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from soma_jax.errors import SomaError
from soma_jax.files import write_bytes

PyTree = Any
_WIDTH = 8  # digits of an update in a file's name, so that names sort
_DIGEST, _LOSS = "sha256", "loss"  # beside the arrays, whose names begin with . or [


def _named(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    result = hashlib.sha256()
    for name, array in arrays.items():
        result.update(f"{name}{array.dtype.str}{array.shape}".encode())
        result.update(np.ascontiguousarray(array).tobytes())
    return result.hexdigest()


class Checkpoints:
    """The checkpoints of one expert, by update: the newest `keep`, and the one of least loss.

    When `save` returns the state is on disk, under its final name.
    """

    def __init__(self, directory: Path, keep: int = 2):
        self._directory = Path(directory).absolute()
        self._keep = keep

    def steps(self) -> list[int]:
        """Updates of which there is a checkpoint, whole or not, the oldest first."""
        return sorted(int(p.stem) for p in self._directory.glob("*.npz") if p.stem.isdigit())

    def save(self, step: int, state: PyTree, loss: float = math.nan) -> None:
        """Saves a state of arrays, then deletes what is older than the newest `keep`, except the
        one whose loss (of the expert's last validation; finite ones count) is the least.

        Raises:
          SomaError: when it cannot be written, or there is one of this update already; what is
            there is then untouched.
        """
        target = self._path(step)
        if target.exists():
            raise SomaError(f"{target} exists already: a checkpoint is not saved over")
        arrays: dict[str, Any] = {
            name: np.asarray(x) for name, x in _named(jax.device_get(state)).items()
        }
        content = io.BytesIO()
        about = {_DIGEST: np.array(_digest(arrays)), _LOSS: np.array(loss)}
        np.savez(content, allow_pickle=False, **arrays | about)
        write_bytes(target, content.getvalue())
        for leftover in self._directory.glob(".*.npz.tmp"):
            leftover.unlink(missing_ok=True)  # of a save that was killed
        steps = self.steps()
        best = min(reversed(steps), key=self._loss)
        for old in set(steps[: -self._keep]) - {best}:
            self._path(old).unlink(missing_ok=True)

    def restore(self, step: int, like: PyTree) -> PyTree:
        """The state saved at an update, as numpy arrays in the structure of `like`.

        Raises:
          SomaError: when it is damaged, or of another shape than `like`.
        """
        path, wanted = self._path(step), _named(like)
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            digest, _ = str(arrays.pop(_DIGEST)), arrays.pop(_LOSS)
        except Exception as error:  # whatever damage makes of the readers of zip and of arrays
            raise SomaError(f"{path} cannot be read: {_first_line(error)}") from error
        if _digest(arrays) != digest:
            raise SomaError(f"{path} is damaged: its content is not what was saved")
        for name in wanted | arrays:
            want, got = (
                f"{tree[name].dtype}{tree[name].shape}" if name in tree else "nothing"
                for tree in (wanted, arrays)
            )
            if want != got:
                raise SomaError(
                    f"{path}: {name} is {got}, and {want} is wanted: it is of another model"
                )
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])

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
                self._path(later).unlink(missing_ok=True)

    def _loss(self, step: int) -> float:
        """What was saved with a checkpoint; infinite when it is not finite or cannot be read."""
        try:
            with self._path(step).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                loss = float(file[_LOSS])
        except Exception:  # as in `restore`
            return math.inf
        return loss if math.isfinite(loss) else math.inf

    def _path(self, step: int) -> Path:
        return self._directory / f"{step:0{_WIDTH}d}.npz"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
