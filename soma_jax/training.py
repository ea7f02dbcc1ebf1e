"""The training loop of a stage: some experts, in step, each from its own stream to its own place.

Stopped at any moment and called again, it goes on from the newest update of which every expert has
a whole checkpoint, and ends with bit-identical states and the same metric lines. Experts that were
trained apart, by several jobs, go on apart.
"""

from __future__ import annotations

import contextlib
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
from threadpoolctl import threadpool_limits

from soma_jax import distributed, ensemble, expert, model, randomness
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Run, Stage
from soma_jax.data import pipeline
from soma_jax.data.store import Store
from soma_jax.errors import SomaError
from soma_jax.files import naming_the_disk, write_text
from soma_jax.interrupt import Interrupted, Interruptions
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


def trainee(
    directory: Path,
    params: model.Params,
    stage: Stage,
    store: Store,
    chunks: np.ndarray,
    *,
    random_seed: int,
    kind: str,
    index: int,
    validation_share: float,
) -> Trainee:
    """An expert that starts from `params`, with its part of a corpus and random streams of its own.

    Args:
      directory: where it is kept.
      params: what it starts from.
      stage: settings.
      store: the corpus.
      chunks: its shard, chunk numbers.
      random_seed: of the run.
      kind: names its random streams, with `index`.
      index: its number among its kind.
      validation_share: of the shard, held out for the plateau rule.
    """
    length = stage.window + 1
    train, validation = pipeline.split_shard(
        store,
        chunks,
        validation_share=validation_share,
        length=length,
        seed=randomness.integer(random_seed, f"{kind} split", index),
    )
    batch = stage.windows_per_update
    if stage.carry:
        stream = pipeline.streams(store, train, length=length, batch=batch)
    else:
        seed = randomness.integer(random_seed, f"{kind} windows", index)
        stream = pipeline.shard_windows(store, train, length=length, batch=batch, seed=seed)
    return Trainee(
        directory=directory,
        start=expert.init_state(params, stage),
        stream=stream,
        validation=pipeline.validation_windows(
            store, validation, length=length, count=stage.validation_windows
        ),
        key=randomness.key(random_seed, f"{kind} probes", index),
    )


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
    checkpoints = _checkpoints(trainees)
    apart = _apart(checkpoints, stage)
    distributed.wait()  # process 0 changes nothing while the others still look
    if len(apart) > 1:
        for group in apart:
            train(name, [trainees[i] for i in group], stage, run, interruptions)
        return results(trainees, stage)
    with distributed.in_turn():
        done, states = _restore(trainees, checkpoints)
    if done == stage.updates and all(c.steps() for c in checkpoints):
        _refuse_failures(trainees, states)
        return states

    mesh = ensemble.make_mesh(len(trainees), stage)
    compiled = ensemble.Ensemble(mesh, stage, chunk=run.chunk)
    on_device = compiled.place(ensemble.stack(states))
    keys = compiled.place(jnp.stack([t.key for t in trainees]))
    validation = compiled.place(np.stack([t.validation for t in trainees]))
    validated = np.full(len(trainees), np.nan)  # each expert's last validation loss

    with contextlib.ExitStack() as stack:
        metrics = [
            stack.enter_context(MetricLines(t.directory, done, run.tensorboard))
            for t in trainees
            if distributed.leads()
        ]

        def save() -> None:
            states = ensemble.unstack(on_device)
            if not distributed.leads():
                return
            for lines in metrics:
                lines.flush()
            for where, state, loss in zip(checkpoints, states, validated.tolist(), strict=True):
                if where.steps()[-1:] != [done]:
                    where.save(done, state, loss)

        work = len(trainees) * stage.byte_forwards_per_update
        progress = stack.enter_context(StageProgress(name, stage.updates, done, work))
        # Whitening calls LAPACK, whose own threads would wait for cores that are all in use.
        stack.enter_context(threadpool_limits(1, "blas"))
        stack.enter_context(interruptions.postponed())
        seconds_before, started = metrics[0].seconds if metrics else 0.0, time.monotonic()
        last_save, told = started, False
        failed = distributed.fetch(on_device.failed)
        while done < stage.updates and (failed < 0).any():
            batch = compiled.place_batch(_batch(trainees, done, stage))
            if mesh.shape["probe"] > 1 and not told:
                told = True
                size = compiled.exchanged_bytes(on_device, batch, keys)
                console.print(
                    f"{name}: {mesh.shape['probe']} devices share the directions of an expert; "
                    f"each sends {size:,} bytes an update"
                )
            on_device, losses = compiled.update(on_device, batch, keys)
            done += 1

            validates = done % stage.validate_every == 0 or done == stage.updates
            if validates:
                on_device, validation_losses = compiled.validate(on_device, validation)
            if validates or done % run.log_every == 0 or done == 1:
                facts = {"loss": losses, **on_device.body_optimizer.hyperparams}
                if validates:
                    facts["validation"] = validation_losses
                facts = distributed.fetch(facts)
                validated = facts.get("validation", validated)
                failed_before, failed = failed, distributed.fetch(on_device.failed)
                for i in np.flatnonzero((failed >= 0) & (failed_before < 0)).tolist():
                    logging.error("%s", _failure(trainees[i], failed[i]))
                for i in np.flatnonzero(failed < 0).tolist() if metrics else []:
                    metrics[i].write(
                        update=done,
                        byte_forwards=done * stage.byte_forwards_per_update,
                        seconds=round(seconds_before + time.monotonic() - started, 3),
                        **{fact: float(values[i]) for fact, values in facts.items()},
                    )
                if (failed < 0).any():
                    progress(done, float(facts["loss"][failed < 0].mean()))
            if observe is not None and observe_every and done % observe_every == 0:
                observe(done, [s.params for s in ensemble.unstack(on_device)])
            # What one process is asked to do, all of them do: they take every step together.
            signum, due = distributed.highest(
                interruptions.pending, time.monotonic() - last_save > run.checkpoint_seconds
            )
            if signum or due:
                save()
                last_save = time.monotonic()
            if signum:
                raise Interrupted(signum)
        save()
    distributed.wait()
    # The last states are read back: success is only said of what is really on disk.
    states = [c.restore(done, t.start) for c, t in zip(checkpoints, trainees, strict=True)]
    _refuse_failures(trainees, states)
    return states


