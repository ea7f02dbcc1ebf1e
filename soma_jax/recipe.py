"""The recipe, stage by stage (paper, section 3): seed, cluster, branch, train, route and score.

Each stage leaves its result in the workdir, complete or absent, and is skipped when it is there: the
same command goes on wherever a run was stopped.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from soma_jax import baselines, evaluate, expert, model, randomness, training
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Config, Stage
from soma_jax.data import corpus, store, windows
from soma_jax.data.pipeline import place, shard_windows
from soma_jax.errors import SomaError
from soma_jax.files import naming_the_disk, read_json, write_json, write_text
from soma_jax.interrupt import Interruptions
from soma_jax.progress import console
from soma_jax.routing.router import Router
from soma_jax.stats import paired_bootstrap
from soma_jax.workdir import Workdir

_OBSERVATIONS = 10  # looks at the ensemble's validation loss in a stage


def run(config: Config, workdir: Workdir) -> dict[str, Any]:
    """Runs, or goes on with, the whole recipe and returns the summary (`report/summary.json`).

    Raises:
      SomaError: bad input, a changed config or corpus, a stopped expert, a full disk.
      Interrupted: on SIGTERM or Ctrl-C, after saving.
    """
    with workdir.lock(), Interruptions() as interruptions:
        workdir.adopt(config)
        corpora = _read_corpora(config, workdir)
        if workdir.summary.exists():
            console.print(f"{workdir.path}: finished; nothing to do")
            return read_json(workdir.summary)
        stages = _Stages(workdir.stages)
        with stages.timed("seed"):
            seed = _train_seed(config, workdir, corpora, interruptions)
        with stages.timed("cluster"):
            router, assignment = _cluster(config, workdir, corpora["train"])
        with stages.timed("experts"):
            experts = _train_experts(
                config, workdir, corpora, seed, router, assignment, interruptions
            )
        with stages.timed("evaluate"):
            results = _evaluate(config, corpora, seed, experts, router, assignment)
        summary = results | _compute(config) | {"seconds": stages.seconds, "stages": stages.read()}
        write_json(workdir.summary, summary)
        return summary


def load(path: Path) -> tuple[Config, list[model.Params], Router]:
    """The newest experts of a workdir and its router.

    Raises:
      SomaError: there is no workdir, router or whole checkpoint.
    """
    workdir = Workdir(path)
    config = workdir.read_config()
    experts = [_newest(workdir.expert(i), config, config.expert) for i in range(config.experts)]
    return config, experts, Router.load(workdir.router)


def _newest(directory: Path, config: Config, stage: Stage) -> model.Params:
    like = jax.eval_shape(
        lambda: expert.init_state(model.init(jax.random.key(0), config.expert_shape), stage)
    )
    found = Checkpoints(directory / "checkpoints").newest(like)
    if found is None:
        raise SomaError(f"{directory} holds no checkpoint: train it first with launch/main.py")
    return found[1].params


def _read_corpora(config: Config, workdir: Workdir) -> dict[str, store.Store]:
    """Opens the chunk stores of the run, or builds them; what is wrong with a corpus shows here."""
    result = {}
    for split in ("train", "valid", "test"):
        spec, directory = getattr(config.data, split), workdir.store(split)
        if directory.exists():
            result[split] = store.open_store(directory)
            store.check_sources(result[split], spec)
        else:
            directory.parent.mkdir(exist_ok=True)
            result[split] = store.build_store(
                spec, directory, config.data.text_field, config.data.chunk_bytes
            )
    needed = max(config.seed.window, config.expert.window) + 1
    if result["train"].n_bytes < needed:
        raise SomaError(
            f"{config.data.train} holds {result['train'].n_bytes} bytes, less than one window of {needed}"
        )
    for split in ("valid", "test"):
        _test_windows(result[split], config)
    return result


def _documents(some: store.Store) -> Iterator[bytes]:
    return (some.document(i) for i in range(some.n_documents))


def _test_windows(some: store.Store, config: Config) -> windows.Windows:
    try:
        return windows.one_per_document(
            list(_documents(some)), count=config.evaluation.documents, seed=config.random_seed
        )
    except SomaError as error:
        raise SomaError(f"{some.directory.name} corpus: {error}") from error


def _split(
    config: Config, stream: str, index: int, chunks: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A shard's chunks, split into training and validation (99/1)."""
    if len(chunks) < 2:
        raise SomaError(
            f"{stream} {index} has {len(chunks)} chunk(s), and needs one to train on and one to validate: "
            "use fewer experts or a larger corpus"
        )
    order = np.random.default_rng(randomness.integer(config.random_seed, f"split {stream}", index))
    shuffled = order.permutation(chunks)
    count = max(1, round(config.cluster.validation_share * len(chunks)))
    return shuffled[count:], shuffled[:count]


