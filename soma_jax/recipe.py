"""The recipe, stage by stage (paper, section 3): cluster, seed, branch, train, route and score.

Each stage leaves its result in the workdir, complete or absent, and is skipped when it is there:
the same command goes on wherever a run was stopped. Experts are independent, so several jobs may
each train some of them in one workdir: one of the jobs makes what all of them need.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from soma_jax import distributed, evaluate, expert, model, randomness, report, summary, training
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Config, Data, Stage
from soma_jax.data import store, windows
from soma_jax.errors import SomaError
from soma_jax.files import naming_the_disk, read_json, write_bytes, write_json, write_text
from soma_jax.interrupt import Interruptions
from soma_jax.progress import activity, console
from soma_jax.routing.router import Router
from soma_jax.workdir import STAGES, Workdir

_OBSERVATIONS = 10  # looks at the ensemble's validation loss in a stage


@dataclasses.dataclass(frozen=True)
class _Run:
    """What every stage needs."""

    config: Config
    workdir: Workdir
    interruptions: Interruptions
    screened: list[int]  # test documents that are also training documents
    train: store.Store
    valid: store.Store
    test: store.Store


def run(config: Config, workdir: Workdir, *, show: bool = True) -> dict[str, Any]:
    """Runs, or goes on with, the whole recipe and returns the summary (`report/summary.json`).

    A job that trains only some experts (`config.run.only`) ends when these are trained; the job
    that finds all of them trained scores the ensemble.

    Args:
      config: of the run.
      workdir: of the run.
      show: also print the table of losses, and write the report's page and figures.

    Returns:
      The summary; empty while experts are still to be trained by other jobs.

    Raises:
      SomaError: bad input, a changed config or corpus, a stopped expert, a full disk.
      Interrupted: on SIGTERM or Ctrl-C, after saving.
    """
    experts = config.chosen if config.run.only else None
    with workdir.lock(experts), Interruptions() as interruptions:
        with workdir.alone():
            with distributed.in_turn():
                this = _open(config, workdir, interruptions)
            if finished := workdir.summary.exists():
                console.print(f"{workdir.path}: finished; nothing to do")
            else:
                # The clusters need no seed: what is wrong with them shows before days of training.
                with distributed.in_turn(), _timed(workdir, "cluster"):
                    router, shards = _cluster(this)
                with _timed(workdir, "seed"):
                    seed = _train_seed(this)
        if not finished:
            trainees = _branch(this, seed, shards)
            with _timed(workdir, "experts"):
                _train_experts(this, trainees, router)
            with workdir.alone():
                if distributed.leads():
                    _score(this, seed, router, shards, trainees)
                distributed.wait()
        if not workdir.summary.exists():
            return {}
        if show and distributed.leads():
            report.show(workdir)
        return read_json(workdir.summary)


def _open(config: Config, workdir: Workdir, interruptions: Interruptions) -> _Run:
    """The run, with its corpora, once it is known that it is this config's."""
    workdir.check(config)
    corpora = _open_corpora(config, workdir)
    workdir.adopt(config, {split: corpus.fingerprint for split, corpus in corpora.items()})
    return _Run(config, workdir, interruptions, read_json(workdir.screened), **corpora)


def load(path: Path) -> tuple[Config, list[expert.ExpertState], Router]:
    """The newest whole state of each expert of a workdir, and its router; writes and locks nothing.

    Experts without a checkpoint, which other jobs have still to train, are named in a warning; the
    router then sends a text to those that are there, whose numbers `present` gives.

    Raises:
      SomaError: there is no workdir, no router, no expert, or no whole checkpoint of one.
    """
    workdir = Workdir(path)
    config = workdir.read_config()
    experts = [newest_state(workdir.expert(i), config) for i in present(workdir, config)]
    return config, experts, load_router(workdir, config)


def newest_state(directory: Path, config: Config) -> expert.ExpertState:
    """The newest whole state of an expert of a workdir.

    Raises:
      SomaError: none is whole.
    """
    like = jax.eval_shape(
        lambda: expert.init_state(model.init(jax.random.key(0), config.expert_shape), config.expert)
    )
    found = Checkpoints(directory / "checkpoints").newest(like)
    if found is None:
        raise SomaError(f"{directory} holds no checkpoint: train it first with launch/main.py")
    return found[1]


def load_router(workdir: Workdir, config: Config) -> Router:
    """The router of a workdir among the experts that are `present`; others are named in a warning.

    Raises:
      SomaError: there is no router, or no expert.
    """
    there = present(workdir, config)
    if not there:
        raise SomaError(
            f"{workdir.path} holds no checkpoint of an expert: train it first with launch/main.py"
        )
    if absent := sorted(set(range(config.experts)) - set(there)):
        logging.warning(
            "%s: expert %s not trained yet; texts go to the other %d",
            workdir.path,
            ", ".join(map(str, absent)),
            len(there),
        )
    return Router.load(workdir.router).restricted(there)


