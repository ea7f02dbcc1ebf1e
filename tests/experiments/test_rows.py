"""Experiments whose rows are whole runs, at a toy's size."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_collections
import numpy as np
import pytest

from soma_jax import model, randomness, recipe
from soma_jax.errors import SomaError
from soma_jax.experiments import (
    active_experts,
    complementary,
    equal_compute,
    output,
    runs,
    scaling,
    sharding_ablation,
    tuning,
)
from soma_jax.stats import Interval

ROOT = Path(__file__).parents[2]
EGGROLL = runs.both(
    estimator="eggroll", parameters="all", head_sequences=0, carry=True, own_batch=True,
    optimizer="sgd", learning_rate=0.1,
)  # fmt: skip
BPTT = runs.both(estimator="backprop", parameters="all", n_pert=1, head_sequences=0)
GRU = {"recurrence": "gru", "tied": False}


@pytest.fixture
def settings(base):
    """A config of rows: settings(rows, **fields)."""

    def make(rows, **fields):
        given = {"random_seeds": (0,), "operations": 2e7, "base": base, "rows": rows} | fields
        return ml_collections.ConfigDict(given)

    return make


def committed(name, size="cpu"):
    path = ROOT / "configs" / "experiments" / f"{name}.py"
    namespace: dict = {"__file__": str(path)}
    exec(compile(path.read_text(), path, "exec"), namespace)
    return namespace["get_config"](size)


# The budget


def test_updates_follow_from_the_budget_of_operations(base):
    rows = runs.rows(
        {
            "three": {"experts": 3, "seed_share": 0.25},
            "wide": {"experts": 1, "model": {"width": 6}},
            "bptt": BPTT,
        },
        base,
        operations=1e8,
        random_seeds=(5, 6),
        path="config.rows",
    )
    assert [row.name for row in rows] == ["three", "wide", "bptt"]
    three, wide, bptt = (row.configs for row in rows)
    assert [config.random_seed for config in three] == [5, 6]
    # 16 d^2 and 256 d_E multiply-adds a byte; 2 n_pert B T + head T bytes an update.
    one = 2 * (16 * 16 + 256 * 4) * (2 * 4 * 2 + 2) * 16
    assert three[0].seed.updates == int(0.25e8 / one)
    assert three[0].expert.updates == int(0.75e8 / (3 * one))
    assert three[0].expert.n_pert == 4
    one = 2 * (16 * 36 + 2 * 4 * 6 + 256 * 4) * (2 * 4 * 2 + 2) * 16
    assert (wide[1].seed.updates, wide[1].expert.updates) == (0, int(1e8 / one))
    one = 2 * (16 * 16 + 256 * 4) * 3 * 2 * 16  # a backward pass costs two forwards
    assert bptt[0].expert.updates == int(1e8 / (2 * one))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"a": {"expert": {"updates": 3}}}, "updates follows from the budget"),
        ({"a": {"seed_share": 1.0}}, "seed_share must be at least 0 and below 1"),
        ({"a": {"seed_share": 1e-9}}, "for the seed stage is less than one update"),
        ({"a": 3}, "must be fields of a config"),
        ({"a b": {}, "a-b": {}}, "needs a name of letters or digits of its own"),
        ({"?": {}}, "needs a name of letters or digits of its own"),
        ({"a": {"expert": {"n_pert": 0}}}, r"config.rows\['a'\]: config.expert.n_pert"),
        ({"a": {"nope": 1}}, "nope is not a field"),
        ({}, "config.rows has no rows"),
    ],
)
def test_rows_that_cannot_be_are_refused(settings, rows, words):
    with pytest.raises(SomaError, match=words):
        runs.resolve_rows(settings(rows))


@pytest.mark.parametrize("seeds", [(), (1, 1), (-1,), ("a",), (2**32,)])
def test_random_seeds_that_cannot_be_are_refused(settings, seeds):
    with pytest.raises(SomaError, match=r"config\.random_seeds"):
        runs.resolve_rows(settings({"a": {}}, random_seeds=seeds))


@pytest.mark.parametrize("size", ["cpu", "paper"])
@pytest.mark.parametrize(
    "experiment",
    [equal_compute, tuning, scaling, sharding_ablation, active_experts, complementary],
    ids=lambda module: module.__name__.rpartition(".")[-1],
)
def test_committed_settings_are_good(experiment, size):
    name = experiment.__name__.rpartition(".")[-1]
    assert experiment.resolve(committed(name, size))


def test_the_papers_systems_have_one_size_and_one_budget():
    for size, parameters in (("cpu", 164e3), ("paper", 8.4e6)):
        config = committed("equal_compute", size)
        for row in equal_compute.resolve(config).rows:
            run = row.configs[0]
            shape = run.expert_shape
            total = run.experts * (shape.body_parameters + shape.head_parameters)
            assert total == pytest.approx(parameters, rel=0.01), (size, row.name, total)
            stages = (run.seed, 1), (run.expert, run.experts)
            spent = sum(n * s.updates * s.byte_forwards_per_update for s, n in stages)
            assert spent * shape.operations_per_byte == pytest.approx(config.operations, rel=0.05)


# What is said


def test_a_claim_is_what_the_interval_says():
    interval = lambda low, high: Interval((low + high) / 2, low, high)  # noqa: E731
    assert "reproduced (+0.2" in output.claim("x", interval(0.1, 0.3))
    assert "**not reproduced**" in output.claim("x", interval(-0.3, -0.1))
    assert "one run, and so no interval" in output.claim("x", interval(0.2, 0.2))
    assert "**undecided**" in output.claim("x", interval(-0.1, 0.3))
    better, worse = {"test": [1.0, 2.0, 3.0]}, {"test": [1.5, 2.6, 3.4]}
    # Paired: the seeds differ far more than the systems.
    assert "reproduced (+0.5" in runs.claim("x", better, worse)


# Whole experiments


def read(directory):
    return json.loads((directory / "result.json").read_text())


@pytest.fixture(scope="module")
def compared(tmp_path_factory, base):
    """equal_compute, run by its command."""
    tmp_path = tmp_path_factory.mktemp("equal_compute")
    config = {
        "random_seeds": [3, 4],
        "operations": 6e7,
        "base": base,
        "rows": {
            "SOMA, N = 2": {"seed_share": 0.3},
            "EGGROLL, GRU": {"experts": 1, "model": GRU} | EGGROLL,
            "backpropagation": {"experts": 1} | BPTT,
        },
    }
    file = tmp_path / "tiny.py"
    file.write_text(
        "import ml_collections\n"
        f"def get_config(): return ml_collections.ConfigDict({config!r})\n".replace(
            "[3, 4]", "(3, 4)"
        )
    )
    command = [
        *(sys.executable, "launch/experiment.py", "--experiment=equal_compute"),
        *(f"--config={file}", f"--workdir={tmp_path / 'run'}"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / "run", ml_collections.ConfigDict(config | {"random_seeds": (3, 4)})


def test_every_system_is_trained_and_scored_on_the_same_bytes(compared):
    directory, _ = compared
    result = read(directory)
    assert result["command"].startswith("python launch/experiment.py --experiment=equal_compute")
    assert [row["name"] for row in result["rows"]] == [
        "EGGROLL, GRU", "SOMA, N = 2", "backpropagation"
    ]  # fmt: skip
    for row in result["rows"]:
        assert len(set(row["test"])) == len(set(row["valid"])) == 2
        assert 5.5e7 < row["operations"] <= 6e7
        curve = row["curves"][0]
        assert 8 < len(curve) <= 20
        assert [x for x, _ in curve] == sorted({x for x, _ in curve})
        assert curve[-1][0] == pytest.approx(row["operations"], rel=0.12)
        assert all(loss < curve[0][1] for _, loss in curve[-1:])  # it learns
    soma, bptt = (runs.find(result["rows"], n) for n in ("SOMA, N = 2", "backpropagation"))
    assert soma is not None
    assert bptt is not None
    one = 16 * 4**2 + 3 * 4 + 256 * 4
    assert (soma["parameters"], bptt["parameters"]) == (2 * one, one)
    assert np.mean(bptt["test"]) == min(np.mean(row["test"]) for row in result["rows"])
    with (directory / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [float(line["test"]) for line in lines] == [
        loss for row in result["rows"] for loss in row["test"]
    ]
    page = (directory / "equal_compute.md").read_text()
    assert "backpropagation is better than SOMA, N = 2: " in page
    assert page == equal_compute.markdown(result)
    assert (directory / "equal_compute.png").stat().st_size > 10_000


def test_run_again_it_trains_nothing_and_says_the_same(compared, capsys):
    directory, config = compared
    before = read(directory)
    again = equal_compute.run(equal_compute.resolve(config), directory, before["command"])
    assert again["rows"] == before["rows"]
    assert "updates to do" not in capsys.readouterr().out


def test_a_row_with_other_settings_is_refused(compared):
    directory, config = compared
    other = ml_collections.ConfigDict(config.to_dict() | {"operations": 3e7})
    with pytest.raises(SomaError, match="started with another config"):
        equal_compute.run(equal_compute.resolve(other), directory, "")


@pytest.mark.slow
def test_tuning_chooses_by_validation_the_rate_and_then_the_radius(base, tmp_path):
    config = ml_collections.ConfigDict(
        {
            "random_seeds": (0,),
            "operations": 2e7,
            "base": base,
            "systems": {"monolith": {"experts": 1}},
            "learning_rates": (1e-5, 1e-2),
            "radii": (1e-3, 5e-3),
            "eps": 5e-3,
        }
    )
    result = tuning.run(tuning.resolve(config), tmp_path, "the command")
    found = result["systems"]["monolith"]
    assert [row["eps"] for row in found["learning_rate"]] == [5e-3, 5e-3]
    # 1e-5 moves nothing: the higher rate is the better one.
    assert [row["learning_rate"] for row in found["eps"]] == [1e-2, 1e-2]
    # The radius at which the rates were tried is not trained again.
    assert len(list((tmp_path / "runs").iterdir())) == 3
    assert found["eps"][1]["valid"] == found["learning_rate"][1]["valid"]
    valid = [row["valid"] for row in found["eps"]]
    assert found["chosen"] == found["eps"][valid.index(min(valid))]
    assert "lowest rate wins for monolith: **not reproduced**" in tuning.markdown(result)
    for wrong in ({"eps": 1e-4}, {"radii": (0.0, 5e-3)}, {"learning_rates": ()}):
        with pytest.raises(SomaError, match=f"config.{next(iter(wrong))}"):
            tuning.resolve(ml_collections.ConfigDict(config.to_dict() | wrong))


@pytest.mark.slow
def test_scaling_gives_each_expert_the_same_budget(base, tmp_path):
    fields = {"experts": (1, 2), "n_pert": (4,), "sequences": ()}
    config = ml_collections.ConfigDict(
        {"random_seeds": (0,), "operations": 1e7, "base": base, **fields}
    )
    settings = scaling.resolve(config)
    (one,), (two,) = (row.configs for row in settings.rows["experts"])
    assert one.expert.updates == two.expert.updates > 0
    assert (two.experts, two.active) == (2, 2)
    result = scaling.run(settings, tmp_path, "the command")
    assert (
        result["sweeps"]["experts"][1]["operations"]
        == 2 * (result["sweeps"]["experts"][0]["operations"])
    )
    assert "experts 2 is better than experts 1" in scaling.markdown(result)
    with pytest.raises(SomaError, match=r"config\.n_pert must be positive whole numbers"):
        scaling.resolve(ml_collections.ConfigDict(config.to_dict() | {"n_pert": (0,)}))


def test_shards_are_semantic_random_or_everything(base):
    assignment = np.random.default_rng(0).integers(3, size=60)
    shards = {}
    for kind in ("semantic", "random", "iid"):
        values = runs.merged(base, {"experts": 3, "cluster": {"shards": kind}})
        (row,) = runs.rows({"a": values}, {}, operations=1e9, random_seeds=(0,), path="config.rows")
        shards[kind] = recipe._shards(row.configs[0], assignment)
    for i in range(3):
        assert shards["semantic"][i].tolist() == np.flatnonzero(assignment == i).tolist()
        assert len(shards["random"][i]) == len(shards["semantic"][i])
        assert shards["iid"][i].tolist() == list(range(60))
        # As many of a cluster's chunks as chance gives, not all of them.
        assert len(np.intersect1d(shards["random"][i], shards["semantic"][i])) < 15
    assert sorted(np.concatenate(shards["random"])) == list(range(60))


@pytest.mark.slow
def test_the_ablation_trains_experts_from_the_seed_or_as_drawn(settings, tmp_path):
    config = settings(
        {
            "semantic shards": {"seed_share": 0.3},
            "cold start": {"warm_start": False},
            "IID data": {"seed_share": 0.3, "cluster": {"shards": "iid"}},
        }
    )
    config.base.update(runs.both(**(config.base.seed.to_dict() | BPTT["seed"])))
    checked = sharding_ablation.resolve(config)
    result = sharding_ablation.run(checked, tmp_path, "the command")
    warm, cold = (runs.find(result["rows"], n) for n in ("semantic shards", "cold start"))
    assert warm is not None
    assert cold is not None
    assert warm["curves"][0][0][0] < cold["curves"][0][0][0]  # the seed's part comes first
    assert cold["updates"]["seed"] == 0
    assert cold["parameters"] == 2 * (16 * 4**2 + 3 * 4 + 256 * 4)  # each expert has an E
    _, experts, _ = recipe.load(tmp_path / "runs" / "cold-start" / "0")
    first, second = (e.params["body"]["blocks"][0]["lstm_input"] for e in experts)
    assert np.abs(first - second).max() > 0.1  # each is drawn for itself
    assert "semantic shards is better than cold start" in sharding_ablation.markdown(result)


@pytest.mark.parametrize("warm", [True, False])
def test_experts_start_from_the_seed_or_each_as_drawn(base, tmp_path, warm):
    still = {"warm_start": warm, "expert": {"learning_rate": 0.0}}
    (row,) = runs.rows({"a": still}, base, operations=2e6, random_seeds=(7,), path="config.rows")
    runs.train(row, tmp_path)
    _, experts, _ = recipe.load(tmp_path / "runs" / "a" / "7")
    for i, expert in enumerate(experts):
        key = randomness.key(7, "init", *([] if warm else [i]))  # a seed without updates is drawn
        drawn = model.init(key, row.configs[0].expert_shape)
        jax.tree.map(np.testing.assert_array_equal, expert.params, drawn)


def test_pairs_of_experts_are_compared_by_byte():
    p, q = np.array([0.5, 0.1, 0.2]), np.array([0.25, 0.4, 0.1])
    found = complementary.pair(np.log(p), np.log(q))
    better = min(-np.log(p).mean(), -np.log(q).mean())
    together = -np.log((p + q) / 2).mean()
    assert found["better"] == pytest.approx(better)
    assert found["gain"] == pytest.approx(better - together)
    assert found["correlation"] == pytest.approx(np.corrcoef(np.log(p), np.log(q))[0, 1])
    assert complementary.pair(np.log(p), np.log(p))["gain"] == pytest.approx(0, abs=1e-15)


def test_active_experts_and_pairs_are_those_of_the_run(settings, tmp_path):
    config = settings({"SOMA, N = 3": {"experts": 3, "active": 3, "seed_share": 0.3}})
    result = complementary.run(complementary.resolve(config), tmp_path, "the command")
    (row,) = result["rows"]
    (pairs,) = row["pairs"]
    assert [(p["first"], p["second"]) for p in pairs] == [(0, 1), (0, 2), (1, 2)]
    # The mean of all three, by convexity, is at most the mean of the three means of two.
    assert row["by_k"][0][2] <= np.mean([p["together"] for p in pairs]) + 1e-9
    same = active_experts.run(active_experts.resolve(config), tmp_path, "the command")
    assert same["rows"][0]["by_k"] == row["by_k"]
    assert len(row["by_k"][0]) == 3
    assert row["by_k"][0][2] == pytest.approx(row["test"][0])
    assert "Averaging all 3 experts" in active_experts.markdown(same)
