"""benchmarks/peers.py: that all do the same work, and what it makes of their times."""

import io
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from scripts import BENCHMARKS, load_script

from soma_jax import model

SECONDS = {"soma_jax": [1.0, 2.0, 4.0], "evosax": [4.0, 6.0, 20.0], "torch": [8.0, 8.0, 8.0]}


@pytest.fixture(scope="module")
def peers():
    yield load_script("peers")
    del sys.modules["peers"]


@pytest.fixture
def work(peers):
    return peers.Work(width=32, n_pert=50, sequences=10, window=1000)  # 1M byte-forwards


def turn(name, seconds):
    result = {"seconds_per_update": seconds, "versions": {name: "1.2"}}
    if name == "soma_jax":
        result = {"seconds_per_update": seconds, "jax": "0.10", "peak_gflops": 100 * seconds}
    return result


@pytest.fixture
def summary(peers, work):
    results = {name: [turn(name, s) for s in each] for name, each in SECONDS.items()}
    return peers.summarise(work, results, {"mezo": peers.NOT_INSTALLED})


# Figures


def test_rates_are_medians_over_the_rounds(summary):
    rates = {name: c["byte_forwards_per_s"] for name, c in summary["contestants"].items()}
    assert rates == pytest.approx({"soma_jax": 1e6 / 2, "evosax": 1e6 / 6, "torch": 1e6 / 8})
    assert summary["contestants"]["torch"]["rounds"] == [1e6 / 8] * 3


def test_a_ratio_is_of_two_turns_of_the_same_round(summary):
    assert "soma_jax_times_as_fast" not in summary["contestants"]["soma_jax"]
    evosax, torch = (
        summary["contestants"][name]["soma_jax_times_as_fast"] for name in ("evosax", "torch")
    )
    assert evosax == pytest.approx({"median": 4, "lowest": 3, "highest": 5})  # 4/1, 6/2, 20/4
    assert torch == pytest.approx({"median": 4, "lowest": 2, "highest": 8})


def test_the_fastest_peer_and_the_peak_of_the_same_rounds(summary):
    assert summary["fastest_peer"] == "evosax"
    assert summary["peak_gflops"] == 200
    # 81,920 operations a byte, 0.5M bytes a second.
    assert summary["soma_jax_gflops"] == pytest.approx(40.96)


# What is printed


def test_the_table_has_every_contestant_and_how_to_install_one_that_is_missing(peers, summary):
    text = io.StringIO()
    Console(file=text, width=150).print(peers.terminal_table(summary))
    lines = {row.split()[1].strip(":"): row for row in text.getvalue().splitlines() if "│" in row}
    assert "0.500M" in lines["soma_jax"]
    assert "0.167M" in lines["evosax"]
    assert "4.00 (3.00 to 5.00)" in lines["evosax"]
    assert "evosax 1.2" in lines["evosax"]
    assert 'not installed: pip install -e ".[peers]"' in lines["mezo"]
    fastest, peak = peers.conclusions(summary)
    assert fastest == "soma_jax is 4.00 times as fast as the fastest peer, evosax."
    assert "41.0 GFLOP/s" in peak
    assert "peak of 200.0" in peak
    assert "20%" in peak


def test_markdown_is_a_table_with_the_command_and_the_machine(peers, summary):
    summary["skipped"]["mezo"] = "failed: 1 | 2"
    lines = peers.markdown(summary, "python benchmarks/peers.py --markdown").splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + 4
    assert {line.replace("\\|", "").count("|") for line in table} == {5}
    assert "`python benchmarks/peers.py --markdown` on " in lines[-1]
    assert f"{peers.machine()['cores']} cores, {peers.machine()['cpu']}" in lines[-1]


def test_soma_jax_alone_has_no_fastest_peer(peers, work):
    skipped = dict.fromkeys(peers.PEERS, peers.NOT_INSTALLED)
    alone = peers.summarise(work, {"soma_jax": [turn("soma_jax", 1.0)]}, skipped)
    assert alone["fastest_peer"] is None
    assert len(peers.conclusions(alone)) == 1
    assert len(peers.rows(alone)) == 4


