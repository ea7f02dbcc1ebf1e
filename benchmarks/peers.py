"""Times one zero-order update of one expert by soma_jax and by what one would use instead.

pip install -e ".[peers]"
python benchmarks/peers.py [--width=32 --n_pert=64 --sequences=8 ...] [--json | --markdown]

All do the same work on the CPU: 2 n_pert losses of the same expert (E stays as it is) on the same
windows, and the update of its body. A contestant runs in a process of its own, so that no thread
pool is in another's way, and the contestants take turns, so that a machine that slows down does so
for all. Prints each one's byte-forwards per second (the median over rounds) and the ratio of
soma_jax's to it (the median, lowest and highest of the rounds' own ratios).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table
from rich.text import Text

import soma_jax
from soma_jax import cli, model, probes

Update = Callable[[], object]  # does one update, and returns when it is done

EMBEDDING = 32  # d_E, as train_step.py has it
BLOCKS = 2
EPS = 1e-3
LEARNING_RATE = 1e-6
DIRECTIONS_AT_ONCE = 16  # of the batched torch peer
NOT_INSTALLED = 'not installed: pip install -e ".[peers]"'


@dataclasses.dataclass(frozen=True)
class Work:
    """What every contestant does."""

    width: int = 32
    n_pert: int = 64
    sequences: int = 8
    window: int = 256
    updates: int = 3  # timed, after one that is not

    @property
    def byte_forwards(self) -> int:
        """Of one update: 2 n_pert B T."""
        return 2 * self.n_pert * self.sequences * self.window

    @property
    def operations_per_byte(self) -> int:
        return model.ExpertConfig(self.width, BLOCKS, EMBEDDING).operations_per_byte

    def windows(self) -> np.ndarray:
        """Random bytes, [B, T + 1]."""
        size = (self.sequences, self.window + 1)
        return np.random.default_rng(0).integers(0, 256, size, dtype=np.int32)

    def head(self) -> np.ndarray:
        """The tied byte matrix E, [256, d_E]."""
        size = (256, EMBEDDING)
        return np.random.default_rng(1).normal(0, EMBEDDING**-0.5, size).astype(np.float32)


# evosax: the population is 2 n_pert flat vectors, antithetic, and a flax expert is vmapped over it.


def flax_expert(width: int):
    """A module of (ids [B, T], E) that returns logits [B, T, 256]."""
    import flax.linen as nn

    class Expert(nn.Module):
        @nn.compact
        def __call__(self, ids, head):
            x = head[ids]
            if width != EMBEDDING:
                x = nn.Dense(width, use_bias=False)(x)
            for _ in range(BLOCKS):
                # The one bias: 4 d of a cell's 8 d^2 + 4 d parameters; flax has no cell without.
                x = x + nn.RNN(nn.OptimizedLSTMCell(width))(norm()(x))
                hidden = nn.Dense(4 * width, use_bias=False)(norm()(x))
                x = x + nn.Dense(width, use_bias=False)(nn.gelu(hidden, approximate=False))
            x = norm()(x)
            if width != EMBEDDING:
                x = nn.Dense(EMBEDDING, use_bias=False)(x)
            return x @ head.T

    def norm():
        return nn.LayerNorm(epsilon=1e-5, use_bias=False)

    return Expert()


def evosax_update(work: Work) -> Update:
    import jax
    import jax.numpy as jnp
    import optax
    from evosax.algorithms import Open_ES

    expert, head = flax_expert(work.width), jnp.asarray(work.head())
    windows = jnp.asarray(work.windows())
    body = expert.init(jax.random.key(0), windows[:1, :2], head)

    def loss(body):
        logits = expert.apply(body, windows[:, :-1], head)
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    strategy = Open_ES(
        population_size=2 * work.n_pert,
        solution=body,
        use_antithetic_sampling=True,
        optimizer=optax.sgd(LEARNING_RATE),
        std_schedule=optax.constant_schedule(EPS),
    )
    settings = strategy.default_params
    key = jax.random.key(1)
    state = strategy.init(key, body, settings)

    @jax.jit
    def step(key, state):
        key, ask, tell = jax.random.split(key, 3)
        population, state = strategy.ask(ask, state, settings)
        losses = jax.vmap(loss)(population)
        state, _ = strategy.tell(tell, population, losses, state, settings)
        return key, state

    def update():
        nonlocal key, state
        key, state = jax.block_until_ready(step(key, state))

    update()  # evosax's first state has other types than later ones: `step` compiles twice
    return update


# torch, batched: the perturbations are a leading axis of every weight and every activation.


def torch_shapes(width: int) -> list[tuple[int, ...]]:
    """Shapes of the body's parameters, in the order that `torch_losses` takes them."""
    d = width
    block: list[tuple[int, ...]] = [(d,), (d, 4 * d), (d, 4 * d), (d,), (d, 4 * d), (4 * d, d)]
    projections = [(EMBEDDING, d), (d, EMBEDDING)] if d != EMBEDDING else []
    return [*(block * BLOCKS), (d,), *projections]


