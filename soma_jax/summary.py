"""How good the ensemble is and what it cost: the figures of `report/summary.json`."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from soma_jax import baselines, evaluate, model
from soma_jax.config import Config, Evaluation
from soma_jax.data import corpus, windows
from soma_jax.data.store import Store
from soma_jax.routing.router import Router
from soma_jax.stats import paired_bootstrap

_ALL_K = 8  # up to this many experts, each k is scored; else only up to the configured one


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a finished recipe has made."""

    config: Config
    seed: model.Params
    experts: Sequence[model.Params]
    router: Router
    shards: Sequence[np.ndarray]  # the training chunks of each expert
    validation: Sequence[np.ndarray]  # each expert's own validation windows, uint8 [W, T + 1]


def scores(
    trained: Trained,
    train: Store,
    valid: windows.Windows,
    test: windows.Windows,
    screened: Sequence[int],
) -> dict[str, Any]:
    """Losses on the test texts and on each expert's own shard, in nats/byte.

    Args:
      trained: the models.
      train: the training corpus, for the n-grams.
      valid: of the validation corpus, by which settings are chosen.
      test: of the test corpus, without what was screened out.
      screened: the test documents that are also training documents.
    """
    trigram = baselines.NGram.fit(train.documents())
    active = min(trained.config.active, len(trained.experts))
    result: dict[str, Any] = {
        "valid": evaluate.score(trained.experts, trained.router, valid, active).nats(active),
        "test": _text(trained, trigram, test),
    }
    result["test"]["documents_also_in_training"] = len(screened)
    if trained.config.evaluation.wikitext:
        result["wikitext103_test"] = _text(trained, trigram, wikitext_windows())
    result["experts"] = _shards(trained, train)
    return result


def drawn_windows(
    some: Store, evaluation: Evaluation, screened: Sequence[int] = ()
) -> windows.Windows:
    """One window in each of up to `evaluation.documents` documents (paper, section 4).

    Documents of the numbers in `screened` are left out.
    """
    return windows_of(some.documents(), evaluation, screened)


def windows_of(
    documents: Iterable[windows.Text], evaluation: Evaluation, screened: Sequence[int]
) -> windows.Windows:
    """`drawn_windows` of documents that are no store."""
    left_out = set(screened)
    kept = [d for i, d in enumerate(documents) if i not in left_out]
    return windows.one_per_document(kept, count=evaluation.documents, seed=evaluation.seed)


def wikitext_windows() -> windows.Windows:
    """Those of the packaged WikiText-103 test text (paper, section 4)."""
    (document,) = corpus.read_documents("wikitext103:test")
    return windows.strided(windows.wikitext_segments(document.read()), drop_incomplete=True)


def _text(trained: Trained, trigram: baselines.NGram, scored: windows.Windows) -> dict[str, Any]:
    """Everything that is compared, on the same bytes of one text."""
    config, experts = trained.config, trained.experts
    active = min(config.active, len(experts))
    most = len(experts) if len(experts) <= _ALL_K else active
    ensemble = evaluate.score(experts, trained.router, scored, most)
    seed = evaluate.score([trained.seed], None, scored, 1)

    row = np.unique(scored.document, return_inverse=True)[1]
    sums = [np.bincount(row, s) for s in (ensemble.sums[:, active - 1], seed.sums[:, 0])]
    interval = paired_bootstrap(
        np.column_stack([*sums, sums[0] - sums[1]]),
        np.bincount(row, ensemble.counts),
        config.evaluation.bootstrap,
        config.evaluation.seed,
    )
    compressed = baselines.compressor_nats(scored)
    return {
        "scored_bytes": int(ensemble.counts.sum()),
        "windows": len(scored),
        "ensemble": float(interval.mean[0]),
        "seed": float(interval.mean[1]),
        "bits": {
            "ensemble": float(interval.mean[0] / np.log(2)),
            "seed": float(interval.mean[1] / np.log(2)),
        },
        "interval": {
            name: [float(interval.low[i]), float(interval.high[i])]
            for i, name in enumerate(("ensemble", "seed", "ensemble_minus_seed"))
        },
        "by_k": [ensemble.nats(k) for k in range(1, most + 1)],
        "routed_first": np.bincount(ensemble.routes[:, 0], minlength=len(experts)).tolist(),
        **baselines.ngram_nats(trigram, scored),
        **{name.replace(" -", "_"): value for name, value in compressed.items()},
    }


def _shards(trained: Trained, train: Store) -> list[dict[str, Any]]:
    """For each expert, what its shard holds and how it and the seed do on its validation part."""
    losses = jax.jit(lambda params, some: model.sequence_losses(params, some).mean())
    terms = trained.router.top_terms(10)
    result = []
    for index, (expert, held_out, chunks) in enumerate(
        zip(trained.experts, trained.validation, trained.shards, strict=True)
    ):
        result.append(
            {
                "chunks": len(chunks),
                "bytes": int(train.chunk_sizes(chunks).sum()),
                "top_terms": terms[index],
                "own_shard": {
                    "seed": float(losses(trained.seed, jnp.asarray(held_out))),
                    "expert": float(losses(expert, jnp.asarray(held_out))),
                },
            }
        )
    return result


def compute(config: Config, seconds: Mapping[str, float]) -> dict[str, Any]:
    """What training took, counted from the config, and the memory of this process.

    Args:
      config: of the run.
      seconds: that each stage took.
    """
    experts, shape = config.experts, config.expert_shape
    parts = {
        "seed": config.seed.updates * config.seed.byte_forwards_per_update,
        "experts": experts * config.expert.updates * config.expert.byte_forwards_per_update,
    }
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    frozen = not config.expert.head_sequences and config.expert.parameters == "body"
    heads = 1 if frozen and config.warm_start else experts  # frozen, the seed's E is shared
    return {
        "byte_forwards": sum(parts.values()),
        "byte_forwards_by_stage": parts,
        "operations": sum(parts.values()) * shape.operations_per_byte,
        "parameters": experts * shape.body_parameters + heads * shape.head_parameters,
        "devices": len(jax.devices()),
        "device": jax.devices()[0].device_kind,
        "versions": {
            name: metadata.version(name) for name in ("soma_jax", "jax", "jaxlib", "optax")
        },
        "device_hours": (seconds["seed"] + seconds["experts"]) * len(jax.devices()) / 3600,
        "seconds": round(sum(seconds.values()), 3),
        "stages": dict(seconds),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "config": dataclasses.asdict(config),
    }
