"""Times routed scoring of whole batches of requests against the number of experts.

python benchmarks/inference.py [--experts=1,2,8,256] [--requests=4096] [--json | --markdown]

A request is 1,024 bytes of the packaged training text: its first 256 route it to k = 4 experts, and
the 768 bytes after them are scored. Ensembles have about 8.44M parameters, drawn at random: N = 1,
2, 8 or 256 experts of width 509, 361, 181 or 32. Routers are fitted on that text. Prints scored
bytes per second with routing included, its share, the seconds of a batch and the peak memory; then
single experts without routing, beside torch.nn.LSTM (examples/torch_reader.py) on the same
requests. Every figure is a process's own, the median of its batches.
"""

import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from soma_jax import cli, inference, model, randomness
from soma_jax.data import corpus, windows
from soma_jax.errors import SomaError
from soma_jax.routing.router import Router

WIDTHS = {1: 509, 2: 361, 8: 181, 256: 32}  # by N, near 8.44M parameters
ALONE = 32  # requests of a single expert, as many as torch's products need to be fast

flags.DEFINE_list("experts", [str(n) for n in WIDTHS], "the N to time, of 1, 2, 8 and 256")
flags.DEFINE_integer("requests", 4096, "a batch at N = 256; 1/256 of it for each expert else", 64)
flags.DEFINE_integer("active", 4, "k, experts that score a request", 1)
flags.DEFINE_integer("batches", 3, "timed batches, after one that is not", 1)
flags.DEFINE_bool("json", False, "print one line of JSON")
flags.DEFINE_bool("markdown", False, "print tables for benchmarks/README.md")
flags.DEFINE_enum("turn", None, ["ensemble", "alone", "torch"], "time this alone; one line of JSON")
flags.mark_bool_flags_as_mutual_exclusive(["json", "markdown"])


def requests(count: int) -> tuple[np.ndarray, list[bytes]]:
    """Windows uint8 [count, 1025] and the text that routers are fitted on, in chunks."""
    texts = [document.read() for document in corpus.read_documents("embedded:train")]
    ids = windows.strided(texts, drop_incomplete=True).ids
    drawn = np.random.default_rng(0).permutation(len(ids))
    chunks = [text[i : i + 1024] for text in texts for i in range(0, len(text), 1024)]
    return ids[np.resize(drawn, count)], chunks


def experts(count: int) -> list[model.Params]:
    shape = model.ExpertConfig(width=WIDTHS[count])
    drawn = jax.jit(lambda i: model.init(jax.random.fold_in(randomness.key(0, "init"), i), shape))
    return [jax.tree.map(np.asarray, drawn(i)) for i in range(count)]


def timed(batch: Callable[[], float]) -> tuple[float, float]:
    """Median seconds of a batch, and of what it says to have spent on routing."""
    batch()
    times = []
    for _ in range(flags.FLAGS.batches):
        start = time.perf_counter()
        routing = batch()
        times.append((time.perf_counter() - start, routing))
    return statistics.median(t for t, _ in times), statistics.median(r for _, r in times)