def torch_losses(weights, head, windows):
    """Mean losses [C] of C bodies (each weight is [C, ...]) on the same windows [B, T + 1]."""
    import torch
    from torch.nn import functional as F

    inputs, targets = windows[:, :-1], windows[:, 1:]
    sequences, length = inputs.shape
    *body, final_gain = weights[: 6 * BLOCKS + 1]
    projections = weights[6 * BLOCKS + 1 :]
    bodies, d = final_gain.shape

    def product(x_CxBxTxi, weight_Cxixo):
        x = torch.bmm(x_CxBxTxi.reshape(bodies, sequences * length, -1), weight_Cxixo)
        return x.view(bodies, sequences, length, -1)

    def norm(x, gain_Cxd):
        return F.layer_norm(x, (d,)) * gain_Cxd[:, None, None]

    def lstm(x, weight_input, weight_recurrent):
        gates_CxBxTx4d = product(x, weight_input)
        h = c = torch.zeros(bodies, sequences, d)
        outputs = []
        for t in range(length):
            gates = torch.baddbmm(gates_CxBxTx4d[:, :, t], h, weight_recurrent)
            take, keep, candidate, show = gates.chunk(4, -1)
            c = torch.sigmoid(keep) * c + torch.sigmoid(take) * torch.tanh(candidate)
            h = torch.sigmoid(show) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs, 2)

    x = head[inputs].expand(bodies, -1, -1, -1)
    if projections:
        x = product(x, projections[0])
    for i in range(0, 6 * BLOCKS, 6):
        lstm_gain, lstm_input, lstm_recurrent, mlp_gain, mlp_in, mlp_out = body[i : i + 6]
        x = x + lstm(norm(x, lstm_gain), lstm_input, lstm_recurrent)
        x = x + product(F.gelu(product(norm(x, mlp_gain), mlp_in)), mlp_out)
    x = norm(x, final_gain)
    if projections:
        x = product(x, projections[1])
    logits = x.reshape(-1, EMBEDDING) @ head.T
    targets = targets.expand(bodies, -1, -1).reshape(-1)
    return F.cross_entropy(logits, targets, reduction="none").view(bodies, -1).mean(1)


def torch_update(work: Work) -> Update:
    import torch

    torch.manual_seed(0)
    head, windows = torch.from_numpy(work.head()), torch.from_numpy(work.windows()).long()
    weights = [
        torch.ones(shape) if len(shape) == 1 else torch.randn(shape) / shape[0] ** 0.5
        for shape in torch_shapes(work.width)
    ]

    @torch.no_grad()
    def update():
        estimate = [torch.zeros_like(w) for w in weights]
        for start in range(0, work.n_pert, DIRECTIONS_AT_ONCE):
            count = min(DIRECTIONS_AT_ONCE, work.n_pert - start)
            directions = [torch.randint(0, 2, (count, *w.shape)).float() * 2 - 1 for w in weights]
            pairs = list(zip(weights, directions, strict=True))
            plus = torch_losses([w + EPS * z for w, z in pairs], head, windows)
            minus = torch_losses([w - EPS * z for w, z in pairs], head, windows)
            slopes = (plus - minus) / (2 * EPS)
            for g, z in zip(estimate, directions, strict=True):
                g += torch.tensordot(slopes, z, 1) / work.n_pert
        for w, g in zip(weights, estimate, strict=True):
            w -= LEARNING_RATE * g

    return update


# MeZO: one perturbation at a time, in place; a direction is drawn again from its seed.


def torch_expert(width: int, head):
    """A module of ids [B, T] that returns logits [B, T, 256]; its parameters are the body's."""
    import torch
    from torch import nn

    def norm():
        return nn.LayerNorm(width, bias=False)

    def linear(rows, columns):
        return nn.Linear(rows, columns, bias=False)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm_norm = norm()
            self.lstm = nn.LSTM(width, width, bias=False, batch_first=True)
            self.mlp = nn.Sequential(
                norm(), linear(width, 4 * width), nn.GELU(), linear(4 * width, width)
            )

        def forward(self, x):
            x = x + self.lstm(self.lstm_norm(x))[0]
            return x + self.mlp(x)

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            projected = width != EMBEDDING
            self.body = nn.Sequential(
                *([linear(EMBEDDING, width)] if projected else []),
                *(Block() for _ in range(BLOCKS)),
                norm(),
                *([linear(width, EMBEDDING)] if projected else []),
            )

        def forward(self, ids):
            return self.body(torch.nn.functional.embedding(ids, head)) @ head.T

    return Expert()


