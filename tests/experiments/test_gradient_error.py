"""launch/experiment.py --experiment=gradient_error at a toy's size."""

import csv
import runpy
import signal

import numpy as np
import pytest
from launched import ROOT, Launched

from soma_jax.errors import SomaError
from soma_jax.experiments import gradient_error, gradients

TOY = """
from configs.experiments import gradient_error


def get_config():
    config = gradient_error.get_config()
    config.experts, config.widths, config.n_pert = (1, 2), (10, 7), (2, 8)
    base = {base!r}
    for stage in ("seed", "expert"):
        base[stage]["updates"] = 3
    config.recipe = base
    config.step.update(sequences=2, window=8)
    config.windows = config.repeats = 6
    config.timed_steps = 2
    return config
"""


@pytest.fixture(scope="module")
def toy(base):
    return lambda folder: Launched("gradient_error", TOY.format(base=base), folder)


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory):
    """Told to stop once it has measured the first ensemble, and started again."""
    launched = toy(tmp_path_factory.mktemp("gradient_error"))
    assert launched.stop(signal.SIGTERM, "measured/1.json", 1)[0] == 128 + 15
    code, output = launched.run()
    assert code == 0, output
    return launched


def test_it_measures_every_ensemble_at_every_n_pert(finished):
    found = finished.result()
    rows = found["rows"]
    assert [(r["experts"], r["width"], r["n_pert"]) for r in rows] == [
        (1, 10, 2), (1, 10, 8), (2, 7, 2), (2, 7, 8)
    ]  # fmt: skip
    # One block: 16 d^2 in it, 3 d gains, 2 d_E d in the projections.
    sizes = {n: 16 * d * d + 3 * d + 8 * d for n, d in ((1, 10), (2, 7))}
    for one in found["ensembles"]:
        assert one["parameters"] == one["experts"] * sizes[one["experts"]]
        assert len(one["nu"]) == len(one["shares"]) == one["experts"]
        assert sum(one["shares"]) == pytest.approx(1)
        assert one["byte_forwards"] == (1 + one["experts"]) * 3 * (2 * 4 * 2 + 2) * 16
        for row in (r for r in rows if r["experts"] == one["experts"]):
            assert row["interval"][0] < row["error"] < row["interval"][1]
            assert row["seconds"] > 0
            parts = [
                gradients.predicted_variance(sizes[one["experts"]], nu, row["n_pert"], 2, False)
                for nu in one["nu"]
            ]
            assert row["predicted"] == pytest.approx(np.dot(parts, one["shares"]))
    with (finished.workdir / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(line["error"]) for line in table] == [r["error"] for r in rows]
    assert (finished.workdir / "gradient_error.png").stat().st_size > 10_000
    assert finished.page() == gradient_error.markdown(found)
    assert finished.page().startswith("`python launch/experiment.py --experiment=gradient_error")


def test_the_joint_error_is_of_all_experts_gradients_together(finished, monkeypatch):
    """Experts of known gradients and estimates, in place of those that are measured."""
    known = [np.array([3.0, 4.0]), np.array([0.0, 1.0])]
    estimates = [np.array([[3.0, 5.0], [1.0, 4.0]]), np.array([[2.0, 1.0], [0.0, 1.0]])]
    remaining = iter(range(2))

    def exact(params, windows):
        return gradients.Exact(params, windows, known[next(remaining)], nu=2.0)

    def errors(exact, stage, keys, batches):
        i = [g is exact.gradient for g in known].index(True)
        return ((estimates[i] - known[i]) ** 2).sum(1) / (known[i] ** 2).sum()

    monkeypatch.setattr(gradients, "exact", exact)
    monkeypatch.setattr(gradients, "errors", errors)
    settings = gradient_error.resolve(finished.config())
    workdir = gradient_error.Workdir(finished.workdir / "runs" / "2")
    measured = gradient_error._measured(settings, settings.recipes[1], workdir)
    joint, joint_estimates = np.concatenate(known), np.concatenate(estimates, axis=1)
    expected = ((joint_estimates - joint) ** 2).sum(1) / (joint**2).sum()
    assert measured["rows"][0]["error"] == pytest.approx(expected.mean())


def test_what_other_settings_have_left_is_refused(finished):
    config = finished.config()
    config.repeats = 7
    with pytest.raises(SomaError, match="was made with other settings"):
        gradient_error.run(gradient_error.resolve(config), finished.workdir, "")


