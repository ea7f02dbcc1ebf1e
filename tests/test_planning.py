"""The planner against curves whose law is known, a schedule simulated update by update, and sums
over all directions."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from soma_jax import planning
from soma_jax.config import default_config, resolve
from soma_jax.errors import SomaError
from soma_jax.files import write_json
from soma_jax.workdir import Workdir

LAW = {"floor": 2.1, "gain": 9.0, "offset": 60.0, "power": 0.6}
LAWS = (
    LAW,
    {"floor": 0.4, "gain": 5.0, "offset": 9.0, "power": 0.25},
    {"floor": 2.5, "gain": 2000.0, "offset": 400.0, "power": 1.3},
)


def true_loss(updates, floor, gain, offset, power):
    return floor + gain * (np.asarray(updates, float) + offset) ** -power


def make_run(
    path, *, experts=2, devices=2, n_pert=64, sequences=64, each=0.5, losses=None, seed=0, **expert
):
    """A finished run's files: ten looks, `each` seconds an update of all experts in step, but for
    the compilation before the first and the looks."""
    settings = default_config()
    settings.experts, settings.random_seed = experts, seed
    settings.expert.update({"updates": 200, "n_pert": n_pert, "sequences": sequences, **expert})
    workdir = Workdir(path)
    workdir.adopt(resolve(settings), {"train": "a", "valid": "b", "test": "c"})
    looks = np.arange(20, 201, 20)
    losses = true_loss(looks, **LAW) if losses is None else losses
    seconds, lines = 30.0, []
    for update in range(1, 201):
        lines.append({"update": update, "seconds": seconds})
        seconds += each + (7.0 if update in looks else 0.0)
    curve = [{"stage": "seed", "update": 5, "nats_per_byte": 5.0}]
    curve += [
        {"stage": "experts", "update": int(u), "nats_per_byte": float(x)}
        for u, x in zip(looks, losses, strict=True)
    ]
    for file, records in ((workdir.expert(0) / "metrics.jsonl", lines), (workdir.curve, curve)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(r) + "\n" for r in records))
    write_json(workdir.summary, {"devices": devices})
    return path


@pytest.mark.parametrize("law", LAWS)
def test_a_curve_without_noise_gives_its_law_back(law):
    updates = np.linspace(60, 1200, 20)
    found = planning.fit(updates, true_loss(updates, **law), "it")
    assert found.residual < 1e-6
    for name, value in law.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name
    mean, low, high = found.predict(20_000)
    assert mean == pytest.approx(true_loss(20_000, **law), abs=1e-4)
    assert low <= mean <= high < low + 1e-3


def test_its_derivatives_are_those_of_the_law():
    theta, x = np.array([0.3, 0.2, -1.0, 0.7]), np.linspace(0.1, 4, 9)
    _, slopes = planning._law(theta, x)
    for i in range(4):
        step = 1e-6 * np.eye(4)[i]
        difference = planning._law(theta + step, x)[0] - planning._law(theta - step, x)[0]
        np.testing.assert_allclose(slopes[:, i], difference / 2e-6, atol=1e-8)


@pytest.mark.parametrize("noise", [0.0005, 0.002, 0.02])
@pytest.mark.parametrize("law", LAWS)
def test_intervals_hold_what_they_say_and_are_of_use(law, noise):
    """Of 200 noisy curves of ten points, at 1.5 and at 4 times what was measured. At least 90% are
    asked for: of 95%, fewer than 180 in 200 are a chance of 1 in 900. Wider than 40 times the noise
    they would be of no use."""
    rng = np.random.default_rng(0)
    updates, ahead = np.linspace(100, 1000, 10), np.array([1500, 4000])
    covered, halves = [], []
    for _ in range(200):
        curve = true_loss(updates, **law) + noise * rng.normal(size=10)
        mean, low, high = planning.fit(updates, curve, "it").predict(ahead)
        measured = true_loss(ahead, **law) + noise * rng.normal(size=2)
        covered.append((low <= measured) & (measured <= high))
        halves.append((high - low) / 2)
        assert (low <= mean).all()
        assert (mean <= high).all()
    assert (np.sum(covered, 0) >= 180).all()
    assert (np.median(halves, 0) < 40 * noise).all()


def test_a_flat_curve_stays_flat():
    rng = np.random.default_rng(1)
    losses = 2.6 + 0.005 * rng.normal(size=10)
    mean, low, high = planning.fit(np.arange(1, 11), losses, "it").predict(40)
    assert low < 2.6 < high
    assert mean == pytest.approx(2.6, abs=0.1)


@pytest.mark.parametrize(
    ("losses", "words"),
    [([3.0, 2.9, 2.8, 2.7], "runs/x: its curve has 4 points"), ([3, 2, np.nan, 1, 1], "finite")],
)
def test_too_few_points_and_broken_losses_are_refused_by_name(losses, words):
    with pytest.raises(SomaError, match=words):
        planning.fit(np.arange(len(losses)), losses, "runs/x")


def test_the_step_bound_is_where_descent_ends_to_be_sure():
    """The mean over all pairs of dense directions, on L |x|^2 / 2 in three dimensions, where it is
    exact: a step of eta descends in the mean by at least eta |g|^2 / 2 up to the bound."""
    smoothness, n_pert, x = 3.0, 2, np.array([0.3, -1.2, 0.7])
    gradient = smoothness * x
    signs = [np.array(z) for z in itertools.product([-1.0, 1.0], repeat=3)]

    def descent(eta):
        steps = [
            x - eta * sum((z @ gradient) * z for z in directions) / n_pert
            for directions in itertools.product(signs, repeat=n_pert)
        ]
        return smoothness / 2 * (x @ x - np.mean([step @ step for step in steps]))

    bound = planning.step_bound(3, n_pert) / smoothness
    assert descent(bound) == pytest.approx(bound * gradient @ gradient / 2)
    assert descent(0.99 * bound) > 0.99 * bound * gradient @ gradient / 2
    assert descent(1.01 * bound) < 1.01 * bound * gradient @ gradient / 2


def setting(tmp_path, name="run", **values):
    return planning.read(make_run(tmp_path / name, **values))


@pytest.mark.parametrize(
    ("experts", "devices", "seconds"),
    [
        (2, 2, 0.5),  # an expert on each
        (4, 2, 0.25),  # two on each, one after the other
        (1, 2, 1.0),  # both have half of its directions
        (3, 2, 1 / 3),  # 2 does not divide 3: the directions are split
        (2, 3, 0.5),  # one device is left out
    ],
)
def test_an_updates_device_seconds_are_read_without_compilation_and_looks(
    tmp_path, experts, devices, seconds
):
    found = setting(tmp_path, experts=experts, devices=devices)
    assert found.seconds == pytest.approx(seconds)
    assert found.updates.tolist() == list(range(20, 201, 20))
    np.testing.assert_allclose(found.losses, true_loss(found.updates, **LAW))


def test_operations_are_the_papers_count(tmp_path):
    found = setting(tmp_path, n_pert=16, sequences=8, window=128)
    assert found.config.expert.head_sequences == 0
    assert found.operations == 2 * 128 * 16 * 8 * 81920  # 2 T n_pert B F_N


def simulated(setting, limits):
    """The most updates of every expert, by giving experts to devices until something runs out."""
    updates = 0
    while True:
        busy_until, spent, operations = [0.0] * limits.devices, 0.0, 0.0
        for _ in range(setting.config.experts):  # one after the other, to whoever is free first
            device = busy_until.index(min(busy_until))
            for _ in range(updates + 1):
                busy_until[device] += setting.seconds
                spent += setting.seconds
                operations += setting.operations
        if (
            max(busy_until) > limits.seconds
            or spent > limits.device_seconds
            or operations > limits.operations
        ):
            return updates
        updates += 1


@pytest.mark.parametrize("experts", [1, 2, 3, 5])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_updates_within_limits_are_those_of_a_simulated_schedule(tmp_path, experts, devices):
    # Times are sums of powers of two: exact in binary, as the count must be.
    some = dataclasses.replace(setting(tmp_path, experts=experts), seconds=0.375)
    for limits in (
        planning.Limits(devices, seconds=9.0),
        planning.Limits(devices, seconds=0.25),
        planning.Limits(devices, device_seconds=11.0),
        planning.Limits(devices, operations=17 * some.operations),
        planning.Limits(devices, seconds=6.0, device_seconds=7.5),
    ):
        expected = simulated(some, limits)
        assert planning.updates_within(some, limits) == expected
        law = planning.fit(some.updates, some.losses, some.name)
        option = planning.option(some, law, limits)
        assert option.seconds <= limits.seconds
        assert option.device_seconds <= limits.device_seconds
        assert option.seconds == expected * planning.seconds_of_round(some, devices)


def options_of(settings, limits):
    return [planning.option(s, planning.fit(s.updates, s.losses, s.name), limits) for s in settings]


def test_the_lowest_prediction_within_the_limits_is_chosen(tmp_path):
    better = true_loss(np.arange(20, 201, 20), **LAW) - 0.5
    slow = setting(tmp_path, "slow", each=50.0, losses=better)
    fast = setting(tmp_path, "fast")
    short = options_of([slow, fast], planning.Limits(2, seconds=40))
    assert (short[0].updates, short[1].updates) == (0, 80)
    assert planning.chosen(short) is short[1]
    assert "no update fits" in planning.cells(short[0])
    assert "extrapolat" not in planning.verdict(short)
    early = options_of([fast], planning.Limits(2, seconds=5))
    assert "extrapolates (before the first look" in planning.verdict(early)
    assert "Not told apart" not in planning.verdict(short)
    long = options_of([slow, fast], planning.Limits(2, seconds=20_000))
    assert planning.chosen(long) is long[0]
    assert "extrapolates (x 2.00; measured: 20 to 200 updates)" in planning.verdict(long)
    assert "x 2.00" in planning.cells(long[0])
    assert long[0].loss == pytest.approx(true_loss(400, **LAW) - 0.5, abs=1e-3)
    with pytest.raises(SomaError, match="not one update"):
        planning.chosen(options_of([slow, fast], planning.Limits(2, seconds=0.1)))


def test_settings_whose_intervals_meet_are_named(tmp_path):
    rng = np.random.default_rng(2)
    looks = np.arange(20, 201, 20)
    noisy = [true_loss(looks, **LAW) + 0.01 * rng.normal(size=10) for _ in range(2)]
    some = [setting(tmp_path, str(i), losses=x, n_pert=32 + i) for i, x in enumerate(noisy)]
    options = options_of(some, planning.Limits(2, seconds=100))
    other = next(o for o in options if o is not planning.chosen(options))
    assert f"Not told apart from it, since the intervals meet: {other.name}" in planning.verdict(
        options
    )


def test_runs_that_differ_in_their_seed_are_one_setting(tmp_path):
    some = [setting(tmp_path, f"n2/{i}", seed=i, each=0.5 + i / 4) for i in range(3)]
    other = setting(tmp_path, "n4/0", experts=4)
    found = planning.by_setting([*some, other])
    assert [s.name for s in found] == [str(tmp_path / "n2"), str(tmp_path / "n4" / "0")]
    assert len(found[0].losses) == len(found[0].updates) == 30
    assert found[0].seconds == pytest.approx(0.75)  # the median
    with pytest.raises(SomaError, match="not validated on the same text"):
        planning.by_setting([other, dataclasses.replace(other, scored="another")])


def test_held_out_losses_are_not_seen(tmp_path):
    whole = setting(tmp_path)
    found = planning.hold_out(whole, 0.6)
    assert found["updates"] == [140, 160, 180, 200]
    np.testing.assert_allclose(found["predicted"], true_loss(found["updates"], **LAW), atol=1e-3)
    assert found["last"] == pytest.approx(true_loss(120, **LAW))
    rest = whole.updates > 120
    other = planning.hold_out(dataclasses.replace(whole, losses=whole.losses + rest), 0.6)
    assert other["predicted"] == found["predicted"]
    np.testing.assert_allclose(other["losses"], np.add(found["losses"], 1))


def test_a_falling_rate_and_a_seed_are_told(tmp_path):
    steady = setting(tmp_path)
    config = dataclasses.replace(
        steady.config, seed=dataclasses.replace(steady.config.seed, updates=0)
    )
    assert planning.caveats([dataclasses.replace(steady, config=config)]) == []
    assert len(planning.caveats([steady])) == 1
    falling = setting(tmp_path, "falling", decay_to=0.1)
    seed, rate = planning.caveats([falling, steady])
    assert "seed" in seed
    assert f"({falling.name})" in rate


def test_no_interval_rises_beyond_the_last_point():
    """Seven points of much noise say little, but a law that fits them falls."""
    rng = np.random.default_rng(0)
    updates = np.linspace(10, 70, 7)
    law = planning.fit(updates, true_loss(updates, **LAW) + 0.1 * rng.normal(size=7), "it")
    high = law.predict(np.geomspace(70, 7000, 20)).high
    assert high.max() == high[0]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda run: run.config.unlink(), "is not a workdir"),
        (lambda run: run.summary.unlink(), "is not finished"),
        (lambda run: run.summary.write_text("{}"), "lack 'devices'"),
        (lambda run: run.curve.write_text("{\n"), "curve.jsonl:1 is not JSON"),
        (lambda run: (run.expert(0) / "metrics.jsonl").unlink(), "cannot read .*metrics.jsonl"),
        (lambda run: (run.expert(0) / "metrics.jsonl").write_text(""), "two lines"),
    ],
)
def test_damaged_runs_are_refused_by_name(tmp_path, damage, words):
    path = make_run(tmp_path / "run")
    damage(Workdir(path))
    with pytest.raises(SomaError, match=words):
        planning.read(path)
