"""Both arms against the plain update and against formulas written out, and a toy's run."""

import csv
import dataclasses
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from soma_jax import ensemble, expert, model, probes, recipe
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Stage, default_config
from soma_jax.errors import SomaError
from soma_jax.experiments import independent_loss
from soma_jax.files import read_json_lines
from soma_jax.interrupt import Interrupted
from soma_jax.workdir import Workdir

ROOT = Path(__file__).parents[2]
SHAPE = model.ExpertConfig(width=4, embedding=4, blocks=1)
COUNT = 3


def committed(size="cpu"):
    path = ROOT / "configs" / "experiments" / "independent_loss.py"
    namespace: dict = {"__file__": str(path)}
    exec(compile(path.read_text(), path, "exec"), namespace)
    config = namespace["get_config"](size)
    config.unlock()
    return config


def toy(**fields):
    """Three experts, a batch of each, their keys, and a stage."""
    stage = Stage(n_pert=3, sequences=2, window=8, **fields)
    params = [model.init(jax.random.key(i), SHAPE) for i in range(COUNT)]
    states = [expert.init_state(p, stage) for p in params]
    windows = np.random.default_rng(0).integers(0, 256, (COUNT, 2, 9)).astype(np.uint8)
    return states, windows, jax.random.split(jax.random.key(9), COUNT), stage


def alone(states):
    return [jax.tree.map(jnp.asarray, state) for state in ensemble.unstack(states)]


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0], np.float64)


def written_out(each, windows, keys, stage, summed):
    """Eq. 2, of each expert, [N, d]."""
    loss = jax.jit(model.sequence_losses)
    total = np.zeros((COUNT, len(flat(each[0].params["body"]))))
    for j in range(stage.n_pert):
        directions, halves = [], []
        for state, some, key in zip(each, windows, keys, strict=True):
            z = probes.LAWS[stage.probe](key, j, state.params["body"])
            losses = [
                loss(
                    {
                        "head": state.params["head"],
                        "body": jax.tree.map(
                            lambda p, z, s=sign: p + s * stage.eps * z, state.params["body"], z
                        ),
                    },
                    some,
                )
                for sign in (1, -1)
            ]
            halves.append(float((losses[0] - losses[1]).mean()) / (2 * stage.eps))
            directions.append(flat(z))
        for e in range(COUNT):
            total[e] += (sum(halves) if summed else halves[e]) * directions[e] / stage.n_pert
    return total


def test_the_independent_arm_is_the_plain_update_of_each_expert():
    """It goes on from the experts' Adam states, at the same updates' directions."""
    states, windows, keys, stage = toy()
    together = jax.jit(partial(independent_loss.update, stage=stage))
    by_itself = jax.jit(partial(expert.update, stage=stage))

    def plain(states):
        return [
            by_itself(state, expert.split_batch(some, stage), key)[0]
            for state, some, key in zip(states, windows, keys, strict=True)
        ]

    states = plain(plain(states))
    arm = independent_loss.start(states, stage)
    for _ in range(2):
        states, arm = plain(states), together(arm, windows, keys, False)
    for one, other in zip(alone(arm), states, strict=True):
        assert int(one.update) == int(other.update) == 4
        np.testing.assert_allclose(flat(one.params), flat(other.params), atol=1e-6)


@pytest.mark.parametrize("summed", [False, True])
def test_a_step_is_by_the_differences_of_the_arms_losses(summed):
    """Plain descent, whose steps show the estimate: Adam's first are its signs."""
    states, windows, keys, stage = toy(optimizer="sgd", eps=1e-2)
    step = jax.jit(partial(independent_loss.update, stage=stage))
    moved = step(independent_loss.start(states, stage), windows, keys, summed)
    now = [jax.random.fold_in(key, 0) for key in keys]
    estimate = written_out(states, windows, now, stage, summed)
    for e, (before, after) in enumerate(zip(states, alone(moved), strict=True)):
        body = flat(before.params["body"])
        step = -stage.learning_rate * (estimate[e] + stage.weight_decay * body)
        # Steps of 1e-3 to 1e-2, in float32 parameters of order 1 from losses of order 6: a
        # rounded loss is 5e-7 off, over 2 eps 3e-5, times the rate 3e-8.
        np.testing.assert_allclose(flat(after.params["body"]) - body, step, atol=3e-7)
        assert abs(step).max() > 1e-4
        assert (flat(after.params["head"]) == flat(before.params["head"])).all()
        assert int(after.update) == 1


