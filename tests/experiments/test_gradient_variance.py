"""Variances against brute force, and the experiment at a toy's size."""

import csv
import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from soma_jax import ensemble, expert, model, probes, randomness
from soma_jax.config import Data, Stage
from soma_jax.errors import SomaError
from soma_jax.experiments import gradient_variance
from soma_jax.interrupt import Interrupted

ROOT = Path(__file__).parents[2]
MODEL = {"width": 4, "embedding": 4, "blocks": 1, "recurrence": "lstm", "tied": True}
STAGE = Stage(updates=2, n_pert=2, sequences=2, window=8, validation_windows=2, eps=1e-4)


def committed(size="cpu"):
    path = ROOT / "configs" / "experiments" / "gradient_variance.py"
    namespace: dict = {"__file__": str(path)}
    exec(compile(path.read_text(), path, "exec"), namespace)
    config = namespace["get_config"](size)
    config.unlock()
    return config


def tiny(data, **fields):
    return ml_collections.ConfigDict(
        {
            "random_seed": 3, "model": MODEL, "data": dataclasses.asdict(data),
            "stage": dataclasses.asdict(STAGE),
            "experts": (1, 3), "n_pert": (1, 4), "sequences": 2, "repeats": 4, "checked": 2,
        }
        | fields
    )  # fmt: skip


def signs_of(q):
    """Every direction of one block, and its probability: a coordinate is 0 with 1 - q, else +-1."""
    for z in itertools.product((-1, 0, 1), repeat=len(q)):
        yield np.array(z), np.prod([qi / 2 if zi else 1 - qi for zi, qi in zip(z, q, strict=True)])


@pytest.mark.parametrize("q", [[1.0, 1.0], [0.5, 1.0], [0.5, 0.5]])
@pytest.mark.parametrize("summed", [False, True])
def test_predicted_is_the_mean_over_every_direction(q, summed):
    gradient = np.array([[0.3, -1.2], [2.0, 0.7], [-0.4, 0.1]])
    blocks, total = len(gradient), 0.0
    for drawn in itertools.product(signs_of(q), repeat=blocks):
        z = np.array([one for one, _ in drawn])
        along = (z * gradient).sum(1, keepdims=True)
        estimate = (along.sum() if summed else along) * z
        error = np.square(estimate - np.array(q) * gradient).sum()
        total += np.prod([p for _, p in drawn]) * error
    found = gradient_variance.predicted(gradient, np.array(q), 1, blocks if summed else 1)
    assert found == pytest.approx(total / np.square(gradient).sum(), rel=1e-12)
    four = gradient_variance.predicted(gradient, np.array(q), 4, blocks if summed else 1)
    assert four == pytest.approx(found / 4)


def test_dense_prediction_is_the_papers():
    gradient = np.random.default_rng(0).normal(size=(4, 10))
    for n_pert in (1, 8):
        found = [gradient_variance.predicted(gradient, np.ones(10), n_pert, n) for n in (1, 4)]
        assert found == pytest.approx([9 / n_pert, 39 / n_pert])


