"""launch/experiment.py --experiment=allocation as a person runs it, at a toy's size."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ml_collections
import numpy as np
import pytest

from soma_jax.errors import SomaError
from soma_jax.experiments import allocation

ROOT = Path(__file__).parents[2]
TINY = """
import sys
sys.path.insert(0, {root!r})
from configs.experiments import allocation


def get_config():
    config = allocation.get_config()
    config.byte_forwards = 12_000.0
    config.random_seeds = (3, 4)
    config.variance_windows = 16
    config.variance_repeats = 2
    config.base.update(n_pert=4, window=16, validation_windows=2)
    few = dict(learning_rate=1e-2, eps=5e-3)
    config.scratch = dict(
        shared=dict(sequences=4, **few),
        own=dict(sequences=2, own_batch=True, probe="rank_one", head_sequences=4, **few),
    )
    config.seed = dict(own=dict(sequences=4, own_batch=True, **few))
    config.seed_row = "own"
    return config
"""


def command(tmp_path, *arguments, text=TINY):
    file = tmp_path / "tiny.py"
    file.write_text(text.format(root=str(ROOT)))
    line = [sys.executable, "launch/experiment.py", "--experiment=allocation", f"--config={file}"]
    return [*line, f"--workdir={tmp_path / 'run'}", *arguments]


def start(tmp_path, *arguments, **options):
    return subprocess.Popen(
        command(tmp_path, *arguments, **options),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip


def run(tmp_path, *arguments, **options):
    process = start(tmp_path, *arguments, **options)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def result(tmp_path):
    return json.loads((tmp_path / "run" / "result.json").read_text())


def without_times(found):
    found = json.loads(json.dumps(found))
    for row in found["rows"]:
        row.pop("seconds")
        for point in row["curve"]:
            point.pop("seconds")
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("allocation")
    code, output = run(tmp_path)
    assert code == 0, output
    return tmp_path


def test_it_writes_a_table_a_figure_and_a_result(finished):
    found = result(finished)
    assert [(r["start"], r["name"]) for r in found["rows"]] == [
        ("scratch", "own"), ("scratch", "shared"), ("seed", "own")
    ]  # fmt: skip
    assert found["command"].startswith("python launch/experiment.py --experiment=allocation")
    for row in found["rows"]:
        assert len(row["test"]) == len(set(row["test"])) == 2  # one for each random seed
        assert row["mean"] == pytest.approx(np.mean(row["test"]))
        assert row["interval"][0] < row["mean"] < row["interval"][1]
        stage = row["stage"]
        one = (2 * stage["n_pert"] * stage["sequences"] + stage["head_sequences"]) * 16
        assert 12_000 - one < row["byte_forwards"] == stage["updates"] * one <= 12_000
        assert [p["byte_forwards"] for p in row["curve"]] == sorted(
            p["byte_forwards"] for p in row["curve"]
        )
        assert len(row["curve"]) >= 6
    scratch, _, from_seed = found["rows"]
    # The seed's row starts from what `own` has reached, not from a drawn expert.
    assert from_seed["curve"][0]["test"][0] < scratch["curve"][0]["test"][0]
    with (finished / "run" / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(line["mean"]) for line in table] == [row["mean"] for row in found["rows"]]
    page = (finished / "run" / "allocation.md").read_text()
    assert f"{scratch['mean']:.3f}" in page
    assert "nu = " in page
    assert (finished / "run" / "allocation.png").stat().st_size > 10_000


@pytest.mark.slow
def test_stopped_and_killed_it_goes_on_to_the_same_losses(finished, tmp_path):
    looked = tmp_path / "run" / "runs" / "scratch-own" / "curve"
    for signum, looks, status in ((signal.SIGTERM, 2, 128 + 15), (signal.SIGKILL, 5, -9)):
        process = start(tmp_path)
        while process.poll() is None and len(list(looked.glob("0*"))) < looks:
            time.sleep(0.002)
        process.send_signal(signum)
        output, _ = process.communicate()
        assert process.returncode == status, output
    code, output = run(tmp_path)
    assert code == 0, output
    ours, theirs = without_times(result(tmp_path)), without_times(result(finished))
    for found in (ours, theirs):
        found.pop("command"), found.pop("date")
    assert ours == theirs


def test_a_row_with_other_settings_is_refused(finished):
    text = TINY.replace("sequences=4, **few", "sequences=3, **few", 1)
    code, output = run(finished, text=text)
    assert code == 2
    assert "scratch-shared was made with other settings" in output
    assert "Traceback" not in output


def test_rows_from_another_seed_are_refused(finished):
    code, output = run(finished, "--config.seed_row=shared")
    assert code == 2
    assert "seed-own was made with other settings" in output


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"a b": {}, "a-b": {}}, "needs a name of letters or digits of its own"),
        ({"?": {}}, "needs a name of letters or digits of its own"),
        ({"row": {"updates": 3}}, "updates follows from config.byte_forwards"),
        ({"row": 3}, "must be fields of a Stage"),
        ({"row": {"nope": 3}}, "nope is not a field"),
        ({}, "config.scratch has no rows"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows, words):
    config = committed()
    config.scratch = ml_collections.ConfigDict(rows)
    with pytest.raises(SomaError, match=words):
        allocation.resolve(config)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.byte_forwards=10.0", "less than one update"),
        ("--config.byte_forwards=inf", "config.byte_forwards must be a finite number"),
        ("--config.variance_windows=3", "config.variance_windows must be at least 16"),
        ("--config.base.whitening=1e-4", "whitening"),
        ("--config.seed_row=nothing", "config.seed_row='nothing' is not a row"),
        ("--config.base.b1=2.0", "b1 must be below 1"),
        ("--config.data.train=/no/such", "/no/such"),
        ("--config.random_seeds=(1,1)", "twice"),
        ("--experiment=nothing", "nothing"),
        ("--config.nope=1", "nope"),
    ],
)
def test_bad_input_is_told_in_a_line(tmp_path, argument, words):
    code, output = run(tmp_path, argument)
    assert code == 2
    assert words in output
    assert "Traceback" not in output
    assert not (tmp_path / "run" / "runs").exists()


def committed() -> ml_collections.ConfigDict:
    sys.path.insert(0, str(ROOT))
    from configs.experiments.allocation import get_config

    config = get_config()
    config.unlock()
    return config


def test_every_setting_of_the_committed_config_is_good():
    settings = allocation.resolve(committed())
    rows = settings.rows["scratch"]
    paper = rows["paper (64, 64, 1024)"]
    assert (paper.n_pert, paper.sequences, paper.window, paper.own_batch) == (64, 64, 1024, False)
    assert (paper.probe, paper.updates) == ("sparse", 3)
    for stage in (*rows.values(), *settings.rows["seed"].values()):
        spent = stage.updates * stage.byte_forwards_per_update
        assert 26e6 - stage.byte_forwards_per_update < spent <= 26e6
    wrong = committed()
    wrong.scratch["own windows"].probe = "cauchy"
    with pytest.raises(SomaError, match=r"config\.scratch\['own windows'\]\.probe"):
        allocation.resolve(wrong)


def test_the_page_shows_the_committed_result():
    docs = ROOT / "docs"
    found = json.loads((docs / "results" / "allocation.json").read_text())
    assert allocation.markdown(found) in (docs / "allocation.md").read_text()