def test_bad_input_is_told_in_a_line(toy, tmp_path):
    launched = toy(tmp_path)
    code, output = launched.run("--config.widths=(10,8)")
    assert code == 2
    assert "must be within 5% of each other" in output
    assert "Traceback" not in output
    assert not (launched.workdir / "runs").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": (2, 1)}, "config.experts must be two or more .* rising"),
        ({"widths": (7, 10)}, "config.widths must be two or more .* falling"),
        ({"widths": (10, 7, 5)}, "one for each of config.experts"),
        ({"n_pert": (2,)}, "config.n_pert must be two or more"),
        ({"n_pert": (0, 2)}, "config.n_pert"),
        ({"step.probe": "gaussian"}, "config.step: the prediction is of"),
        ({"step.eps": 1e-9}, "config.step.eps"),
        ({"recipe.expert.probe": "cauchy"}, "config.expert.probe"),
        ({"windows": 1}, "config.windows must be at least 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(toy, tmp_path, fields, words):
    config = toy(tmp_path).config()
    config.unlock()
    config.update_from_flattened_dict(fields)
    with pytest.raises(SomaError, match=words):
        gradient_error.resolve(config)


def lines(errors, half=0.0):
    """Rows of N = 1 and 2 whose errors at 1, 10 and 100 seconds are given."""
    return [
        {"experts": n, "n_pert": 2**i, "seconds": 10.0**i, "error": error,
         "interval": [error * (1 - half), error * (1 + half)], "predicted": error}
        for n, of in zip((1, 2), errors, strict=True)
        for i, error in enumerate(of)
    ]  # fmt: skip


def test_errors_at_equal_seconds_lie_on_the_lines_between_n_pert():
    one, two = lines([[8.0, 4.0, 2.0], [4.0, 2.0, 1.0]], 0.1)[:3], []
    for row in lines([[8.0, 4.0, 2.0], [4.0, 2.0, 1.0]], 0.1)[3:]:
        two.append(row | {"seconds": row["seconds"] * 10**0.5})
    points = gradient_error._at_equal_seconds(one + two)
    assert [p["seconds"] for p in points] == pytest.approx([10**0.5, 10**1.25, 100])
    # Error halves with each factor of 10: at s it is 8 or 4 sqrt(2)... times s^-log10(2).
    for point in points:
        fall = point["seconds"] ** -np.log10(2)
        first, second = point["ensembles"]
        assert first["error"] == pytest.approx(8 * fall)
        assert second["error"] == pytest.approx(4 * 2**0.5 * fall)
        assert second["low"] == pytest.approx(0.9 * second["error"])
        assert second["high"] == pytest.approx(1.1 * second["error"])


@pytest.mark.parametrize(
    ("errors", "half", "words"),
    [
        ([[8.0, 4.0, 2.0], [4.0, 2.0, 1.0]], 0.1, "reproduced, in 3 of 3"),
        ([[8.0, 4.0, 2.0], [4.0, 2.0, 1.0]], 0.5, "undecided within the intervals"),
        (
            [[4.0, 2.0, 1.0], [8.0, 4.0, 2.0]],
            0.1,
            "**not reproduced**: in 3 of 3 the error is higher",
        ),
    ],
)
def test_the_claim_is_said_plainly(errors, half, words):
    points = gradient_error._at_equal_seconds(lines(errors, half))
    assert f"the times above: {words}" in gradient_error._verdict(points)[-1]


def test_steps_of_no_common_time_are_not_compared():
    rows = lines([[8.0, 4.0, 2.0], [4.0, 2.0, 1.0]])
    for row in rows[3:]:
        row["seconds"] *= 1000
    assert gradient_error._at_equal_seconds(rows) == []
    assert "undecided" in gradient_error._verdict([])[0]


@pytest.mark.parametrize("size", ["cpu", "paper"])
def test_the_committed_settings_are_good(size):
    path = ROOT / "configs" / "experiments" / "gradient_error.py"
    settings = gradient_error.resolve(runpy.run_path(str(path))["get_config"](size))
    sizes = [c.experts * c.expert_shape.body_parameters for c in settings.recipes]
    assert max(sizes) / min(sizes) < {"cpu": 1.005, "paper": 1.03}[size]