@pytest.mark.parametrize("summed", [False, True])
def test_variances_are_those_of_the_arms_estimates(summed):
    states, windows, _, stage = toy(eps=1e-2)
    repeats = jax.random.split(jax.random.key(5), 2000)
    measured, expected = jax.jit(partial(independent_loss.variances, stage=stage))(
        independent_loss.start(states, stage), windows, repeats, summed
    )
    gradients, means = [], []
    for state, some in zip(states, windows, strict=True):

        def loss(body, head=state.params["head"], some=some):
            return model.sequence_losses({"head": head, "body": body}, some).mean()

        gradient = jax.grad(loss)(state.params["body"])
        gradients.append(flat(gradient))
        means.append(flat(jax.tree.map(lambda g: g / 2 if g.ndim > 1 else g, gradient)))
    square = np.square(gradients).sum()
    for key, found in zip(repeats[:2], measured[:2], strict=True):
        of_experts = [jax.random.fold_in(key, e) for e in range(COUNT)]
        estimate = written_out(states, windows, of_experts, stage, summed)
        assert found == pytest.approx(np.square(estimate - means).sum() / square, rel=1e-3)
    # Curvature at this radius moves the mean by less than a percent.
    off = abs(float(measured.mean()) - float(expected))
    assert off < 5 * measured.std() / np.sqrt(len(measured)) + 0.01 * float(expected)


def tiny(base, **fields):
    run = default_config()
    run.update(ml_collections.ConfigDict(base))
    run.expert.update(updates=2, head_sequences=0, learning_rate=3e-3)
    run.seed.updates = 2
    return ml_collections.ConfigDict(
        {
            "random_seeds": (0, 7), "run": run, "updates": 5, "observe_every": 2,
            "variance_every": 4, "variance_repeats": 3,
        }
        | fields
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory):
    settings = independent_loss.resolve(tiny(base))
    directory = tmp_path_factory.mktemp("independent_loss")
    return settings, directory, independent_loss.run(settings, directory, "the command")


def test_it_writes_a_table_a_figure_and_a_result(finished):
    _, directory, result = finished
    assert json.loads((directory / "result.json").read_text()) == result
    assert [point["update"] for point in result["curve"]] == [0, 2, 4, 5]
    assert [point["update"] for point in result["variances"]] == [0, 4, 5]
    first, last = result["curve"][0], result["curve"][-1]
    assert first["independent"] == first["summed"]
    assert first["distance"] == {"independent": [0, 0], "summed": [0, 0]}
    assert last["independent"] != last["summed"]
    for arm in ("independent", "summed"):
        assert last[arm] == pytest.approx(np.mean(result["own_shards"][arm], axis=1))
    with (directory / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["random_seed"], line["update"]) for line in lines] == [
        (seed, update) for seed in ("0", "7") for update in ("0", "2", "4", "5")
    ]
    assert float(lines[-1]["difference"]) == last["summed"][1] - last["independent"][1]
    # 2 n_pert B T byte-forwards of each of two experts, in both arms.
    assert result["byte_forwards"]["of both arms"] == 2 * 2 * 5 * (2 * 4 * 2 * 16)
    page = (directory / "independent_loss.md").read_text()
    assert page.startswith("`the command`")
    assert page == independent_loss.markdown(result)
    assert (directory / "independent_loss.png").stat().st_size > 10_000