def present(workdir: Workdir, config: Config) -> list[int]:
    """The experts of a workdir that have a checkpoint."""
    every = range(config.experts)
    return [i for i in every if Checkpoints(workdir.expert(i) / "checkpoints").steps()]


def _open_corpora(config: Config, workdir: Workdir) -> dict[str, store.Store]:
    """Opens the chunk stores of the run, or builds them; what is wrong with a corpus shows here."""
    result = {}
    for split in ("train", "valid", "test"):
        spec, directory = getattr(config.data, split), workdir.store(split)
        if directory.exists() and not workdir.config.exists():
            shutil.rmtree(directory)  # of a command that was stopped or refused, perhaps of others
        result[split] = open_corpus(config.data, spec, directory)
    if not workdir.config.exists():
        _check_corpora(config, workdir, **result)
    return result


def open_corpus(data: Data, spec: str, directory: Path) -> store.Store:
    """The chunk store of a corpus: built where it is not there yet, else checked against it.

    Raises:
      SomaError: a corpus that cannot be read, or that has changed since.
    """
    if directory.exists():
        opened = store.open_store(directory)
        store.check_sources(opened, spec)
        return opened
    with naming_the_disk(directory):
        directory.parent.mkdir(exist_ok=True)
    with activity(f"reading {spec}") as show:
        read = 0

        def progress(size: int) -> None:
            nonlocal read
            read += size
            show(f"reading {spec}: {read / 1e6:,.0f} MB")

        return store.build_store(spec, directory, data.text_field, data.chunk_bytes, progress)


def _check_corpora(
    config: Config, workdir: Workdir, train: store.Store, valid: store.Store, test: store.Store
) -> None:
    """Refuses corpora too small for the run; screens the test text against the training text."""
    needed = max(config.seed.window, config.expert.window) + 1
    if train.n_bytes < needed or train.n_chunks < 2 * config.experts:
        raise SomaError(
            f"config.data.train={config.data.train}: {train.n_bytes} bytes in {train.n_chunks} "
            f"chunks are too few for windows of {needed} bytes and two chunks for each of "
            f"{config.experts} experts"
        )
    with activity("screening the test text against the training text"):
        screened = windows.screen(train.documents(), test.documents())
    if screened:
        console.print(
            f"{len(screened)} of {test.n_documents} test documents are also training documents: "
            "they are not scored"
        )
    write_json(workdir.screened, screened)
    for name, some, left_out in (("valid", valid, []), ("test", test, screened)):
        try:
            summary.drawn_windows(some, config.evaluation, left_out)
        except SomaError as error:
            raise SomaError(f"config.data.{name}={getattr(config.data, name)}: {error}") from error


def _train_seed(this: _Run) -> model.Params:
    """One expert on the whole corpus; the others will be copies of it."""
    config = this.config
    params = model.init(randomness.key(config.random_seed, "init"), config.expert_shape)
    chunks = np.arange(this.train.n_chunks)
    trainee = _trainee(this, config.seed, "seed", 0, this.workdir.seed, params, chunks)
    (state,) = _train(this, "seed", [trainee], config.seed, None)
    return state.params


def _cluster(this: _Run) -> tuple[Router, list[np.ndarray]]:
    """The router, fitted on a sample of chunks, and the chunks of every expert."""
    config, workdir, data = this.config, this.workdir, this.train
    if not (workdir.router / "router.json").exists():
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
        assigned = [router.assign([data.chunk(i) for i in block]) for block in blocks]
        content = io.BytesIO()
        np.save(content, np.concatenate(assigned))
        write_bytes(workdir.assignment, content.getvalue())
    try:
        assignment = np.load(workdir.assignment, allow_pickle=False)
        sizes = np.bincount(assignment, minlength=config.experts)
    except (OSError, ValueError, TypeError) as error:
        raise SomaError(f"cannot read {workdir.assignment}: {error}. Delete it") from error
    if len(assignment) != data.n_chunks or len(sizes) != config.experts:
        raise SomaError(f"{workdir.assignment} is not of this corpus and router. Delete it")
    if sizes.min() < 2:
        raise SomaError(
            f"the shard of expert {sizes.argmin()} has {sizes.min()} chunks, and needs one to "
            "train on and one to validate: use fewer experts or a larger corpus"
        )
    return router, _shards(config, assignment)