def ensemble_turn(count: int) -> dict[str, Any]:
    cli.use_host_devices(0)
    size = max(2 * ALONE, flags.FLAGS.requests * count // 256)
    ids, chunks = requests(size)
    router, params = Router.fit(chunks, count, seed=0), experts(count)

    def batch() -> float:
        start = time.perf_counter()
        routes = router.route([request.tobytes() for request in ids], flags.FLAGS.active)
        routing = time.perf_counter() - start
        log_p = inference.log_probabilities(params, ids, routes, windows.CONTEXT)
        inference.mixture(log_p).sum(dtype=np.float64)
        return routing

    seconds, routing = timed(batch)
    return {
        "requests": size,
        "tokens_per_s": size * windows.STRIDE / seconds,
        "routing_share": routing / seconds,
        "seconds_per_batch": seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def alone_turn(count: int) -> dict[str, Any]:
    """One expert of the size that an ensemble of `count` has."""
    cli.use_host_devices(0)
    ids, _ = requests(ALONE)
    params, routes = experts(count)[:1], np.zeros((ALONE, 1), np.int32)

    def batch() -> float:
        inference.log_probabilities(params, ids, routes, windows.CONTEXT)
        return 0.0

    return {"tokens_per_s": ALONE * windows.STRIDE / timed(batch)[0]}


def torch_turn(count: int) -> dict[str, Any]:
    import torch

    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from torch_reader import Expert

    # What a process may use, and what torch finds by itself in a container, need not be the same.
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    ids = torch.from_numpy(requests(ALONE)[0].astype(np.int64))
    leaves = jax.tree_util.tree_leaves_with_path(experts(count)[0])
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")  # noqa: E731
    tensors = {name(path): torch.from_numpy(leaf.copy()) for path, leaf in leaves}
    expert = Expert(tensors, WIDTHS[count], model.ExpertConfig().blocks)

    @torch.no_grad()
    def batch() -> float:
        # As ours: every byte is read, and the loss of the last 768 is wanted.
        logits = expert(ids[:, :-1])[:, windows.CONTEXT :]
        targets = ids[:, windows.CONTEXT + 1 :]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return 0.0

    return {"tokens_per_s": ALONE * windows.STRIDE / timed(batch)[0]}


TURNS = {"ensemble": ensemble_turn, "alone": alone_turn, "torch": torch_turn}


def in_a_process(turn: str, count: int) -> dict[str, Any]:
    """A turn in a process of its own: no thread pool is in another's way, and memory is its own.

    Raises:
      SomaError: with what it wrote, when it fails.
    """
    given = [f"--{name}={flags.FLAGS[name].value}" for name in ("requests", "active", "batches")]
    line = [sys.executable, __file__, f"--turn={turn}", f"--experts={count}", *given]
    child = subprocess.run(line, capture_output=True, text=True)
    if child.returncode:
        raise SomaError(f"{shlex.join(line)} failed: {child.stderr.strip()}")
    return json.loads(child.stdout.splitlines()[-1])


def measure(counts: list[int], show: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, dict[int, dict[str, Any]]] = {turn: {} for turn in TURNS}
    for count in counts:
        for turn in TURNS:
            show(f"{turn}, N = {count}")
            found[turn][count] = in_a_process(turn, count)
    facts = ("tokens_per_s", "routing_share", "seconds_per_batch", "requests", "peak_rss_bytes")
    result: dict[str, Any] = {
        fact: {str(n): values[fact] for n, values in found["ensemble"].items()} for fact in facts
    }
    result["one_expert_tokens_per_s"] = {
        str(WIDTHS[n]): {
            "soma_jax": found["alone"][n]["tokens_per_s"],
            "torch": found["torch"][n]["tokens_per_s"],
        }
        for n in counts
    }
    rates = result["tokens_per_s"]
    if {"8", "256"} <= rates.keys():
        result["n256_to_n8"] = rates["256"] / rates["8"]
    return result


def tables(result: dict[str, Any]) -> list[list[tuple[str, ...]]]:
    """Ensembles, and single experts beside torch; a header first."""
    ensembles = [("N", "d", "tokens/s", "routing", "requests", "seconds a batch", "peak MiB")]
    for n, rate in result["tokens_per_s"].items():
        ensembles.append(
            (
                n,
                str(WIDTHS[int(n)]),
                f"{rate:,.0f}",
                f"{result['routing_share'][n]:.1%}",
                f"{result['requests'][n]:,}",
                f"{result['seconds_per_batch'][n]:.2f}",
                f"{result['peak_rss_bytes'][n] / 2**20:,.0f}",
            )
        )
    alone = [("d, one expert", "soma_jax, tokens/s", "torch.nn.LSTM, tokens/s", "ratio")]
    for width, rates in result["one_expert_tokens_per_s"].items():
        ours, peer = rates["soma_jax"], rates["torch"]
        alone.append((width, f"{ours:,.0f}", f"{peer:,.0f}", f"{ours / peer:.2f}"))
    return [ensembles, alone]


def conclusion(result: dict[str, Any]) -> str:
    if "n256_to_n8" not in result:
        return ""
    return f"N = 256 scores {result['n256_to_n8']:.1f} times as many tokens a second as N = 8."


def main() -> None:
    f = flags.FLAGS
    if unknown := sorted(set(f.experts) - {str(n) for n in WIDTHS}):
        raise SomaError(f"--experts={unknown[0]}: N is one of {', '.join(map(str, WIDTHS))}")
    counts = [int(n) for n in f.experts]
    if f.turn:
        print(json.dumps(TURNS[f.turn](counts[0])))
        return
    with Console(stderr=True).status("") as status:
        result = measure(counts, status.update)
    line = shlex.join(["python", "benchmarks/inference.py", *sys.argv[1:]])
    if f.json:
        print(json.dumps(result | {"command": line, "jax": jax.__version__}))
    elif f.markdown:
        for rows in tables(result):
            lines = [rows[0], ("---:",) * len(rows[0]), *rows[1:]]
            print(*("| " + " | ".join(row) + " |" for row in lines), sep="\n", end="\n\n")
        cores = len(os.sched_getaffinity(0))
        where = f"{cores} cores, {platform.system()} {platform.machine()}; jax {jax.__version__}"
        print(f"{conclusion(result)}\n\n`{line}` on {where}.")
    else:
        for header, *rows in tables(result):
            table = Table()
            for column in header:
                table.add_column(column, justify="right")
            for row in rows:
                table.add_row(*row)
            Console().print(table)
        print(conclusion(result))


if __name__ == "__main__":
    cli.run(main)
