"""launch/experiment.py --experiment=estimators at a toy's size."""

import csv
import signal

import jax
import numpy as np
import pytest
from launched import Launched

from soma_jax import model
from soma_jax.config import Stage
from soma_jax.errors import SomaError
from soma_jax.experiments import estimators, gradients

TOY = """
from configs.experiments import estimators


def get_config():
    config = estimators.get_config()
    config.random_seeds = (3, 4)
    config.data.update({data!r})
    config.starts, config.windows, config.repeats, config.warm = (0, 2), 6, 2, 1
    config.window = 8
    config.training.update(sequences=2, window=8, validation_windows=2)
    few = dict(window=8, sequences=4, n_pert=2, validation_windows=2)
    feedback = few | dict(estimator="feedback", weight_decay=0.0, eps=0.05, credit=4)
    backprop = few | dict(estimator="backprop", n_pert=1)
    rest = dict(parameters="all", head_sequences=0)
    with config.unlocked():
        config.estimates = {{"feedback": feedback, "backpropagation": backprop, "SPSA": few}}
        config.rows = {{
            "feedback": dict(expert=feedback | rest, seed=rest),
            "backpropagation": dict(expert=backprop | rest, seed=rest),
            "SPSA": dict(expert=few | dict(head_sequences=2)),
        }}
    config.operations = 81920 * 1500.0
    return config
"""


@pytest.fixture(scope="module")
def toy(corpus):
    return lambda folder: Launched("estimators", TOY.format(data=corpus), folder)


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    launched = toy(tmp_path_factory.mktemp("estimators"))
    code, output = launched.run()
    assert code == 0, output
    return launched


def test_it_measures_every_estimate_and_trains_every_row(finished):
    found = finished.result()
    assert [(c["start"], c["name"]) for c in found["estimates"]] == [
        (start, name) for start in (0, 2) for name in ("SPSA", "backpropagation", "feedback")
    ]
    for cell in found["estimates"]:
        assert list(cell["sites"]) == ["gates", "hidden", "written", "all"]
        for of in cell["sites"].values():
            assert len(of["cosine"]) == len(of["relative_error"]) == 2
            assert -1 <= min(of["cosine"]) <= max(of["cosine"]) <= 1
    assert [row["name"] for row in found["rows"]] == ["SPSA", "backpropagation", "feedback"]
    for row in found["rows"]:
        assert 0.5 < row["operations"] / found["operations"] <= 1
        assert len(row["test"]) == 2
    lines = list(csv.DictReader((finished.workdir / "table.csv").read_text().splitlines()))
    assert len(lines) == 6 * 4
    assert (finished.workdir / "estimators.png").stat().st_size > 10_000
    assert finished.page() == estimators.markdown(found)
    for words in ("halves the gap to backpropagation", "0.", "feedback"):
        assert words in finished.page()


def test_backpropagation_of_all_windows_is_the_exact_gradient_and_noise_is_not():
    params = model.init(jax.random.key(0), model.ExpertConfig(width=4, embedding=4))
    windows = np.random.default_rng(0).integers(0, 256, (4, 9), dtype=np.uint8)
    exact = gradients.exact(params, windows)
    tx, one = estimators._compiled(Stage(estimator="backprop", n_pert=1, sequences=4, window=8))
    estimate, _ = one(params, tx.init(params["body"]), jax.random.key(1), windows)
    wanted = np.concatenate(
        [np.ravel(block[name]) for block in estimate["blocks"] for name in ("mlp_in",)]
    )
    found = dict(estimators._by_site(estimate))
    np.testing.assert_array_equal(found["hidden"], wanted.astype(np.float64))
    assert found["all"].size == sum(found[site].size for site in estimators.SITES)
    unravel = jax.flatten_util.ravel_pytree(params["body"])[1]
    for site, g in estimators._by_site(unravel(exact.gradient)):
        np.testing.assert_allclose(found[site], g, rtol=1e-3, atol=1e-6)


def test_stopped_and_started_again_it_goes_on_to_the_same_result(toy, finished, tmp_path):
    launched = toy(tmp_path)
    launched.stop(signal.SIGKILL, "measured/*/*.json", 3)
    code, output = launched.run()
    assert code == 0, output
    ours, theirs = launched.result(), finished.result()
    assert ours["estimates"] == theirs["estimates"]
    assert [row["test"] for row in ours["rows"]] == [row["test"] for row in theirs["rows"]]


def test_bad_settings_are_refused_by_name(toy, tmp_path):
    config = toy(tmp_path).config()
    config.starts = (0, -1)
    with pytest.raises(SomaError, match=r"config\.starts must be numbers of updates"):
        estimators.resolve(config)
    config.starts = (0,)
    config.estimates["feedback"]["credit"] = 9
    with pytest.raises(SomaError, match=r"config\.estimates\['feedback'\]\.credit is 9"):
        estimators.resolve(config)
