"""launch/slurm.py, on a real Slurm of one node that tests/slurm.sh starts."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from soma_jax import recipe

ROOT = Path(__file__).parents[2]
SLURM = ROOT / "tests" / "slurm.sh"
LINE = [
    sys.executable,
    "launch/slurm.py",
    "--config=configs/soma_tiny.py",
    "--config.model.width=8",
    "--config.model.embedding=8",
    "--config.seed.updates=10",
    "--config.expert.updates=10",
    "--config.run.host_devices=1",
]


def submit(workdir, *arguments):
    line = [*LINE, f"--workdir={workdir}", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    needed = ("munged", "slurmctld", "slurmd", "sbatch")
    if missing := [name for name in needed if not shutil.which(name)]:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.geteuid():
        pytest.skip("slurmd needs root")
    directory = tmp_path_factory.mktemp("slurm")
    subprocess.run([SLURM, "start", directory], check=True, timeout=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
        yield
    subprocess.run([SLURM, "stop", directory], check=True, timeout=120)


def wait_for(workdir):
    """Until the queue is empty; returns what the jobs printed."""
    for _ in range(900):
        queue = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True)
        if not queue.stdout.strip():
            break
        time.sleep(1)
    return "".join(p.read_text() for p in Path(f"{workdir}.slurm").glob("*_log.*"))


@pytest.mark.slow
@pytest.mark.slurm
def test_jobs_share_the_experts_and_the_last_one_scores_them(cluster, tmp_path):
    workdir = tmp_path / "run"
    done = submit(workdir, "--jobs=2")
    assert done.returncode == 0, done.stderr
    assert "experts 0, 1\n" in done.stdout
    assert "experts 2\n" in done.stdout
    printed = wait_for(workdir)
    assert "waiting for another job" in printed
    assert "not trained yet: the job that finds all" in printed
    summary = json.loads((workdir / "report" / "summary.json").read_text())
    assert len(summary["experts"]) == 3
    assert [int(state.update) for state in recipe.load(workdir)[1]] == [10, 10, 10]


@pytest.mark.slow
@pytest.mark.slurm
def test_a_job_of_two_processes_and_one_that_slurm_puts_back(cluster, tmp_path):
    workdir = tmp_path / "run"
    done = submit(workdir, "--tasks_per_node=2", "--config.run.only=1")
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1].rstrip(":")
    for _ in range(600):
        if (workdir / "config.json").exists():
            break
        time.sleep(0.5)
    subprocess.run(["scontrol", "requeue", job], check=True)
    subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=False)
    printed = wait_for(workdir)
    assert "experts: update 10/10" in printed
    assert recipe.present(recipe.Workdir(workdir), recipe.Workdir(workdir).read_config()) == [1]


def test_without_slurm_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = submit(tmp_path / "run")
    assert done.returncode == 2
    assert "Slurm takes no jobs from here" in done.stderr
    assert "Traceback" not in done.stderr