def mezo_update(work: Work) -> Update:
    import torch

    torch.manual_seed(0)
    expert = torch_expert(work.width, torch.from_numpy(work.head()))
    windows = torch.from_numpy(work.windows()).long()
    parameters = list(expert.parameters())

    def loss() -> float:
        logits = expert(windows[:, :-1])
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, 256), windows[:, 1:].reshape(-1)
        ).item()

    def add(scale: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in parameters:
            p.add_(torch.randn(p.shape, generator=generator), alpha=scale)

    @torch.no_grad()
    def update():
        slopes = []
        for seed in range(work.n_pert):
            add(EPS, seed)
            plus = loss()
            add(-2 * EPS, seed)
            minus = loss()
            add(EPS, seed)
            slopes.append((plus - minus) / (2 * EPS))
        for seed, slope in enumerate(slopes):
            add(-LEARNING_RATE * slope / work.n_pert, seed)

    return update


@dataclasses.dataclass(frozen=True)
class Peer:
    what: str
    packages: tuple[str, ...]  # the first is the one that may be missing
    prepare: Callable[[Work], Update]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.packages[0]) is not None


OURS = "soma_jax"
PEERS = {
    "evosax": Peer("OpenES over a flax RNN", ("evosax", "flax", "jax"), evosax_update),
    "torch": Peer("batched over directions", ("torch",), torch_update),
    "mezo": Peer("MeZO's loop over nn.LSTM", ("torch",), mezo_update),
}

flags.DEFINE_integer("width", 32, "d", 1)
flags.DEFINE_integer("n_pert", 64, "directions an update", 1)
flags.DEFINE_integer("sequences", 8, "windows a direction sees", 1)
flags.DEFINE_integer("window", 256, "T, bytes a window predicts", 1)
flags.DEFINE_integer("rounds", 3, "times each contestant has its turn", 1)
flags.DEFINE_integer("updates", 3, "timed updates of a turn", 1)
flags.DEFINE_enum("probe", "sparse", list(probes.LAWS), "soma_jax's law of a direction")
flags.DEFINE_bool("own_batch", False, "each direction of soma_jax has its own windows")
flags.DEFINE_bool("json", False, "print one line of JSON")
flags.DEFINE_bool("markdown", False, "print a table for benchmarks/README.md")
flags.DEFINE_enum("peer", None, list(PEERS), "time this peer alone, here; one line of JSON")
flags.mark_bool_flags_as_mutual_exclusive(["json", "markdown"])


# One contestant's turn


class ContestantError(Exception):
    """A contestant's process failed; the message is what it wrote to stderr."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status if status > 0 else 128 - status  # a negative one is a signal's number


def time_peer(peer: Peer, work: Work) -> dict[str, Any]:
    update = peer.prepare(work)
    update()
    times = []
    for _ in range(work.updates):
        start = time.perf_counter()
        update()
        times.append(time.perf_counter() - start)
    return {
        "seconds_per_update": statistics.median(times),
        "versions": {name: metadata.version(name) for name in peer.packages},
    }


def command(name: str, work: Work, soma_jax_flags: Sequence[str]) -> list[str]:
    """The process that times a contestant."""
    work_flags = [f"--{k}={v}" for k, v in dataclasses.asdict(work).items()]
    if name != OURS:
        return [sys.executable, __file__, f"--peer={name}", *work_flags]
    # With E frozen the 2 n_pert losses and the update are all there is to do, as for the peers.
    script = str(Path(__file__).with_name("train_step.py"))
    fixed = ["--json", "--head_sequences=0"]
    return [sys.executable, script, *fixed, *soma_jax_flags, *work_flags]


def run_child(line: Sequence[str]) -> dict[str, Any]:
    """The JSON that a process prints last."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    child = subprocess.run(line, capture_output=True, text=True, env=environment)
    if child.returncode:
        message = child.stderr.strip() or f"no message, exit status {child.returncode}"
        raise ContestantError(child.returncode, message)
    return json.loads(child.stdout.splitlines()[-1])


# All of them