def test_the_independent_arm_is_how_the_run_would_have_gone_on(finished, tmp_path):
    settings, _, result = finished
    longer = dataclasses.replace(
        settings.run,
        random_seed=7,
        expert=dataclasses.replace(settings.run.expert, updates=2 + 5),
    )
    workdir = Workdir(tmp_path / "longer")
    recipe.run(longer, workdir)
    for i, found in enumerate(result["own_shards"]["independent"][1]):
        line = read_json_lines(workdir.expert(i) / "metrics.jsonl")[-1]
        assert line["update"] == 7
        assert found == pytest.approx(line["validation"], abs=1e-5)


def test_interrupted_it_goes_on_to_the_same_result(finished, tmp_path, monkeypatch):
    settings, directory, result = finished
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "arms")
    save = Checkpoints.save

    def interrupted(self, step, state):
        save(self, step, state)
        if step == 4:
            raise Interrupted(15)

    monkeypatch.setattr(Checkpoints, "save", interrupted)
    with pytest.raises(Interrupted):
        independent_loss.run(settings, tmp_path, "the command")
    monkeypatch.setattr(Checkpoints, "save", save)
    assert not (tmp_path / "arms" / "0" / "points" / "00000004.json").exists()
    assert independent_loss.run(settings, tmp_path, "the command") == result


def test_pieces_of_other_settings_are_refused(finished):
    settings, directory, _ = finished
    other = dataclasses.replace(settings, variance_repeats=4)
    with pytest.raises(SomaError, match="made with other settings"):
        independent_loss.run(other, directory, "the command")


def test_a_loss_that_is_not_finite_is_told(finished, tmp_path, monkeypatch):
    settings, directory, _ = finished
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "arms")
    monkeypatch.setattr(
        independent_loss, "losses", lambda states, _: jnp.full_like(states.update, jnp.nan, float)
    )
    with pytest.raises(SomaError, match="after update 0 of the arms is not finite"):
        independent_loss.run(settings, tmp_path, "the command")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"random_seeds": (1, 1)}, "twice"),
        ({"variance_every": 3}, "must be a multiple of config.observe_every=2"),
        ({"updates": 0}, "config.updates must be at least 1"),
        ({"nope": 3}, "config.nope is not a field"),
    ],
)
def test_settings_that_cannot_be_are_refused(base, fields, words):
    with pytest.raises(SomaError, match=words):
        independent_loss.resolve(tiny(base, **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": 1}, "config.run.experts must be at least 2"),
        ({"expert.head_sequences": 2}, "config.run.expert.head_sequences must be 0"),
        ({"expert.decay_to": 0.5}, "config.run.expert.decay_to must be 1.0"),
        ({"expert.own_batch": True}, "config.run.expert.own_batch must be False"),
        ({"expert.probe": "rank_one"}, "config.run.expert.probe must be one of dense, sparse"),
        ({"expert.estimator": "eggroll"}, "config.run.expert.estimator must be 'spsa'"),
        ({"expert.n_pert": 0}, "config.run.expert.n_pert must be at least 1"),
        ({"expert.probe": "cauchy"}, "config.run: config.expert.probe must be one of"),
    ],
)
def test_runs_that_cannot_be_are_refused(base, fields, words):
    config = tiny(base)
    config.run.update_from_flattened_dict(fields)
    with pytest.raises(SomaError, match=words):
        independent_loss.resolve(config)


@pytest.mark.parametrize("size", ["cpu", "paper"])
def test_every_setting_of_the_committed_config_is_good(size):
    settings = independent_loss.resolve(committed(size))
    stage = settings.run.expert
    assert (settings.run.experts, settings.updates, stage.probe) == (4, 1000, "sparse")
    assert (stage.learning_rate, stage.eps) == (1e-3, 1e-3)
    if size == "paper":
        assert (stage.n_pert, stage.sequences, stage.window) == (64, 64, 1024)
        assert stage.updates == 2000


def test_the_command_tells_bad_input_in_a_line(tmp_path):
    line = [sys.executable, "launch/experiment.py", "--experiment=independent_loss"]
    line += [f"--workdir={tmp_path / 'run'}", "--config.run.expert.head_sequences=2"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "config.run.expert.head_sequences must be 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
