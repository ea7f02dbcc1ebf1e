"""The training loop: resume, damage, failures, interruptions, metric lines."""

import json
import math
import os
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from soma_jax import expert, model, randomness, training
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Run, Stage
from soma_jax.errors import SomaError
from soma_jax.interrupt import Interrupted, Interruptions

SHAPE = model.ExpertConfig(width=8, blocks=1, embedding=8)
STAGE = Stage(
    updates=12,
    n_pert=4,
    sequences=2,
    window=8,
    head_sequences=2,
    learning_rate=1e-2,
    eps=1e-2,
    patience=6,
    validate_every=3,
    validation_windows=2,
)
RUN = Run(log_every=2, checkpoint_seconds=1e-9)  # a checkpoint after every update


class Stream:
    """Batches that are a function of the update, like the real ones; may be told to misbehave."""

    def __init__(self, seed, stage=STAGE):
        self.seed, self.stage, self.at = seed, stage, {}

    def __getitem__(self, step):
        if step in self.at:
            self.at[step]()
        rng = np.random.default_rng((self.seed, step))
        shape = (self.stage.windows_per_update, self.stage.window + 1)
        return rng.integers(0, 256, shape, dtype=np.uint8)


def make_trainee(directory, index, start=None, stage=STAGE):
    return training.Trainee(
        directory=directory / f"{index:03d}",
        start=start or expert.init_state(model.init(randomness.key(index, "init"), SHAPE), stage),
        stream=Stream(index, stage),
        validation=np.full((stage.validation_windows, stage.window + 1), 65 + index, np.uint8),
        key=randomness.key(0, "probes", index),
    )


def train(trainees, stage=STAGE, run=RUN, **kwargs):
    with Interruptions() as interruptions:
        return training.train("test", trainees, stage, run, interruptions, **kwargs)