def test_the_cpu_is_named_as_linux_names_it(peers, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A CPU @ 2.00GHz\nprocessor\t: 1\n")
    assert peers.cpu_model(cpuinfo) == "A CPU @ 2.00GHz"
    assert peers.cpu_model(tmp_path / "absent")


# Taking turns


@pytest.fixture
def turns(peers, monkeypatch):
    """Children that are not run: the contestants in the order of their turns."""
    taken = []

    def run_child(line):
        name = next((x.split("=")[1] for x in line if x.startswith("--peer=")), "soma_jax")
        taken.append(name)
        return turn(name, 1.0)

    absent = peers.Peer("a library that nobody has", ("no_such_package",), None)
    present = peers.Peer("a library that everybody has", ("numpy",), None)
    monkeypatch.setattr(peers, "PEERS", {"absent": absent, "a": present, "b": present})
    monkeypatch.setattr(peers, "run_child", run_child)
    return taken


def test_contestants_take_turns_and_a_missing_one_is_skipped(peers, work, turns):
    shown = []
    results, skipped = peers.measure(work, 2, [], shown.append)
    assert turns == ["soma_jax", "a", "b"] * 2
    assert shown[4] == "round 2 of 2: a"
    assert {name: len(each) for name, each in results.items()} == {"soma_jax": 2, "a": 2, "b": 2}
    assert skipped == {"absent": 'not installed: pip install -e ".[peers]"'}


def test_a_peer_that_fails_is_left_out_and_soma_jax_is_not(peers, work, turns, monkeypatch):
    run_child = peers.run_child

    def failing(which):
        def run(line):
            if run_child(line)["seconds_per_update"] and turns[-1] == which:
                raise peers.ContestantError(1, "Traceback\nMemoryError: all of it")
            return turn(turns[-1], 1.0)

        return run

    monkeypatch.setattr(peers, "run_child", failing("a"))
    results, skipped = peers.measure(work, 2, [], print)
    assert turns == ["soma_jax", "a", "b", "soma_jax", "b"]
    assert list(results) == ["soma_jax", "b"]
    assert skipped["a"] == "failed: MemoryError: all of it"

    monkeypatch.setattr(peers, "run_child", failing("soma_jax"))
    with pytest.raises(peers.ContestantError, match="MemoryError"):
        peers.measure(work, 2, [], print)


def test_soma_jax_counts_what_the_peers_count(peers, work):
    line = peers.command("soma_jax", work, ["--probe=rank_one"])
    assert Path(line[1]) == BENCHMARKS / "train_step.py"
    assert {"--json", "--head_sequences=0", "--probe=rank_one", "--n_pert=50"} <= set(line)
    assert "--probe=rank_one" not in peers.command("torch", work, ["--probe=rank_one"])


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("sys.exit('error: no such width')", 1, "error: no such width"),
        ("sys.exit(2)", 2, "exit status 2"),
        ("os.kill(os.getpid(), 9)", 137, "exit status -9"),
    ],
)
def test_a_childs_failure_keeps_its_message_and_status(peers, code, status, message):
    with pytest.raises(peers.ContestantError, match=message) as raised:
        peers.run_child([sys.executable, "-c", f"import os, sys; {code}"])
    assert raised.value.status == status


# The same expert