@pytest.mark.parametrize("size", [1, 2, 6])
def test_squared_errors_are_those_of_the_estimates(size):
    rng = np.random.default_rng(size)
    weights, z, mean = rng.normal(size=(3, 6)), rng.normal(size=(6, 5)), rng.normal(size=5)
    with jax.enable_x64(True):
        found = gradient_variance.squared_errors(
            *map(jnp.asarray, (weights, z @ z.T, z @ mean, mean @ mean)), size
        )
    for i, group in itertools.product(range(3), range(6 // size)):
        some = slice(group * size, (group + 1) * size)
        error = weights[i, some] @ z[some] / size - mean
        assert found[i, group] == pytest.approx(error @ error, rel=1e-12)


@pytest.mark.parametrize("probe", gradient_variance.PROBES)
def test_measured_errors_are_those_of_estimates_written_out(probe):
    """Estimates from the reverse-mode gradient's product with each direction, one by one."""
    settings = gradient_variance.resolve(tiny(Data()))
    experts = [model.init(jax.random.key(i), settings.expert_shape) for i in range(3)]
    stacked = ensemble.stack([expert.init_state(e, STAGE) for e in experts]).params
    windows = np.random.default_rng(0).integers(0, 256, (3, 2, 9)).astype(np.uint8)
    found = gradient_variance.measure(stacked, windows, probe, settings)
    errors = np.array(found["errors"])
    assert errors.shape == (4, 2, 2, 2)  # repeats, arms, numbers of experts, n_pert

    with jax.enable_x64(True):
        gradients, unravel = [], None
        for params, some in zip(experts, windows, strict=True):
            wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)

            def loss(body, wide=wide, some=some):
                return model.sequence_losses({"head": wide["head"], "body": body}, some).mean()

            flat, unravel = ravel_pytree(jax.jit(jax.grad(loss))(wide["body"]))
            gradients.append(np.asarray(flat))
        g = np.array(gradients)
        assert unravel is not None
        like = unravel(jnp.zeros(g.shape[1]))
        q = np.asarray(
            ravel_pytree(
                jax.tree.map(
                    lambda x: 0 * x + (0.5 if probe == "sparse" and x.ndim == 2 else 1), like
                )
            )[0]
        )
        for repeat in range(4):
            key = randomness.key(3, "directions", repeat)
            law = jax.jit(lambda key, j: ravel_pytree(probes.LAWS[probe](key, j, like))[0])
            z = np.array([[law(jax.random.fold_in(key, e), j) for j in range(4)] for e in range(3)])
            own = np.einsum("ejd,ed->ej", z, g)
            for arm, (k, count), (m, size) in itertools.product(
                (0, 1), enumerate((1, 3)), enumerate((1, 4))
            ):
                weights = own[:count].sum(0) + 0 * own[:count] if arm else own[:count]
                each = (weights[:, :, None] * z[:count]).reshape(count, -1, size, g.shape[1])
                error = each.mean(2) - (q * g[:count])[:, None]
                expected = np.square(error).sum((0, 2)).mean() / np.square(g[:count]).sum()
                assert errors[repeat, arm, k, m] == pytest.approx(expected, rel=1e-9)
    for arm, joined in enumerate(((1, 1), (1, 3))):
        for k, count in enumerate((1, 3)):
            expected = [gradient_variance.predicted(g[:count], q, n, joined[k]) for n in (1, 4)]
            assert found["predicted"][arm][k] == pytest.approx(expected)
    # Central differences are off by a relative eps^2.
    assert found["finite"] == pytest.approx(errors[:2, 0, 1, 1], rel=1e-5)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    settings = gradient_variance.resolve(tiny(Data(**corpus)))
    directory = tmp_path_factory.mktemp("gradient_variance")
    return settings, directory, gradient_variance.run(settings, directory, "the command")


def test_it_writes_a_table_a_figure_and_a_result(finished):
    _, directory, result = finished
    assert json.loads((directory / "result.json").read_text()) == result
    with (directory / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(result["rows"]) == 2 * 2 * 2 * 2
    for line, row in zip(lines, result["rows"], strict=True):
        assert float(line["ratio_mean"]) == row["ratio"]["mean"]
        assert float(line["summed_predicted"]) == row["summed"]["predicted"]
        of_one = row["experts"] == 1  # one expert's sum is its own loss
        assert (row["ratio"]["mean"] == pytest.approx(1)) == of_one
        assert row["ratio"]["predicted"] == pytest.approx(1 / row["experts"], rel=1e-2)
    dense = [row["independent"]["predicted"] for row in result["rows"] if row["probe"] == "dense"]
    assert set(np.round(dense, 9)) == {267.0, 267 / 4}  # of 16 * 4^2 + 3 * 4 parameters
    page = (directory / "gradient_variance.md").read_text()
    assert page.startswith("`the command`")
    assert page == gradient_variance.markdown(result)
    assert (directory / "gradient_variance.png").stat().st_size > 10_000


def test_interrupted_it_goes_on_to_the_same_result(finished, tmp_path, monkeypatch):
    settings, _, result = finished
    measure, calls = gradient_variance.measure, []

    def interrupted(*arguments):
        calls.append(arguments[2])
        if len(calls) == 3:
            raise Interrupted(15)
        return measure(*arguments)

    monkeypatch.setattr(gradient_variance, "measure", interrupted)
    with pytest.raises(Interrupted):
        gradient_variance.run(settings, tmp_path, "the command")
    assert gradient_variance.run(settings, tmp_path, "the command") == result
    assert calls == ["dense", "sparse", "dense", "dense", "sparse"]


def test_pieces_of_other_settings_are_refused(finished):
    settings, directory, _ = finished
    other = dataclasses.replace(settings, sequences=1)
    with pytest.raises(SomaError, match="made with other settings"):
        gradient_variance.run(other, directory, "the command")


def test_a_claim_is_not_undecided_or_reproduced_by_its_interval():
    def agreement(*found):
        some = [
            {"mean": mean, "interval": [mean - half, mean + half], "predicted": 1.0}
            for mean, half in found
        ]
        return gradient_variance._agreement("it", some)

    assert "it: reproduced (2 of 2" in agreement((1.01, 0.02), (0.99, 0.02))
    assert "it: reproduced (1 of 2" in agreement((1.01, 0.02), (0.975, 0.02))
    assert "**not reproduced** (1 of 2" in agreement((1.01, 0.02), (0.96, 0.02))
    assert "**undecided**" in agreement((1.01, 0.02), (1.1, 0.3))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": ()}, "config.experts must be positive whole numbers"),
        ({"experts": (2, 1)}, "config.experts must rise"),
        ({"n_pert": (0, 2)}, "config.n_pert must be positive whole numbers"),
        ({"n_pert": (3, 4)}, "3 does not divide 4"),
        ({"sequences": 3}, "config.sequences is 3"),
        ({"checked": 5}, "config.checked must be at most config.repeats=4"),
        ({"stage": {"n_pert": 3}}, r"config\.stage\.\w+ is missing"),
        ({"nope": 3}, "config.nope is not a field"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, words):
    with pytest.raises(SomaError, match=words):
        gradient_variance.resolve(tiny(Data(), **fields))


@pytest.mark.parametrize("size", ["cpu", "paper"])
def test_every_setting_of_the_committed_config_is_good(size):
    settings = gradient_variance.resolve(committed(size))
    assert set(settings.experts) >= {1, 2, 4, 8}
    assert settings.n_pert == (1, 2, 4, 8, 16, 32, 64)
    if size == "paper":
        assert settings.experts[-1] == 256
        assert (settings.sequences, settings.stage.window) == (64, 1024)


def test_the_command_tells_bad_input_in_a_line(tmp_path):
    line = [sys.executable, "launch/experiment.py", "--experiment=gradient_variance"]
    line += [f"--workdir={tmp_path / 'run'}", "--config.n_pert=(3,4)"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "3 does not divide 4" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