def metrics(trainee):
    """The metric lines without the seconds, which differ from run to run."""
    lines = (trainee.directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def assert_same(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    trainees = [make_trainee(directory, i) for i in range(2)]
    return train(trainees), [metrics(t) for t in trainees]


def check_against(undisturbed, trainees, states):
    assert_same(states, undisturbed[0])
    assert [metrics(t) for t in trainees] == undisturbed[1]


def test_it_trains_and_tells(undisturbed):
    states, lines = undisturbed
    assert [int(s.update) for s in states] == [12, 12]
    assert [line["update"] for line in lines[0]] == [1, 2, 3, 4, 6, 8, 9, 10, 12]
    assert [line["update"] for line in lines[0] if "validation" in line] == [3, 6, 9, 12]
    assert lines[0][-1]["byte_forwards"] == 12 * (2 * 4 * 2 + 2) * 8
    assert all(0 < line["loss"] < 7 for line in lines[0])
    assert lines[0] != lines[1]


def test_a_rerun_when_finished_does_nothing(undisturbed, tmp_path):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    train(trainees)
    for t in trainees:
        t.stream.at = dict.fromkeys(range(99), pytest.fail)
    check_against(undisturbed, trainees, train(trainees))


def test_each_signal_saves_and_the_same_call_goes_on(undisturbed, tmp_path):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    run = Run(log_every=2, checkpoint_seconds=1e9)
    for step, signum in ((2, signal.SIGTERM), (3, signal.SIGINT), (7, signal.SIGTERM)):
        trainees[0].stream.at = {step: lambda s=signum: os.kill(os.getpid(), s)}
        with pytest.raises(Interrupted) as stop:
            train(trainees, run=run)
        assert stop.value.signum == signum
        assert Checkpoints(trainees[1].directory / "checkpoints").steps()[-1] == step + 1
    trainees[0].stream.at = {}
    check_against(undisturbed, trainees, train(trainees, run=run))


class PowerCut(BaseException):
    pass


def cut():
    raise PowerCut


def test_killed_at_any_update_it_ends_the_same(undisturbed, tmp_path):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    for step in (0, 1, 5, 6, 11):  # before the first checkpoint, at and off the epoch of a line
        trainees[1].stream.at = {step: cut}
        with pytest.raises(PowerCut):
            train(trainees)
    trainees[1].stream.at = {}
    check_against(undisturbed, trainees, train(trainees))


def test_killed_between_two_experts_saves_it_ends_the_same(undisturbed, tmp_path, monkeypatch):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    save, saves = Checkpoints.save, []

    def save_or_die(self, step, state, loss):
        saves.append(step)
        if len(saves) in (2, 7, 14):  # each time between expert 0's save and expert 1's
            raise PowerCut
        save(self, step, state, loss)

    monkeypatch.setattr(Checkpoints, "save", save_or_die)
    for _ in range(3):
        with pytest.raises(PowerCut):
            train(trainees)
    check_against(undisturbed, trainees, train(trainees))


def test_a_half_written_metric_line_is_written_again(undisturbed, tmp_path):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    trainees[0].stream.at = {7: cut}
    with pytest.raises(PowerCut):
        train(trainees)
    with (trainees[0].directory / "metrics.jsonl").open("a") as file:
        file.write('{"update": 8, "los')
    trainees[0].stream.at = {}
    check_against(undisturbed, trainees, train(trainees))


@pytest.mark.parametrize("index", [0, 1])
def test_a_damaged_newest_checkpoint_costs_an_update_not_the_run(
    undisturbed, tmp_path, index, caplog
):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    trainees[0].stream.at = {7: cut}
    with pytest.raises(PowerCut):
        train(trainees)
    newest = trainees[index].directory / "checkpoints" / "00000007"
    shutil.rmtree(newest / "state")
    trainees[0].stream.at = dict.fromkeys(range(6), cut)  # it must not start before update 6
    check_against(undisturbed, trainees, train(trainees))
    assert str(newest) in caplog.text


def test_with_no_whole_checkpoint_it_refuses(tmp_path):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    trainees[0].stream.at = {1: cut}
    with pytest.raises(PowerCut):
        train(trainees)
    shutil.rmtree(trainees[1].directory / "checkpoints" / "00000001" / "state")
    with pytest.raises(SomaError, match="none of the checkpoints"):
        train(trainees)


def assert_close(states, expected):
    """To what other devices, and so sums in another order, make of it.

    They change a loss (about 5) in its last bits, 5e-7, and so a difference of losses over 2 eps by
    2.5e-5; of a step of 1e-2 that is 2.5e-7, in each of twelve updates.
    """
    for state, other in zip(states, expected, strict=True):
        assert int(state.update) == int(other.update)
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
            np.testing.assert_allclose(a, b, atol=3e-6)


def test_experts_trained_apart_go_on_apart_and_end_the_same(undisturbed, tmp_path):
    """As jobs do that each take some experts: one has trained expert 0, and 1 is at its start."""
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    assert_close(train(trainees[:1]), undisturbed[0][:1])
    trainees[0].stream.at = dict.fromkeys(range(12), cut)  # it is not trained again
    assert_close(train(trainees), undisturbed[0])
    assert training.finished(trainees[1], STAGE)
    assert_same(training.results(trainees, STAGE), train(trainees))


def test_an_expert_whose_checkpoints_are_lost_starts_again_alone(undisturbed, tmp_path):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    trainees[0].stream.at = {7: cut}
    with pytest.raises(PowerCut):
        train(trainees)
    shutil.rmtree(trainees[1].directory / "checkpoints")
    trainees[0].stream.at = dict.fromkeys(range(7), cut)
    assert_close(train(trainees), undisturbed[0])


def test_an_expert_far_behind_the_others_is_left_to_the_user(tmp_path):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    trainees[0].stream.at = {7: cut}
    with pytest.raises(PowerCut):
        train(trainees)
    healthy = Checkpoints(trainees[0].directory / "checkpoints")
    steps = healthy.steps()
    for path in (trainees[1].directory / "checkpoints").iterdir():
        shutil.rmtree(path / "state")
    Checkpoints(trainees[1].directory / "checkpoints", keep=9).save(1, trainees[1].start)
    with pytest.raises(SomaError, match=r"001 has no whole checkpoint.*config\.run\.only"):
        train(trainees)
    assert healthy.steps() == steps


def test_a_signal_in_the_last_save_is_not_swallowed(undisturbed, tmp_path, monkeypatch):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    save = Checkpoints.save

    def save_and_signal(self, step, state, loss):
        save(self, step, state, loss)
        if step == 12 and "001" in str(self._directory):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_signal)
        with pytest.raises(Interrupted):
            train(trainees)
    check_against(undisturbed, trainees, train(trainees))


def test_a_failed_save_is_told_and_the_run_goes_on_later(undisturbed, tmp_path, monkeypatch):
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    save = Checkpoints.save

    def full(self, step, state, loss):
        if step == 5:
            raise SomaError("cannot save update 5: No space left on device")
        save(self, step, state, loss)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", full)
        with pytest.raises(SomaError, match="No space left"):
            train(trainees)
    check_against(undisturbed, trainees, train(trainees))


def test_success_is_not_told_of_a_last_state_that_is_not_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, state, loss: None)
    with pytest.raises(SomaError, match="cannot be read"):
        train([make_trainee(tmp_path, 0)])


