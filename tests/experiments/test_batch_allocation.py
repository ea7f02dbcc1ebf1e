"""launch/experiment.py --experiment=batch_allocation at a toy's size."""

import copy
import csv
import runpy
import signal

import numpy as np
import pytest
from launched import ROOT, Launched

from soma_jax.errors import SomaError
from soma_jax.experiments import batch_allocation, gradients

TOY = """
from configs.experiments import batch_allocation


def get_config():
    config = batch_allocation.get_config()
    config.random_seeds = (3, 4)
    config.data.update({data!r})
    config.widths, config.budgets, config.sequences = (2,), ((4, 8),), (1, 8)
    config.windows = config.repeats = 6
    few = dict(window=16, validation_windows=2)
    config.training.update(updates=4, n_pert=4, head_sequences=2, **few)
    config.measuring.window = 8
    config.check.update(updates=2, learning_rate=1e-2, **few)
    config.allocations = ((1, 4), (4, 1))
    return config
"""


@pytest.fixture(scope="module")
def toy(corpus):
    return lambda folder: Launched("batch_allocation", TOY.format(data=corpus), folder)


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    launched = toy(tmp_path_factory.mktemp("batch_allocation"))
    code, output = launched.run()
    assert code == 0, output
    return launched


def test_it_measures_the_grid_and_the_check(finished):
    found = finished.result()
    assert [(e["width"], e["start"]) for e in found["experts"]] == [(2, "drawn"), (2, "trained")]
    nu = {(e["width"], e["start"]): (e["parameters"], e["nu"]) for e in found["experts"]}
    assert len(set(nu.values())) == 2
    cells = [
        (r["width"], r["start"], r["own_batch"], r["n_pert"] * r["sequences"], r["sequences"])
        for r in found["rows"]
    ]
    assert cells == [
        (2, start, own, budget, sequences)
        for start in ("drawn", "trained")
        for own in (False, True)
        for budget, sequences in ((4, 1), (8, 1), (8, 8))
    ]
    for row in found["rows"]:
        assert row["interval"][0] < row["measured"] < row["interval"][1]
        assert row["predicted"] == gradients.predicted_variance(
            *nu[row["width"], row["start"]], row["n_pert"], row["sequences"], row["own_batch"]
        )
    check = found["check"]
    assert [(r["n_pert"], r["sequences"]) for r in check["runs"]] == [(1, 4), (4, 1)]
    assert check["byte_forwards"] == 2 * 2 * 4 * 16  # updates, signs, windows, bytes
    losses = [loss for r in check["runs"] for loss in (r["start"], *r["losses"])]
    assert len(set(losses)) == 5  # one start; every run another loss
    with (finished.workdir / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(line["measured"]) for line in table] == [r["measured"] for r in found["rows"]]
    assert (finished.workdir / "batch_allocation.png").stat().st_size > 10_000
    assert finished.page() == batch_allocation.markdown(found)
    assert finished.page().startswith("`python launch/experiment.py --experiment=batch_allocation")


@pytest.mark.slow
def test_stopped_and_killed_it_goes_on_to_the_same_result(finished, toy, tmp_path):
    launched = toy(tmp_path)
    pieces = "measured/*/*.json"
    assert launched.stop(signal.SIGTERM, pieces, 1)[0] == 128 + 15
    assert launched.stop(signal.SIGKILL, pieces, 7)[0] == -9
    code, output = launched.run()
    assert code == 0, output
    ours, theirs = launched.result(), finished.result()
    for found in (ours, theirs):
        found.pop("command"), found.pop("date")
    assert ours == theirs