def _batch(trainees: Sequence[Trainee], update: int, stage: Stage) -> expert.Batch:
    """What the experts read in an update."""
    return expert.split_batch(np.stack([t.stream[update] for t in trainees]), stage)


def finished(trainee: Trainee, stage: Stage) -> bool:
    """Whether an expert's last state is on disk."""
    return _checkpoints([trainee])[0].steps()[-1:] == [stage.updates]


def results(trainees: Sequence[Trainee], stage: Stage) -> list[expert.ExpertState]:
    """The last states of finished experts.

    Raises:
      SomaError: a state is damaged, or of an expert whose loss was not finite.
    """
    states = [
        c.restore(stage.updates, t.start)
        for c, t in zip(_checkpoints(trainees), trainees, strict=True)
    ]
    _refuse_failures(trainees, states)
    return states


def _checkpoints(trainees: Sequence[Trainee]) -> list[Checkpoints]:
    return [Checkpoints(t.directory / "checkpoints") for t in trainees]


def _apart(checkpoints: Sequence[Checkpoints], stage: Stage) -> list[list[int]]:
    """Who is trained with whom: all together where they have an update in common to go on from.

    Else jobs have trained some of them alone, and those that stand at one update go on together.
    """
    steps = [c.steps() for c in checkpoints]
    # With no more than a first one, a kill between the very first saves: the start is not far.
    near_start = [not some or (len(some) == 1 and some[0] < stage.updates) for some in steps]
    reachable = [
        set(some) | {0} if n else set(some) for some, n in zip(steps, near_start, strict=True)
    ]
    if set.intersection(*reachable):
        return [list(range(len(steps)))]
    newest = [some[-1] if some else 0 for some in steps]
    return [[i for i, at in enumerate(newest) if at == one] for one in sorted(set(newest))]


def _restore(
    trainees: Sequence[Trainee], checkpoints: Sequence[Checkpoints]
) -> tuple[int, list[expert.ExpertState]]:
    """The newest update at which every expert has a whole checkpoint, and the states there."""
    at_most: int | None = None
    behind = trainees[0]
    while True:
        found = [
            c.newest(t.start, at_most) or (0, jax.tree.map(np.asarray, t.start))
            for c, t in zip(checkpoints, trainees, strict=True)
        ]
        steps = [step for step, _ in found]
        if min(steps) == max(steps):
            break
        if at_most is None:
            behind = trainees[steps.index(min(steps))]
        at_most = min(steps)
        if at_most == 0 and max(len(c.steps()) for c in checkpoints) > 1:
            # Not a kill between the very first saves. Starting all of them again is not for us.
            raise SomaError(
                f"{behind.directory} has no whole checkpoint at an update at which the other "
                "experts have one. Restore it from a copy, or train it alone (--config.run.only)"
            )
    if distributed.leads():
        for checkpoint in checkpoints:
            # Left in place, they would count as the newest and push out those that we make now.
            checkpoint.delete_after(steps[0])
    if steps[0]:
        console.print(f"going on from update {steps[0]}")
    return steps[0], [state for _, state in found]


def _failure(trainee: Trainee, update: int) -> str:
    return (
        f"expert {trainee.directory.name}: the loss of update {int(update) + 1} is not finite; its "
        f"state before that update is kept under {trainee.directory}"
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

    def __init__(self, directory: Path, done: int, tensorboard: bool):
        self._path = directory / "metrics.jsonl"
        kept = []
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:  # the run was killed while it wrote this line
                    break
                if record["update"] > done:
                    break
                kept.append(record)
        self.seconds: float = kept[-1]["seconds"] if kept else 0.0
        write_text(self._path, "".join(json.dumps(r) + "\n" for r in kept))
        with naming_the_disk(self._path):
            self._file = self._path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=done + 1)

    def write(self, **record: Any) -> None:
        with naming_the_disk(self._path):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            if self._events:
                for name, value in record.items():
                    self._events.add_scalar(name, value, record["update"])

    def flush(self) -> None:
        """Makes sure that a checkpoint is never newer than the lines before it."""
        with naming_the_disk(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._events:
                self._events.flush()

    def __enter__(self) -> MetricLines:
        return self

    def __exit__(self, *_: Any) -> None:
        with naming_the_disk(self._path):
            self._file.close()
            if self._events:
                self._events.close()