def _shards(config: Config, assignment: np.ndarray) -> list[np.ndarray]:
    """The chunks of every expert: its cluster's, or a control's (paper, section 5: ablations)."""
    if config.cluster.shards == "iid":
        return [np.arange(len(assignment))] * config.experts
    if config.cluster.shards == "random":  # disjoint, and of the clusters' sizes
        seed = randomness.integer(config.random_seed, "random shards")
        assignment = np.random.default_rng(seed).permutation(assignment)
    return [np.flatnonzero(assignment == i) for i in range(config.experts)]


def _branch(this: _Run, seed: model.Params, shards: list[np.ndarray]) -> list[training.Trainee]:
    """Every expert as a copy of the seed (or drawn, in a cold start), with its shard."""
    config, trainees = this.config, []
    for i, chunks in enumerate(shards):
        start = seed
        if not config.warm_start:
            start = model.init(randomness.key(config.random_seed, "init", i), config.expert_shape)
        directory = this.workdir.expert(i)
        trainees.append(_trainee(this, config.expert, "expert", i, directory, start, chunks))
    return trainees


def _train_experts(this: _Run, trainees: list[training.Trainee], router: Router) -> None:
    """Trains this job's experts, each alone on its shard."""
    config = this.config
    mine = [trainees[i] for i in config.chosen]
    _train(this, "experts", mine, config.expert, router if len(mine) == len(trainees) else None)


def _score(
    this: _Run,
    seed: model.Params,
    router: Router,
    shards: list[np.ndarray],
    trainees: list[training.Trainee],
) -> None:
    """Routes and scores, and writes the summary, when all experts are trained."""
    config, workdir = this.config, this.workdir
    if absent := [
        str(i) for i, t in enumerate(trainees) if not training.finished(t, config.expert)
    ]:
        console.print(
            f"expert {', '.join(absent)} not trained yet: the job that finds all of them trained "
            "scores the ensemble"
        )
        return
    if workdir.summary.exists():  # another job, which was here before, has written it
        return
    with _timed(workdir, "evaluate"), activity("evaluate: scoring the test texts"):
        trained = summary.Trained(
            config,
            seed,
            [state.params for state in training.results(trainees, config.expert)],
            router,
            shards,
            [t.validation for t in trainees],
        )
        valid = summary.drawn_windows(this.valid, config.evaluation)
        test = summary.drawn_windows(this.test, config.evaluation, this.screened)
        scores = summary.scores(trained, this.train, valid, test, this.screened)
    write_json(workdir.summary, scores | summary.compute(config, read_json(workdir.stages)))


def _trainee(
    this: _Run,
    stage: Stage,
    kind: str,
    index: int,
    directory: Path,
    params: model.Params,
    chunks: np.ndarray,
) -> training.Trainee:
    return training.trainee(
        directory,
        params,
        stage,
        this.train,
        chunks,
        random_seed=this.config.random_seed,
        kind=kind,
        index=index,
        validation_share=this.config.cluster.validation_share,
    )


def _train(
    this: _Run,
    name: str,
    trainees: list[training.Trainee],
    stage: Stage,
    router: Router | None,
) -> list[expert.ExpertState]:
    """Trains a stage, and follows the validation loss of its (routed) ensemble in curve.jsonl."""
    scored = summary.drawn_windows(this.valid, this.config.evaluation)
    path = this.workdir.curve

    def observe(update: int, experts: list[model.Params]) -> None:
        if not distributed.leads():
            return
        loss = evaluate.score(experts, router, scored, this.config.active)
        record = {"stage": name, "update": update, "nats_per_byte": loss.nats(loss.sums.shape[1])}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        # A run that was killed after this line and before its checkpoint comes here once more.
        kept = [
            line
            for line in lines
            if (old := json.loads(line))["stage"] != name or old["update"] < update
        ]
        write_text(
            path, "".join(f"{line}\n" for line in [*kept, json.dumps(record, allow_nan=False)])
        )

    return training.train(
        name,
        trainees,
        stage,
        this.config.run,
        this.interruptions,
        observe=observe if name == "seed" or router is not None else None,
        observe_every=-(-stage.updates // _OBSERVATIONS),
    )


@contextmanager
def _timed(workdir: Workdir, stage: str) -> Iterator[None]:
    """Adds the seconds spent inside to the stage's, over all the runs and jobs it takes."""
    start = time.monotonic()
    try:
        yield
    finally:
        spent = time.monotonic() - start
        if distributed.leads():
            with workdir.alone(STAGES):
                stages = read_json(workdir.stages) if workdir.stages.exists() else {}
                spent += stages.get(stage, 0.0)
                write_json(workdir.stages, stages | {stage: round(spent, 3)})