def measure(
    work: Work, rounds: int, soma_jax_flags: Sequence[str], show: Callable[[str], None]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Each contestant's results, one for each round, and why the others have none.

    Raises:
      ContestantError: soma_jax failed. A peer that fails is left out.
    """
    skipped = {name: NOT_INSTALLED for name, peer in PEERS.items() if not peer.installed}
    results: dict[str, list[dict[str, Any]]] = {OURS: []}
    results |= {name: [] for name in PEERS if name not in skipped}
    for index in range(rounds):
        for name in list(results):
            show(f"round {index + 1} of {rounds}: {name}")
            try:
                results[name].append(run_child(command(name, work, soma_jax_flags)))
            except ContestantError as error:
                if name == OURS:
                    raise
                skipped[name] = f"failed: {str(error).splitlines()[-1]}"
                del results[name]
    return results, skipped


def summarise(
    work: Work, results: dict[str, list[dict[str, Any]]], skipped: dict[str, str]
) -> dict[str, Any]:
    """Medians over the rounds; a ratio is of two turns of the same round."""
    rates = {
        name: [work.byte_forwards / turn["seconds_per_update"] for turn in turns]
        for name, turns in results.items()
    }
    contestants: dict[str, dict[str, Any]] = {}
    for name, each_round in rates.items():
        contestants[name] = {
            "byte_forwards_per_s": statistics.median(each_round),
            "rounds": each_round,
            "versions": results[name][0].get("versions"),
        }
        if name != OURS:
            ratios = [a / b for a, b in zip(rates[OURS], each_round, strict=True)]
            contestants[name]["soma_jax_times_as_fast"] = {
                "median": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
    ours = results[OURS]
    contestants[OURS]["versions"] = {"soma_jax": soma_jax.__version__, "jax": ours[0]["jax"]}
    peers = [name for name in contestants if name != OURS]
    peak = statistics.median(turn["peak_gflops"] for turn in ours)
    gflops = contestants[OURS]["byte_forwards_per_s"] * work.operations_per_byte / 1e9
    return {
        "contestants": contestants,
        "skipped": skipped,
        "fastest_peer": max(
            peers, key=lambda name: contestants[name]["byte_forwards_per_s"], default=None
        ),
        "peak_gflops": peak,
        "soma_jax_gflops": gflops,
        "work": dataclasses.asdict(work),
    }


# What is printed

COLUMNS = ("", "byte-forwards/s", "soma_jax to it", "versions")


def rows(summary: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    lines = []
    for name, result in summary["contestants"].items():
        what = f"{name}: {PEERS[name].what}" if name in PEERS else name
        rate = f"{result['byte_forwards_per_s'] / 1e6:.3f}M"
        ratio = ""
        if name != OURS:
            times = result["soma_jax_times_as_fast"]
            ratio = f"{times['median']:.2f} ({times['lowest']:.2f} to {times['highest']:.2f})"
        versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
        lines.append((what, rate, ratio, versions))
    for name, reason in summary["skipped"].items():
        lines.append((f"{name}: {PEERS[name].what}", "", "", reason))
    return lines


def conclusions(summary: dict[str, Any]) -> list[str]:
    lines = []
    if name := summary["fastest_peer"]:
        times = summary["contestants"][name]["soma_jax_times_as_fast"]["median"]
        lines.append(f"soma_jax is {times:.2f} times as fast as the fastest peer, {name}.")
    peak, gflops = summary["peak_gflops"], summary["soma_jax_gflops"]
    lines.append(
        f"soma_jax ran at {gflops:.1f} GFLOP/s of a matmul peak of {peak:.1f} measured in the same "
        f"rounds: {gflops / peak:.0%}."
    )
    return lines


def terminal_table(summary: dict[str, Any]) -> Table:
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="right" if column.startswith(("byte", "soma")) else "left")
    for row in rows(summary):
        table.add_row(*map(Text, row))  # brackets are no markup here
    return table


def markdown(summary: dict[str, Any], line: str) -> str:
    """The table, with all that one needs to measure it again."""
    lines = [COLUMNS, ("---", "---:", "---:", "---"), *rows(summary)]
    table = ["| " + " | ".join(x.replace("|", "\\|") for x in row) + " |" for row in lines]
    facts = machine()
    where = f"{facts['cores']} cores, {facts['cpu']}, {facts['platform']}"
    versions = f"Python {facts['python']}, numpy {facts['numpy']}"
    return "\n".join(
        [*table, "", *conclusions(summary), "", f"`{line}` on {where}; {versions}."],
    )


def machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "cpu": cpu_model(Path("/proc/cpuinfo")),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_model(cpuinfo: Path) -> str:
    if cpuinfo.exists():  # Linux
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def main() -> None:
    f = flags.FLAGS
    work = Work(**{field.name: f[field.name].value for field in dataclasses.fields(Work)})
    if f.peer:
        print(json.dumps(time_peer(PEERS[f.peer], work)))
        return
    soma_jax_flags = [f"--probe={f.probe}", f"--own_batch={f.own_batch}"]
    try:
        with Console(stderr=True).status("") as status:
            results, skipped = measure(work, f.rounds, soma_jax_flags, status.update)
    except ContestantError as error:
        print(error, file=sys.stderr)
        sys.exit(error.status)
    summary = summarise(work, results, skipped)
    line = shlex.join(["python", "benchmarks/peers.py", *sys.argv[1:]])
    if f.json:
        print(json.dumps(summary | {"command": line, "machine": machine()}))
    elif f.markdown:
        print(markdown(summary, line))
    else:
        Console().print(terminal_table(summary))
        print(*conclusions(summary), sep="\n")


if __name__ == "__main__":
    cli.run(main)