def test_an_expert_that_fails_stops_alone(undisturbed, tmp_path, caplog):
    healthy = make_trainee(tmp_path, 0)
    params = model.init(randomness.key(1, "init"), SHAPE)
    params["body"]["final_gain"] = params["body"]["final_gain"].at[0].set(np.nan)
    broken = make_trainee(tmp_path, 1, expert.init_state(params, STAGE))
    with pytest.raises(SomaError, match="expert 001: the loss of update 1 is not finite"):
        train([healthy, broken])
    state = Checkpoints(healthy.directory / "checkpoints").restore(12, healthy.start)
    assert_same(state, undisturbed[0][0])
    assert metrics(healthy) == undisturbed[1][0]
    kept = Checkpoints(broken.directory / "checkpoints").restore(12, broken.start)
    assert_same(kept.params, params)
    assert metrics(broken) == []
    assert "expert 001" in caplog.text
    with pytest.raises(SomaError, match="expert 001"):  # and a rerun says so again
        train([healthy, broken])


def test_when_every_expert_fails_the_stage_stops_at_once(tmp_path):
    params = jax.tree.map(lambda x: x * np.nan, model.init(randomness.key(1, "init"), SHAPE))
    broken = make_trainee(tmp_path, 0, expert.init_state(params, STAGE))
    broken.stream.at = dict.fromkeys(range(5, 12), cut)
    with pytest.raises(SomaError, match="expert 000"):
        train([broken])


def test_observations_are_made_when_asked(tmp_path):
    seen = []
    trainee = make_trainee(tmp_path, 0)
    states = train(
        [trainee], observe=lambda step, params: seen.append((step, params)), observe_every=4
    )
    assert [step for step, _ in seen] == [4, 8, 12]
    assert_same(seen[-1][1][0], states[0].params)


def test_a_clock_that_jumps_changes_nothing(undisturbed, tmp_path, monkeypatch):
    now, now_ns, ahead = time.time, time.time_ns, [0]
    monkeypatch.setattr(time, "time", lambda: now() + ahead[0])
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + ahead[0] * 10**9)
    trainees = [make_trainee(tmp_path, i) for i in range(2)]
    jumps = {3: 10**8, 7: -(10**8), 9: 3600}
    trainees[0].stream.at = {
        step: lambda by=by: ahead.__setitem__(0, by) for step, by in jumps.items()
    }
    check_against(undisturbed, trainees, train(trainees))
    lines = (trainees[0].directory / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[-1] < 600


def test_no_updates_leave_the_start_on_disk(tmp_path):
    stage = Stage(**{**vars(STAGE), "updates": 0})
    trainee = make_trainee(tmp_path, 0, stage=stage)
    (state,) = train([trainee], stage)
    assert_same(state, trainee.start)
    assert Checkpoints(trainee.directory / "checkpoints").steps() == [0]


def test_tensorboard_events_hold_the_metric_lines(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    trainee = make_trainee(tmp_path, 0)
    train([trainee], run=Run(log_every=2, tensorboard=True))
    (file,) = (trainee.directory / "tensorboard").iterdir()
    content, found = file.read_bytes(), {}
    while content:  # a record: length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + size])
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
        content = content[16 + size :]
    for line in metrics(trainee):
        assert math.isclose(found["loss", line["update"]], line["loss"], rel_tol=1e-6)