def a_body(width: int) -> tuple[model.Params, np.ndarray]:
    """An expert whose gains are not 1, and windows."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda k: model.init(k, model.ExpertConfig(width)), jax.random.key(0))
    params = jax.tree.map(
        lambda x: rng.normal(len(x.shape) == 1, 0.2, x.shape).astype(np.float32), shapes
    )
    return params, rng.integers(0, 256, (2, 8), dtype=np.int32)


def leaves(body: model.Params) -> list[np.ndarray]:
    names = ("lstm_gain", "lstm_input", "lstm_recurrent", "mlp_gain", "mlp_in", "mlp_out")
    blocks = [block[name] for block in body["blocks"] for name in names]
    ends = [body[k] for k in ("input_projection", "output_projection") if k in body]
    return [*blocks, body["final_gain"], *ends]


@pytest.mark.parametrize("width", [32, 20])
def test_the_flax_expert_is_soma_jaxs(peers, width):
    params, windows = a_body(width)
    expert, body = peers.flax_expert(width), params["body"]
    theirs = {"params": {}}
    for i, block in enumerate(body["blocks"]):
        kernels = {}
        for kind, letter in (("lstm_input", "i"), ("lstm_recurrent", "h")):
            for gate, kernel in zip("ifgo", np.split(block[kind], 4, axis=1), strict=True):
                kernels[letter + gate] = {"kernel": kernel}
                if letter == "h":
                    kernels[letter + gate]["bias"] = np.zeros(width, np.float32)
        theirs["params"] |= {
            f"OptimizedLSTMCell_{i}": kernels,
            f"LayerNorm_{2 * i}": {"scale": block["lstm_gain"]},
            f"LayerNorm_{2 * i + 1}": {"scale": block["mlp_gain"]},
        }
    theirs["params"]["LayerNorm_4"] = {"scale": body["final_gain"]}
    dense = [x for block in body["blocks"] for x in (block["mlp_in"], block["mlp_out"])]
    if width != 32:
        dense = [body["input_projection"], *dense, body["output_projection"]]
    theirs["params"] |= {f"Dense_{i}": {"kernel": x} for i, x in enumerate(dense)}

    drawn = jax.eval_shape(expert.init, jax.random.key(0), windows, params["head"])
    assert jax.tree.map(jnp.shape, theirs) == jax.tree.map(jnp.shape, drawn)
    logits = jax.jit(expert.apply)(theirs, windows, params["head"])
    ours, _ = jax.jit(model.apply)(params, windows)
    np.testing.assert_allclose(logits, ours, atol=1e-5)  # float32 rounds logits of about 3


@pytest.mark.parametrize("width", [32, 20])
def test_the_torch_experts_are_soma_jaxs(peers, width):
    torch = pytest.importorskip("torch")
    params, windows = a_body(width)
    ours = jax.jit(model.sequence_losses)(params, windows).mean()
    head, ids = torch.from_numpy(params["head"]), torch.from_numpy(windows).long()

    weights = [torch.from_numpy(x) for x in leaves(params["body"])]
    assert [tuple(w.shape) for w in weights] == peers.torch_shapes(width)
    other = [torch.zeros_like(w) for w in weights]  # a body that predicts nothing
    both = [torch.stack(pair) for pair in zip(weights, other, strict=True)]
    losses = peers.torch_losses(both, head, ids)
    np.testing.assert_allclose(losses, [ours, np.log(256)], rtol=1e-5)

    expert = peers.torch_expert(width, head)
    if width != 32:  # the module has the projections where they are used
        weights = [weights[-2], *weights[:-2], weights[-1]]
    for parameter, weight in zip(expert.parameters(), weights, strict=True):
        parameter.data = weight.T if weight.ndim == 2 else weight
    logits = expert(ids[:, :-1]).detach().swapaxes(1, 2)
    loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:])
    np.testing.assert_allclose(loss, ours, rtol=1e-5)


def test_the_batched_peer_evaluates_n_pert_pairs(peers, monkeypatch):
    torch = pytest.importorskip("torch")
    bodies = []

    def losses(weights, head, windows):
        bodies.append(len(weights[0]))
        return torch.ones(len(weights[0]))

    monkeypatch.setattr(peers, "torch_losses", losses)
    peers.torch_update(peers.Work(width=4, n_pert=17))()
    assert bodies == [16, 16, 1, 1]  # both signs of a whole chunk and of the rest


@pytest.mark.parametrize("name", ["torch", "mezo"])
def test_a_torch_peer_updates(peers, name):
    pytest.importorskip("torch")
    work = peers.Work(width=4, n_pert=2, sequences=2, window=3, updates=1)
    result = peers.time_peer(peers.PEERS[name], work)
    assert result["seconds_per_update"] > 0
    assert set(result["versions"]) == {"torch"}
