"""Scores a text with a trained ensemble: `python launch/evaluate.py --workdir=runs/soma_n4`.

Without --data, the run's own test text is scored by the test protocol: one window of 1,025 bytes in
each document that holds one. With --data, every byte of a document after its first 257 is scored
once. Each window is routed on its first 256 bytes. The newest whole checkpoints are used, also of a
run that is not finished or still going on: the workdir is only read. --checkpoint names a shipped
checkpoint, or the directory of a released one, in place of a workdir.

--cold_start also scores the first 256 bytes of each window, by the rule that chooses its experts
before those bytes are there.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.progress import track

from soma_jax import cli, evaluate, pretrained
from soma_jax.data import corpus, windows
from soma_jax.errors import SomaError
from soma_jax.stats import paired_bootstrap

_ENSEMBLE = cli.define_ensemble()
_DATA = flags.DEFINE_string(
    "data", None, "a file, a folder, a glob or packaged data [the run's test text]"
)
_TEXT_FIELD = flags.DEFINE_string("text_field", "text", "of .jsonl and .parquet files of --data")
_ACTIVE = flags.DEFINE_integer(
    "active", None, "k, the experts that score a window [as configured]", lower_bound=1
)
_COLD_START = flags.DEFINE_bool("cold_start", False, "also score each window's first 256 bytes")
_JSON = flags.DEFINE_bool("json", False, "print one line of JSON")

_GROUP = 1024 * windows.STRIDE  # bytes of text scored at once: memory does not grow with the corpus


def main() -> None:
    cli.use_host_devices(0)
    ens = pretrained.load(_ENSEMBLE())
    active = min(_ACTIVE.value or ens.active, len(ens.experts))

    left_out: Counter[str] = Counter()  # documents, by why
    if _DATA.value is None:
        drawn, left_out["not drawn"] = ens.test_windows()
        groups: Iterable[windows.Windows] = [drawn]
    else:
        groups = _all_windows(_pieces(_DATA.value, _TEXT_FIELD.value, left_out))
    cold: list[tuple[int, dict[str, float]]] = []

    def scored() -> Iterator[tuple[windows.Windows, evaluate.Scores]]:
        for group in groups:
            yield group, ens.score_windows(group, active)
            full = group.lengths >= windows.CONTEXT
            if _COLD_START.value and full.any():
                some = windows.Windows(group.ids[full], group.lengths[full], group.document[full])
                losses = evaluate.cold_start(ens.experts, ens.router, some, active)
                cold.append((len(some), losses))

    sums, counts, first = _totals(scored(), len(ens.experts))
    if not len(counts):
        raise SomaError(
            f"{_DATA.value}: none of the {left_out.total()} documents holds {windows.CONTEXT + 2} "
            "bytes, the fewest that can be scored: give longer documents"
        )
    evaluation = ens.config.evaluation
    nats = np.array(paired_bootstrap(sums, counts, evaluation.bootstrap, evaluation.seed))
    bits = nats / np.log(2)
    result = {
        "workdir": str(ens.path),
        "experts": ens.numbers,
        "updates": ens.updates(),
        "active": active,
        "data": _DATA.value or ens.config.data.test,
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
    if cold:
        total = sum(count for count, _ in cold)
        result["cold_start_nats_per_byte"] = {
            rule: sum(count * losses[rule] for count, losses in cold) / total for rule in cold[0][1]
        }
    print(json.dumps(result, allow_nan=False) if _JSON.value else _text(result))


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
            *(
                f"bytes 0..255 {rule}: {loss:.4f} nats/byte"
                for rule, loss in result.get("cold_start_nats_per_byte", {}).items()
            ),
        ]
    )


if __name__ == "__main__":
    cli.run(main)
