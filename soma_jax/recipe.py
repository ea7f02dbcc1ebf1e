"""The recipe, stage by stage (paper, section 3): seed, cluster, branch, train, route and score.

Each stage leaves its result in the workdir, complete or absent, and is skipped when it is there:
the same command goes on wherever a run was stopped.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from soma_jax import evaluate, expert, model, randomness, report, summary, training
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Config, Stage
from soma_jax.data import pipeline, store
from soma_jax.errors import SomaError
from soma_jax.files import naming_the_disk, read_json, write_json, write_text
from soma_jax.interrupt import Interruptions
from soma_jax.progress import console
from soma_jax.routing.router import Router
from soma_jax.workdir import Workdir

_OBSERVATIONS = 10  # looks at the ensemble's validation loss in a stage


@dataclasses.dataclass(frozen=True)
class _Run:
    """What every stage needs."""

    config: Config
    workdir: Workdir
    interruptions: Interruptions
    train: store.Store
    valid: store.Store
    test: store.Store


def run(config: Config, workdir: Workdir) -> dict[str, Any]:
    """Runs, or goes on with, the whole recipe and returns the summary (`report/summary.json`).

    Raises:
      SomaError: bad input, a changed config or corpus, a stopped expert, a full disk.
      Interrupted: on SIGTERM or Ctrl-C, after saving.
    """
    with workdir.lock(), Interruptions() as interruptions:
        workdir.check(config)
        corpora = _open_corpora(config, workdir)
        workdir.adopt(config)
        this = _Run(config, workdir, interruptions, **corpora)
        if workdir.summary.exists():
            console.print(f"{workdir.path}: finished; nothing to do")
        else:
            with _timed(workdir, "seed"):
                seed = _train_seed(this)
            with _timed(workdir, "cluster"):
                router, assignment = _cluster(this)
            with _timed(workdir, "experts"):
                experts, validation = _train_experts(this, seed, router, assignment)
            with _timed(workdir, "evaluate"):
                console.print("evaluate: scoring the test texts")
                trained = summary.Trained(config, seed, experts, router, assignment, validation)
                scores = summary.scores(trained, this.train, this.test)
            stages = read_json(workdir.stages)
            seconds = {"seconds": round(sum(stages.values()), 3), "stages": stages}
            write_json(workdir.summary, scores | summary.compute(config) | seconds)
        report.show(workdir)
        return read_json(workdir.summary)


def load(path: Path) -> tuple[Config, list[expert.ExpertState], Router]:
    """The newest whole state of each expert of a workdir, and its router; writes and locks nothing.

    Raises:
      SomaError: there is no workdir, router or whole checkpoint.
    """
    workdir = Workdir(path)
    config = workdir.read_config()
    experts = [_newest(workdir.expert(i), config, config.expert) for i in range(config.experts)]
    return config, experts, Router.load(workdir.router)


def _newest(directory: Path, config: Config, stage: Stage) -> expert.ExpertState:
    like = jax.eval_shape(
        lambda: expert.init_state(model.init(jax.random.key(0), config.expert_shape), stage)
    )
    found = Checkpoints(directory / "checkpoints").newest(like)
    if found is None:
        raise SomaError(f"{directory} holds no checkpoint: train it first with launch/main.py")
    return found[1]


def _open_corpora(config: Config, workdir: Workdir) -> dict[str, store.Store]:
    """Opens the chunk stores of the run, or builds them; what is wrong with a corpus shows here."""
    if not workdir.config.exists() and workdir.data.exists():
        shutil.rmtree(
            workdir.data
        )  # of a command that was stopped or refused, perhaps of other texts
    result = {}
    for split in ("train", "valid", "test"):
        spec, directory = getattr(config.data, split), workdir.store(split)
        if directory.exists():
            opened = store.open_store(directory)
            store.check_sources(opened, spec)
        else:
            with naming_the_disk(directory):
                directory.parent.mkdir(exist_ok=True)
            opened = store.build_store(
                spec, directory, config.data.text_field, config.data.chunk_bytes
            )
        result[split] = opened
        try:
            if split == "train":
                needed = max(config.seed.window, config.expert.window) + 1
                if opened.n_bytes < needed:
                    raise SomaError(f"{opened.n_bytes} bytes are less than a window of {needed}")
            else:
                summary.test_windows(opened, config)
        except SomaError as error:
            raise SomaError(f"config.data.{split}={spec}: {error}") from error
    return result


def _train_seed(this: _Run) -> model.Params:
    """One expert on the whole corpus; the others will be copies of it."""
    config = this.config
    params = model.init(randomness.key(config.random_seed, "init"), config.expert_shape)
    chunks = np.arange(this.train.n_chunks)
    trainee = _trainee(this, config.seed, "seed", 0, this.workdir.seed, params, chunks)
    (state,) = _train(this, "seed", [trainee], config.seed, None)
    return state.params


def _cluster(this: _Run) -> tuple[Router, np.ndarray]:
    """The router, fitted on a sample of chunks, and the expert of every chunk."""
    config, workdir, data = this.config, this.workdir, this.train
    if not workdir.router.exists():
        console.print(f"cluster: {data.n_chunks} chunks into {config.experts}")
        rng = np.random.default_rng(randomness.integer(config.random_seed, "cluster sample"))
        count = min(config.cluster.sample_chunks, data.n_chunks)
        sample = np.sort(rng.choice(data.n_chunks, count, replace=False))
        Router.fit(
            [data.chunk(i) for i in sample],
            config.experts,
            seed=randomness.integer(config.random_seed, "cluster"),
            max_features=config.cluster.max_features,
            min_df=config.cluster.min_df,
            n_components=config.cluster.components,
        ).save(workdir.router)
    router = Router.load(workdir.router)
    if not workdir.assignment.exists():
        blocks = np.array_split(np.arange(data.n_chunks), -(-data.n_chunks // 4096))
        assignment = np.concatenate([router.assign([data.chunk(i) for i in b]) for b in blocks])
        temporary = workdir.assignment.with_suffix(".tmp.npy")
        with naming_the_disk(workdir.assignment):
            np.save(temporary, assignment)
            temporary.replace(workdir.assignment)
    return router, np.load(workdir.assignment, allow_pickle=False)


def _train_experts(
    this: _Run, seed: model.Params, router: Router, assignment: np.ndarray
) -> tuple[list[model.Params], list[np.ndarray]]:
    """Branch, each expert a copy of the seed, and train each alone on its shard.

    Returns the experts and their validation windows.
    """
    trainees = []
    for i in range(this.config.experts):
        chunks, directory = np.flatnonzero(assignment == i), this.workdir.expert(i)
        trainees.append(_trainee(this, this.config.expert, "expert", i, directory, seed, chunks))
    states = _train(this, "experts", trainees, this.config.expert, router)
    return [s.params for s in states], [t.validation for t in trainees]


def _trainee(
    this: _Run,
    stage: Stage,
    kind: str,
    index: int,
    directory: Path,
    params: model.Params,
    chunks: np.ndarray,
) -> training.Trainee:
    """An expert, with the part of the corpus and the random streams that are its own."""
    seed = this.config.random_seed
    try:
        train, validation = pipeline.split_shard(
            chunks,
            this.config.cluster.validation_share,
            randomness.integer(seed, f"{kind} split", index),
        )
    except SomaError as error:
        raise SomaError(f"{kind} {index}: {error}") from error
    length = stage.window + 1
    return training.Trainee(
        directory=directory,
        start=expert.init_state(params, stage),
        stream=pipeline.shard_windows(
            this.train,
            train,
            length=length,
            batch=stage.windows_per_update,
            seed=randomness.integer(seed, f"{kind} windows", index),
        ),
        validation=pipeline.validation_windows(
            this.train, validation, length=length, count=stage.validation_windows
        ),
        key=randomness.key(seed, f"{kind} probes", index),
    )


def _train(
    this: _Run,
    name: str,
    trainees: list[training.Trainee],
    stage: Stage,
    router: Router | None,
) -> list[expert.ExpertState]:
    """Trains a stage, and follows the validation loss of the (routed) ensemble in curve.jsonl."""
    scored = summary.test_windows(this.valid, this.config)
    path = this.workdir.curve

    def observe(update: int, experts: list[model.Params]) -> None:
        loss = evaluate.score(experts, router, scored, this.config.active)
        record = {"stage": name, "update": update, "nats_per_byte": loss.nats(loss.sums.shape[1])}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        # A run that was killed after this line and before its checkpoint comes here once more.
        kept = [
            line
            for line in lines
            if (old := json.loads(line))["stage"] != name or old["update"] < update
        ]
        write_text(path, "".join(f"{line}\n" for line in [*kept, json.dumps(record)]))

    return training.train(
        name,
        trainees,
        stage,
        this.config.run,
        this.interruptions,
        observe=observe,
        observe_every=-(-stage.updates // _OBSERVATIONS),
    )


@contextmanager
def _timed(workdir: Workdir, stage: str) -> Iterator[None]:
    """Adds the seconds spent inside to the stage's, over all the runs it takes."""
    start = time.monotonic()
    try:
        yield
    finally:
        stages = read_json(workdir.stages) if workdir.stages.exists() else {}
        spent = stages.get(stage, 0.0) + time.monotonic() - start
        write_json(workdir.stages, stages | {stage: round(spent, 3)})
