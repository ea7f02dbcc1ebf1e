"""launch/main.py as a person runs it, killed as a machine kills it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from soma_jax import recipe

ROOT = Path(__file__).parents[2]
# The tiny recipe, made tinier; a checkpoint after every update.
SMALL = [
    "--config=configs/soma_tiny.py",
    "--config.run.host_devices=2",
    "--config.run.checkpoint_seconds=1e-9",
    "--config.run.log_every=5",
    "--config.seed.updates=30",
    "--config.expert.updates=30",
    "--config.model.width=8",
    "--config.model.embedding=8",
    "--config.seed.n_pert=8",
    "--config.seed.head_sequences=8",
    "--config.expert.head_sequences=8",
    "--config.expert.n_pert=8",
    "--config.expert.sequences=8",  # 1,920 windows of about 1,100 chunks: more than an epoch
]


def start(workdir, *arguments, small=True):
    line = [sys.executable, "launch/main.py", *(SMALL if small else []), f"--workdir={workdir}"]
    return subprocess.Popen(
        [*line, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )


def run(workdir, *arguments, small=True):
    process = start(workdir, *arguments, small=small)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


def reached(path):
    """Whether a file is there, or the checkpoint of a later update."""
    return path.exists() or any(
        p.name > path.name for p in path.parent.glob("0*") if p.name.isdigit()
    )


def outcome(workdir):
    """All that must not depend on how often a run was stopped."""
    _, experts, router = recipe.load(workdir)
    summary = json.loads((workdir / "report" / "summary.json").read_text())
    lines = []
    for file in sorted(workdir.rglob("*.jsonl")):
        if file.parent.name != "data" and file.name != "ids.jsonl":
            for line in file.read_text().splitlines():
                record = json.loads(line)
                record.pop("seconds", None)
                lines.append((str(file.relative_to(workdir)), record))
    leaves = [np.asarray(x) for x in jax.tree.leaves(experts)]
    return leaves, router.fingerprint, {k: summary[k] for k in ("test", "experts")}, lines


def assert_same(left, right):
    for a, b in zip(left[0], right[0], strict=True):
        np.testing.assert_array_equal(a, b)
    assert left[1:] == right[1:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    code, output = run(workdir)
    assert code == 0, output
    return workdir, output


def test_the_run_ends_with_a_table_a_report_and_a_summary(undisturbed):
    workdir, output = undisturbed
    for words in ("seed: update", "experts: update", "nats/byte", "left", "bigram", "report.md"):
        assert words in output
    assert "\r" not in output  # not on a terminal: plain lines, no bar
    summary = json.loads((workdir / "report" / "summary.json").read_text())
    assert summary["test"]["ensemble"] < summary["test"]["seed"] < np.log(256)
    assert summary["byte_forwards"] == 30 * 64 * (2 * 8 * 2 + 8) + 3 * 30 * 64 * (2 * 8 * 8 + 8)
    assert summary["seconds"] > 0 < summary["peak_rss_bytes"]
    assert len(summary["experts"]) == 3
    assert (workdir / "report" / "loss.png").stat().st_size > 10_000


def test_a_rerun_when_finished_says_so_and_changes_nothing(undisturbed):
    workdir, _ = undisturbed
    before = outcome(workdir)
    code, output = run(workdir)
    assert code == 0
    assert "finished" in output
    assert_same(outcome(workdir), before)


def test_a_changed_config_is_refused_by_name(undisturbed):
    code, output = run(undisturbed[0], "--config.expert.eps=0.001", "--config.run.log_every=7")
    assert code == 2
    assert "config.expert.eps was 0.0025, now 0.001" in output
    assert "log_every" not in output
    assert "Traceback" not in output


# What is on disk when the run is killed: each is a stage, or the moment between two.
MOMENTS = [
    "data/train",
    "corpora.json",
    "router/router.npz",
    "assignment.npy",
    "seed/checkpoints/00000001",
    "seed/checkpoints/00000017",
    "experts/000/checkpoints/00000001",
    "experts/001/checkpoints/00000018",  # the epoch's end
    "experts/002/checkpoints/00000025",
    "report/summary.json",
]


@pytest.mark.slow
def test_killed_in_every_stage_it_ends_the_same(undisturbed, tmp_path):
    workdir = tmp_path / "run"
    for moment in MOMENTS:
        process = start(workdir)
        while not reached(workdir / moment) and process.poll() is None:
            time.sleep(0.002)
        process.kill()
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, (moment, output)
    code, output = run(workdir)
    assert code == 0, output
    assert_same(outcome(workdir), outcome(undisturbed[0]))


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(undisturbed, tmp_path, signum):
    workdir = tmp_path / "run"
    for moment in ("seed/checkpoints/00000003", "experts/000/checkpoints/00000003"):
        process = start(workdir)
        while not reached(workdir / moment) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 128 + signum
        assert "run the same command again" in output
        assert "Traceback" not in output
    code, output = run(workdir)
    assert code == 0, output
    assert "going on from update" in output
    assert_same(outcome(workdir), outcome(undisturbed[0]))


def test_another_s_directory_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train").write_text("mine")
    code, output = run(tmp_path)
    assert code == 2
    assert "not a workdir" in output
    assert (tmp_path / "data" / "train").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


@pytest.mark.slow
@pytest.mark.parametrize("experts", [1, 3])
def test_it_runs_without_updates_and_with_one_expert(tmp_path, experts):
    none = ["--config.seed.updates=0", "--config.expert.updates=0"]
    code, output = run(tmp_path / "run", f"--config.experts={experts}", *none)
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert len(summary["experts"]) == experts
    assert summary["test"]["ensemble"] == pytest.approx(summary["test"]["seed"])  # copies of it
    code, output = run(tmp_path / "run", f"--config.experts={experts}", *none)
    assert code == 0
    assert "finished" in output


@pytest.mark.slow
def test_a_test_text_that_was_trained_on_is_not_scored(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / split).mkdir()
        for i in range(9 if split == "train" else 2):
            words = " ".join(f"{split}{i}w{j % 40}" for j in range(700))
            (tmp_path / split / f"{i}.txt").write_text(words)
    (tmp_path / "test" / "2.txt").write_text((tmp_path / "train" / "3.txt").read_text().upper())
    own = [f"--config.data.{split}={tmp_path / split}" for split in ("train", "valid", "test")]
    few = ["--config.seed.updates=1", "--config.expert.updates=1", "--config.cluster.min_df=1"]
    code, output = run(tmp_path / "run", *own, *few)
    assert code == 0, output
    assert "1 of 3 test documents are also training documents" in output
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert summary["test"]["documents_also_in_training"] == 1
    assert summary["test"]["windows"] == 2
    own[2] = own[0].replace("data.train", "data.test")
    code, output = run(tmp_path / "other", *own, *few)
    assert code == 2
    assert "config.data.test" in output


@pytest.mark.slow
def test_two_runs_in_one_workdir_are_refused(tmp_path):
    workdir = tmp_path / "run"
    first = start(workdir)
    while not (workdir / "seed").exists() and first.poll() is None:
        time.sleep(0.01)
    code, output = run(workdir)
    first.kill()
    first.communicate()
    assert code == 2
    assert "another run is using" in output


@pytest.mark.slow
def test_jobs_train_experts_of_their_own_in_one_workdir(undisturbed, tmp_path):
    workdir = tmp_path / "run"
    first = start(workdir, "--config.run.only=0,2")
    while not (workdir / "router").exists() and first.poll() is None:
        time.sleep(0.01)
    code, output = run(workdir, "--config.run.only=1-2")
    assert code == 2
    assert "another run is using expert 2" in output
    code, output = run(workdir, "--config.run.only=1")
    assert code == 0, output
    printed, _ = first.communicate(timeout=900)
    assert first.returncode == 0, printed
    # Whoever ends last scores; the other says who is missing.
    assert ("not trained yet" in output) != ("not trained yet" in printed)
    assert ("report.md" in output) != ("report.md" in printed)
    ours, theirs = (
        json.loads((where / "report" / "summary.json").read_text())
        for where in (workdir, undisturbed[0])
    )
    assert ours["test"]["ensemble"] == pytest.approx(theirs["test"]["ensemble"], abs=1e-5)
    code, output = run(workdir)
    assert code == 0
    assert "finished" in output


@pytest.mark.slow
def test_own_texts_and_a_changed_corpus(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / split).mkdir()
        for i in range(9 if split == "train" else 2):
            words = " ".join(f"{split}{'abc'[i % 3]}{j % 50}" for j in range(500 * (1 + i)))
            (tmp_path / split / f"{i}.txt").write_text(words)
    own = [f"--config.data.{split}={tmp_path / split}" for split in ("train", "valid", "test")]
    few = ["--config.seed.updates=2", "--config.expert.updates=2"]
    code, output = run(tmp_path / "run", *own, *few)
    assert code == 0, output
    (tmp_path / "train" / "3.txt").write_text("d" * 4000)
    code, output = run(tmp_path / "run", *own, *few)
    assert code == 2
    assert "3.txt" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.nope=1"], "nope"),
        (["--config.expert.nope=1"], "nope"),
        (["--config.expert.updates=1e3"], "config.expert.updates"),
        (["--config.expert.learning_rate=nan"], "config.expert.learning_rate"),
        (["--config.expert.eps=-1"], "config.expert.eps"),
        (["--config.expert.eps=1e-400"], "config.expert.eps"),
        (["--config.expert.weight_decay=1e-400"], "config.expert.weight_decay"),
        (["--config=README.md"], "README.md"),
        (["--config.run.tensorboard=maybe"], "config.run.tensorboard"),
        (["stray", "words"], "stray words"),
        (["--", "stray"], "stray"),
        (["--nosuchflag=1"], "nosuchflag"),
        (["--config=configs/nope.py"], "configs/nope.py"),
        (["--config.data.train=/no/such/path"], "/no/such/path"),
        (["--config.seed.window=9999999"], "config.data.train"),
        (["--config.run.host_devices=1000"], "host_devices must be at most"),
    ],
)
def test_bad_input_is_told_in_a_line_before_any_work(tmp_path, arguments, words):
    code, output = run(tmp_path / "run", *arguments)
    assert code == 2
    assert words in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
def test_the_tiny_config_as_a_contributor_runs_it(tmp_path):
    began = time.monotonic()
    code, output = run(tmp_path / "run", "--config=configs/soma_tiny.py", small=False)
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "report" / "summary.json").read_text())
    assert summary["test"]["ensemble"] < summary["test"]["seed"]
    assert summary["seconds"] < time.monotonic() - began