def _trainee(
    config: Config,
    stage: Stage,
    stream: str,
    index: int,
    directory: Path,
    params: model.Params,
    data: store.Store,
    chunks: np.ndarray,
) -> training.Trainee:
    train, validation = _split(config, stream, index, chunks)
    return training.Trainee(
        directory=directory,
        start=expert.init_state(params, stage),
        stream=shard_windows(
            data,
            train,
            length=stage.window + 1,
            batch=stage.windows_per_update,
            seed=randomness.integer(config.random_seed, f"windows {stream}", index),
        ),
        validation=_validation_windows(data, validation, stage),
        key=randomness.key(config.random_seed, f"probes {stream}", index),
    )


def _validation_windows(data: store.Store, chunks: np.ndarray, stage: Stage) -> np.ndarray:
    """Windows that tile the validation chunks, uint8 [validation_windows, T + 1].

    Repeated from the first where there are fewer, so that the count does not depend on the shard.
    """
    starts = np.concatenate(
        [
            data.chunks[c] + np.arange(0, data.chunk_sizes(np.array([c]))[0], stage.window)
            for c in chunks
        ]
    )
    starts = np.resize(starts, stage.validation_windows)
    length = stage.window + 1
    return data.windows(place(starts, data, length), length)


def _train_seed(
    config: Config, workdir: Workdir, corpora: dict[str, store.Store], interruptions: Interruptions
) -> model.Params:
    data = corpora["train"]
    params = model.init(randomness.key(config.random_seed, "init"), config.expert_shape)
    trainee = _trainee(
        config, config.seed, "seed", 0, workdir.seed, params, data, np.arange(data.n_chunks)
    )
    observe = _curve(config, workdir, corpora["valid"], "seed", None)
    every = -(-config.seed.updates // _OBSERVATIONS)
    (state,) = training.train(
        "seed",
        [trainee],
        config.seed,
        config.run,
        interruptions,
        observe=observe,
        observe_every=every,
    )
    return state.params


def _cluster(config: Config, workdir: Workdir, data: store.Store) -> tuple[Router, np.ndarray]:
    """The router, fitted on a sample of chunks, and the expert of every chunk."""
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
    config: Config,
    workdir: Workdir,
    corpora: dict[str, store.Store],
    seed: model.Params,
    router: Router,
    assignment: np.ndarray,
    interruptions: Interruptions,
) -> list[model.Params]:
    """Branch, each expert a copy of the seed, and train each alone on its shard."""
    trainees = [
        _trainee(
            config,
            config.expert,
            "expert",
            i,
            workdir.expert(i),
            seed,
            corpora["train"],
            np.flatnonzero(assignment == i),
        )
        for i in range(config.experts)
    ]
    observe = _curve(config, workdir, corpora["valid"], "experts", router)
    every = -(-config.expert.updates // _OBSERVATIONS)
    states = training.train(
        "experts",
        trainees,
        config.expert,
        config.run,
        interruptions,
        observe=observe,
        observe_every=every,
    )
    return [s.params for s in states]


def _curve(
    config: Config, workdir: Workdir, data: store.Store, stage: str, router: Router | None
) -> Callable[[int, list[model.Params]], None]:
    """Appends the validation loss of the seed, or of the routed ensemble, to curve.jsonl."""
    scored = _test_windows(data, config)

    def observe(update: int, experts: list[model.Params]) -> None:
        loss = evaluate.score(experts, router, scored, config.active)
        lines = workdir.curve.read_text().splitlines() if workdir.curve.exists() else []
        # A run that was killed after this line and before its checkpoint comes here again.
        kept = [line for line in lines if not _is_at(json.loads(line), stage, update)]
        record = {"stage": stage, "update": update, "nats_per_byte": loss.nats(loss.sums.shape[1])}
        write_text(workdir.curve, "".join(f"{line}\n" for line in [*kept, json.dumps(record)]))

    return observe


def _is_at(record: dict[str, Any], stage: str, update: int) -> bool:
    return record["stage"] == stage and record["update"] >= update


def _evaluate(
    config: Config,
    corpora: dict[str, store.Store],
    seed: model.Params,
    experts: list[model.Params],
    router: Router,
    assignment: np.ndarray,
) -> dict[str, Any]:
    console.print("evaluate: scoring the test texts")
    data = corpora["train"]
    test = _test_windows(corpora["test"], config)
    copies = windows.screen(_documents(data), list(_documents(corpora["test"])))
    if copies:
        logging.warning("%d test documents are also training documents", len(copies))
    result: dict[str, Any] = {"test": _score_text(config, data, seed, experts, router, test)}
    result["test"]["documents_also_in_training"] = len(copies)
    if config.evaluation.wikitext:
        (path,) = corpus.list_files("wikitext103:test")
        (document,) = corpus.read_documents(str(path))
        segments = windows.wikitext_segments(document.read())
        scored = windows.strided(segments, drop_incomplete=True)
        result["wikitext103_test"] = _score_text(config, data, seed, experts, router, scored)

    terms = router.top_terms(10)
    result["experts"] = []
    for i, params in enumerate(experts):
        chunks = np.flatnonzero(assignment == i)
        held_out = _validation_windows(data, _split(config, "expert", i, chunks)[1], config.expert)
        losses = {
            name: float(np.mean(model.sequence_losses(p, held_out)))
            for name, p in (("seed", seed), ("expert", params))
        }
        result["experts"].append(
            {
                "chunks": len(chunks),
                "bytes": int(data.chunk_sizes(chunks).sum()),
                "top_terms": terms[i],
                "own_shard": losses,
            }
        )
    return result


def _score_text(
    config: Config,
    train: store.Store,
    seed: model.Params,
    experts: list[model.Params],
    router: Router,
    scored: windows.Windows,
) -> dict[str, Any]:
    """Nats/byte of everything that is compared, on the same bytes of one text."""
    active = min(config.active, len(experts))
    # Loss by k wants every expert; with many of them, only as many as are active.
    most = len(experts) if len(experts) <= 8 else active
    ensemble = evaluate.score(experts, router, scored, most)
    alone = evaluate.score([seed], None, scored, 1)
    documents = np.unique(scored.document, return_inverse=True)[1]

    def by_document(values: np.ndarray) -> np.ndarray:
        return np.bincount(documents, values)

    sums = np.stack([by_document(ensemble.sums[:, active - 1]), by_document(alone.sums[:, 0])], 1)
    interval = paired_bootstrap(
        np.column_stack([sums, sums[:, 0] - sums[:, 1]]),
        by_document(ensemble.counts),
        config.evaluation.bootstrap,
        config.random_seed,
    )
    compressed = baselines.compressor_nats(scored)
    return {
        "scored_bytes": int(ensemble.counts.sum()),
        "windows": len(scored),
        "ensemble": float(interval.mean[0]),
        "seed": float(interval.mean[1]),
        "interval": {
            name: [float(interval.low[i]), float(interval.high[i])]
            for i, name in enumerate(("ensemble", "seed", "ensemble_minus_seed"))
        },
        "by_k": [ensemble.nats(k) for k in range(1, most + 1)],
        "routed_first": np.bincount(ensemble.routes[:, 0], minlength=len(experts)).tolist(),
        **baselines.ngram_nats(_documents(train), scored),
        **{name.replace(" -", "_"): value for name, value in compressed.items()},
    }


def _compute(config: Config) -> dict[str, Any]:
    """What training cost, counted."""
    parts = {
        "seed": config.seed.updates * config.seed.byte_forwards_per_update,
        "experts": config.experts * config.expert.updates * config.expert.byte_forwards_per_update,
    }
    total = sum(parts.values())
    return {
        "byte_forwards": total,
        "byte_forwards_by_stage": parts,
        "operations": total * config.expert_shape.operations_per_byte,
        "parameters": config.experts * config.expert_shape.body_parameters
        + config.expert_shape.head_parameters
        * (config.experts if config.expert.head_sequences else 1),
        "devices": len(jax.devices()),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "config": dataclasses.asdict(config),
    }


class _Stages:
    """Seconds spent in each stage, over all the runs it took."""

    def __init__(self, path: Path):
        self._path = path

    def read(self) -> dict[str, float]:
        return read_json(self._path) if self._path.exists() else {}

    @property
    def seconds(self) -> float:
        return round(sum(self.read().values()), 3)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            done = self.read()
            spent = done.get(name, 0.0) + time.monotonic() - start
            write_json(self._path, done | {name: round(spent, 3)})
