"""The training loop of a stage: some experts, in step, each from its own stream to its own directory.

Stopped at any moment and called again, it goes on from the newest update of which every expert has a
whole checkpoint, and ends with bit-identical states and the same metric lines.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from soma_jax import ensemble, expert
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Run, Stage
from soma_jax.errors import SomaError
from soma_jax.files import naming_the_disk, write_text
from soma_jax.interrupt import Interruptions
from soma_jax.progress import StageProgress, console

# Called with (updates done, host parameters of each expert), e.g. to score the ensemble.
Observer = Callable[[int, list[Any]], None]


@dataclasses.dataclass(frozen=True)
class Trainee:
    """One expert to train: where it is kept, what it starts from, reads, and draws from."""

    directory: Path
    start: expert.ExpertState
    stream: Any  # grain.MapDataset: stream[update] is uint8 [windows_per_update, T + 1]
    validation: np.ndarray  # uint8 [W, T + 1]; the same W for all
    key: jax.Array


def train(
    name: str,
    trainees: Sequence[Trainee],
    stage: Stage,
    run: Run,
    interruptions: Interruptions,
    *,
    observe: Observer | None = None,
    observe_every: int = 0,
) -> list[expert.ExpertState]:
    """Trains the experts of a stage to their last update and returns their final states.

    Args:
      name: of the stage, for the progress line.
      trainees: the experts.
      stage: settings.
      run: how to log, save and place.
      interruptions: polled after each update.
      observe: called after every `observe_every` updates.
      observe_every: 0 is never.

    Raises:
      SomaError: when an expert's loss was not finite (after the others have finished), or a state
        cannot be saved.
      Interrupted: after saving, when a signal asked for it.
    """
    checkpoints = [Checkpoints(t.directory / "checkpoints") for t in trainees]
    done, states = _restore(trainees, checkpoints)
    metrics = [MetricLines(t.directory / "metrics.jsonl", done) for t in trainees]
    if done == stage.updates:
        _refuse_failures(trainees, states)
        return states

    mesh = ensemble.make_mesh(len(trainees), stage)
    compiled = ensemble.Ensemble(mesh, stage, chunk=run.chunk)
    on_device = compiled.place(ensemble.stack(states))
    keys = compiled.place(jnp.stack([t.key for t in trainees]))
    validation = compiled.place(np.stack([t.validation for t in trainees]))

    def save(step: int) -> None:
        for line in metrics:
            line.flush()
        for where, state in zip(checkpoints, ensemble.unstack(on_device), strict=True):
            where.save(step, state)

    seconds_before = metrics[0].seconds
    started = last_save = last_log = time.monotonic()
    announced: set[int] = set()
    since_log = 0
    with interruptions.postponed(), StageProgress(name, stage.updates, done) as progress:
        while done < stage.updates:
            windows = np.stack([t.stream[done] for t in trainees])
            batch = compiled.place_batch(expert.split_batch(windows, stage))
            on_device, losses = compiled.update(on_device, batch, keys)
            done, since_log = done + 1, since_log + 1
            last = done == stage.updates

            facts: dict[str, Any] = {}
            if done % stage.validate_every == 0 or last:
                on_device, facts["validation"] = compiled.validate(on_device, validation)
            if facts or done % run.log_every == 0 or done == 1:
                facts |= {"loss": losses, **on_device.body_optimizer.hyperparams}
                facts = {k: np.asarray(v).tolist() for k, v in facts.items()}
                now = time.monotonic()
                for i, line in enumerate(metrics):
                    line.write(
                        update=done,
                        byte_forwards=done * stage.byte_forwards_per_update,
                        seconds=round(seconds_before + now - started, 3),
                        **{k: v[i] for k, v in facts.items()},
                    )
                work = since_log * len(trainees) * stage.byte_forwards_per_update
                progress(done, float(np.mean(facts["loss"])), work / max(now - last_log, 1e-9))
                last_log, since_log = now, 0
                failed = np.asarray(on_device.failed)
                for i in np.flatnonzero(failed >= 0):
                    if i not in announced:
                        announced.add(int(i))
                        logging.error("%s; the others go on", _failure(trainees[i], failed[i]))
                if (failed >= 0).all():
                    break
            if observe is not None and observe_every and done % observe_every == 0:
                observe(done, [s.params for s in ensemble.unstack(on_device)])
            if (
                last
                or interruptions.pending
                or time.monotonic() - last_save > run.checkpoint_seconds
            ):
                save(done)
                last_save = time.monotonic()
                interruptions.check()
        else:
            # The last state is read back: success is only said of what is really on disk.
            states = [
                where.restore(done, trainee.start)
                for where, trainee in zip(checkpoints, trainees, strict=True)
            ]
            _refuse_failures(trainees, states)
            return states
        save(done)
    _refuse_failures(trainees, ensemble.unstack(on_device))
    raise AssertionError("unreachable: the loop breaks only when every expert failed")


def _restore(
    trainees: Sequence[Trainee], checkpoints: Sequence[Checkpoints]
) -> tuple[int, list[expert.ExpertState]]:
    """The newest update at which every expert has a whole checkpoint, and the states there."""
    at_most: int | None = None
    while True:
        found = [
            c.newest(t.start, at_most) or (0, jax.tree.map(np.asarray, t.start))
            for c, t in zip(checkpoints, trainees, strict=True)
        ]
        oldest = min(step for step, _ in found)
        if all(step == oldest for step, _ in found):
            if oldest:
                console.print(f"going on from update {oldest}")
            return oldest, [state for _, state in found]
        at_most = oldest


def _failure(trainee: Trainee, update: int) -> str:
    return (
        f"expert {trainee.directory.name}: the loss of update {int(update) + 1} is not finite; its state "
        f"before that update is kept under {trainee.directory}"
    )


def _refuse_failures(trainees: Sequence[Trainee], states: Sequence[expert.ExpertState]) -> None:
    failures = [
        _failure(t, int(s.failed))
        for t, s in zip(trainees, states, strict=True)
        if int(s.failed) >= 0
    ]
    if failures:
        raise SomaError(
            "; ".join(failures) + ". Try a lower learning_rate or eps in a new --workdir"
        )


class MetricLines:
    """An expert's metrics, one JSON object a line; lines past the restored update are dropped."""

    def __init__(self, path: Path, done: int):
        self._path = path
        kept = []
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
                try:
                    record = json.loads(line)
                except ValueError:  # the run was killed while it wrote this line
                    break
                if record["update"] > done:
                    break
                kept.append(record)
        self.seconds: float = kept[-1]["seconds"] if kept else 0.0
        write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
        with naming_the_disk(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, **record: Any) -> None:
        with naming_the_disk(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def flush(self) -> None:
        """Makes sure that a checkpoint is never newer than the lines before it."""
        with naming_the_disk(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