def test_what_other_settings_have_left_is_refused(finished):
    config = finished.config()
    config.repeats = 7
    with pytest.raises(SomaError, match="was made with other settings"):
        batch_allocation.run(batch_allocation.resolve(config), finished.workdir, "")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"widths": (0,)}, "config.widths must be different positive whole numbers"),
        ({"widths": (3, 3)}, "config.widths must be different"),
        ({"widths": (2, 3)}, "one K or more for each of config.widths"),
        ({"budgets": (4,)}, "config.budgets must be different positive whole numbers"),
        ({"budgets": ((4, 5),), "sequences": (2, 4)}, "config.budgets has 5, which no number"),
        ({"allocations": ((4, 4), (2, 2))}, "pairs .* of one product"),
        ({"allocations": ((4, 4),)}, "two pairs"),
        ({"random_seeds": ()}, "config.random_seeds"),
        ({"repeats": 1}, "config.repeats must be at least 2"),
        ({"measuring.probe": "sparse"}, "config.measuring: the prediction is of"),
        ({"measuring.eps": 1e-9}, "config.measuring.eps"),
        ({"training.probe": "cauchy"}, "config.training.probe"),
        ({"check.head_sequences": 9}, "config.check.head_sequences"),
        ({"nope": 1}, "nope is not a field"),
    ],
)
def test_settings_that_cannot_be_are_refused(toy, tmp_path, fields, words):
    config = toy(tmp_path).config()
    config.unlock()
    config.update_from_flattened_dict(fields)
    with pytest.raises(SomaError, match=words):
        batch_allocation.resolve(config)


@pytest.mark.parametrize(
    ("parameters", "nu", "budget"), [(501, 60.0, 1000), (501, 0.01, 64), (3, 900.0, 64)]
)
def test_the_best_batch_has_the_lowest_predicted_variance(parameters, nu, budget):
    grid = np.geomspace(1, budget, 100_001)
    v = gradients.predicted_variance(parameters, nu, budget / grid, grid, False)
    best = grid[v.argmin()]
    assert batch_allocation.best_batch(parameters, nu, budget) == pytest.approx(best, rel=1e-3)


def test_the_page_says_what_came_out(finished):
    """The claims, where every measurement is the prediction, and where one is not."""

    def page(change):
        found = copy.deepcopy(finished.result())
        for row in found["rows"]:
            row["measured"] = row["predicted"]
            row["interval"] = [0.99 * row["predicted"], 1.01 * row["predicted"]]
        for one in found["check"]["runs"]:
            one["losses"] = [3.0, 3.1]
        change(found)
        found["optima"] = batch_allocation._optima(found["experts"], found["rows"])
        return batch_allocation.markdown(found)

    def worse(found):
        for row in found["rows"]:
            if not row["own_batch"] and row["n_pert"] * row["sequences"] == 8:
                row["measured"] = 1 / row["measured"]
                row["interval"] = [0.99 * row["measured"], 1.01 * row["measured"]]

    def wide(found):
        for row in found["rows"]:
            row["interval"] = [0.1 * row["measured"], 10 * row["measured"]]

    good = page(lambda found: None)
    assert "B* is the best B: reproduced." in good
    assert "v(n, B): reproduced. 12 of 12 intervals" in good
    assert "makes no difference: reproduced" in good
    unclear = page(wide)
    assert "B* is the best B: reproduced in 2 of 4 cases, undecided in the others" in unclear
    assert "(the best one is the predicted one in 4)" in unclear
    bad = page(worse)
    assert "B* is the best B: **not reproduced** in 2 of 4" in bad
    assert "v(n, B): **not reproduced** within the intervals. 8 of 12" in bad
    for losses, words in ((3.2, 3.3), "**not reproduced**"), ((3.0, 3.2), "undecided"):

        def change(found, losses=losses):
            found["check"]["runs"][1]["losses"] = list(losses)

        assert f"makes no difference: {words}" in page(change)


@pytest.mark.parametrize("size", ["cpu", "paper"])
def test_the_committed_settings_are_good(size):
    path = ROOT / "configs" / "experiments" / "batch_allocation.py"
    settings = batch_allocation.resolve(runpy.run_path(str(path))["get_config"](size))
    assert list(settings.grids) == [4, 32]
    (product,) = {stage.n_pert * stage.sequences for stage in settings.runs}
    assert product == {"cpu": 256, "paper": 65536}[size]
