"""Scores a text with the experts of a workdir: `python launch/evaluate.py --workdir=runs/soma_n4`.

Without --data, the run's own test text is scored by the test protocol: one window of 1,025 bytes in
each document that holds one. With --data, every byte of a document after its first 257 is scored
once. Each window is routed on its first 256 bytes. The newest whole checkpoints are used, also of a
run that is not finished or still going on: the workdir is only read.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.progress import track

from soma_jax import cli, evaluate, recipe, summary
from soma_jax.config import Config
from soma_jax.data import corpus, store, windows
from soma_jax.errors import SomaError
from soma_jax.files import read_json
from soma_jax.stats import paired_bootstrap
from soma_jax.workdir import Workdir

_WORKDIR = flags.DEFINE_string("workdir", None, "the run to evaluate", required=True)
_DATA = flags.DEFINE_string(
    "data", None, "a file, a folder, a glob or packaged data [the run's test text]"
)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "of .jsonl and .parquet files of --data")
_ACTIVE = flags.DEFINE_integer(
    "active", None, "k, the experts that score a window [as configured]", lower_bound=1
)
_JSON = flags.DEFINE_bool("json", False, "print one line of JSON")

_GROUP = 1024 * windows.STRIDE  # bytes of text scored at once: memory does not grow with the corpus


def main() -> None:
    cli.use_host_devices(0)
    workdir = Workdir(Path(_WORKDIR.value))
    config, experts, router = recipe.load(workdir.path)
    params = [state.params for state in experts]
    active = min(_ACTIVE.value or config.active, len(experts))

    left_out: Counter[str] = Counter()  # documents, by why
    if _DATA.value is None:
        groups = _test_windows(workdir, config, left_out)
    else:
        groups = _all_windows(_pieces(_DATA.value, _TEXT_FIELD.value, left_out))
    scores = ((group, evaluate.score(params, router, group, active)) for group in groups)
    sums, counts, first = _totals(scores, len(experts))
    if not len(counts):
        raise SomaError(
            f"{_DATA.value}: none of the {left_out.total()} documents holds {windows.CONTEXT + 2} "
            "bytes, the fewest that can be scored: give longer documents"
        )
    nats = np.array(
        paired_bootstrap(sums, counts, config.evaluation.bootstrap, config.evaluation.seed)
    )
    bits = nats / np.log(2)
    result = {
        "workdir": str(workdir.path),
        "experts": recipe.present(workdir, config),
        "updates": [int(state.update) for state in experts],
        "active": active,
        "data": _DATA.value or config.data.test,
        "documents": len(counts),
        "documents_left_out": left_out.total(),
        "windows": int(first.sum()),
        "scored_bytes": int(counts.sum()),
        "nats_per_byte": nats[0],
        "nats_per_byte_interval": nats[1:].tolist(),
        "bits_per_byte": bits[0],
        "bits_per_byte_interval": bits[1:].tolist(),
        "routed_first": (first / first.sum()).tolist(),
    }
    print(json.dumps(result, allow_nan=False) if _JSON.value else _text(result))


def _test_windows(
    workdir: Workdir, config: Config, left_out: Counter[str]
) -> Iterator[windows.Windows]:
    """The run's test text by the test protocol, as one group."""
    test = store.open_store(workdir.store("test"))
    screened = read_json(workdir.screened) if workdir.screened.exists() else []
    drawn = summary.drawn_windows(test, config.evaluation, screened)
    left_out["not drawn"] = test.n_documents - len(drawn)
    yield drawn


def _pieces(data: str, text_field: str, left_out: Counter[str]) -> Iterator[tuple[int, bytes]]:
    """Documents by number, in pieces whose windows are those of the whole document."""
    for number, document in enumerate(corpus.read_documents(data, text_field, left_out)):
        length, rest = 0, b""
        for block in document.blocks:
            length += len(block)
            rest += block
            # What full windows cover goes out; the next window starts 257 bytes before its end.
            covered = windows.STRIDE * ((len(rest) - windows.CONTEXT - 1) // windows.STRIDE)
            if covered > 0:
                yield number, rest[: covered + windows.CONTEXT + 1]
                rest = rest[covered:]
        yield number, rest
        left_out["short"] += length < windows.CONTEXT + 2


def _all_windows(pieces: Iterable[tuple[int, bytes]]) -> Iterator[windows.Windows]:
    """The windows of numbered pieces, in groups of about _GROUP bytes."""

    def cut() -> windows.Windows:
        numbers, texts = zip(*group, strict=True)
        result = windows.strided(texts, drop_incomplete=False)
        return dataclasses.replace(result, document=np.array(numbers, np.int32)[result.document])

    group: list[tuple[int, bytes]] = []
    size = 0
    for number, text in pieces:
        group.append((number, text))
        size += max(len(text), windows.STRIDE)  # a short window takes as much room as a full one
        if size >= _GROUP:
            yield cut()
            group, size = [], 0
    if group:
        yield cut()


def _totals(
    scores: Iterable[tuple[windows.Windows, evaluate.Scores]], n_experts: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Nats and bytes scored [documents], and windows routed first to each expert [N]."""
    parts = [(np.zeros(0, np.int32), np.zeros(0), np.zeros(0))]
    first = np.zeros(n_experts, np.int64)
    console = Console(stderr=True)
    for group, some in track(
        scores, "scoring", console=console, transient=True, disable=not console.is_terminal
    ):
        parts.append(_by_document(group.document, some.sums[:, -1], some.counts))
        first += np.bincount(some.routes[:, 0], minlength=n_experts)
    # Once more, since a long document spans groups.
    _, sums, counts = _by_document(*(np.concatenate(part) for part in zip(*parts, strict=True)))
    return sums, counts, first


def _by_document(
    document: np.ndarray, sums: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The documents that occur, in order, and what each adds up to."""
    documents, row = np.unique(document, return_inverse=True)
    return documents, np.bincount(row, sums), np.bincount(row, counts)


def _text(result: dict[str, Any]) -> str:
    numbers, updates = (", ".join(map(str, result[name])) for name in ("experts", "updates"))
    routed = ", ".join(f"{share:.1%}" for share in result["routed_first"])
    losses = [
        f"{result[name]:.4f} {name.replace('_per_', '/')}  "
        "[{:.4f}, {:.4f}] (95% over documents)".format(*result[f"{name}_interval"])
        for name in ("nats_per_byte", "bits_per_byte")
    ]
    return "\n".join(
        [
            f"{result['workdir']}: experts {numbers} at updates {updates}; "
            f"{result['active']} score a window",
            f"{result['data']}: {result['scored_bytes']:,} bytes scored, in {result['windows']:,} "
            f"windows of {result['documents']:,} documents "
            f"({result['documents_left_out']:,} more left out)",
            *losses,
            f"routed first to each expert: {routed}",
        ]
    )


if __name__ == "__main__":
    cli.run(main)
