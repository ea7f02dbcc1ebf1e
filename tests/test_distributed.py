"""Several processes as one run, on this machine: real ones, that find each other by gloo."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import several_processes
from test_training import make_trainee

from soma_jax import distributed, ensemble
from soma_jax.checkpoint import Checkpoints
from soma_jax.errors import SomaError

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def start(count, *line, cluster=None):
    """The processes of a job, told who they are by flags or by a cluster's variables."""
    port, processes = free_port(), []
    for i in range(count):
        told = [f"--coordinator=127.0.0.1:{port}"]
        env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        if cluster is None:
            told += [f"--processes={count}", f"--process={i}"]
        else:
            told += [f"--cluster={cluster}"]
            env |= {
                "slurm": {
                    "SLURM_JOB_ID": "7",
                    "SLURM_STEP_NODELIST": "localhost",
                    "SLURM_NTASKS": str(count),
                    "SLURM_PROCID": str(i),
                    "SLURM_LOCALID": str(i),
                },
                "ompi": {
                    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911",
                    "OMPI_COMM_WORLD_SIZE": str(count),
                    "OMPI_COMM_WORLD_RANK": str(i),
                    "OMPI_COMM_WORLD_LOCAL_RANK": str(i),
                },
            }[cluster]
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, line), *told],
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def end(processes):
    outputs = [p.communicate(timeout=900)[0] for p in processes]
    return [p.returncode for p in processes], outputs


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    make_mesh = ensemble.make_mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ensemble, "make_mesh", lambda *arguments: make_mesh(*arguments, jax.devices()[:1])
        )
        several_processes.train(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("count", "cluster"), [(2, "slurm"), (4, None)])
def test_processes_reach_what_one_device_does(on_one_device, tmp_path, count, cluster):
    line = ["tests/several_processes.py", f"--into={tmp_path}"]
    codes, outputs = end(start(count, *line, cluster=cluster))
    assert codes == [0] * count, outputs
    assert "experts: update 50/50" in outputs[0]
    assert not any("update 50/50" in output for output in outputs[1:])  # process 0 talks
    for name, (experts, stage) in several_processes.CASES.items():
        for i in range(experts):
            ours, theirs = (
                Checkpoints(where / name / f"{i:03d}" / "checkpoints")
                for where in (tmp_path, on_one_device)
            )
            assert ours.steps()[-1] == theirs.steps()[-1] == stage.updates
            like = make_trainee(tmp_path, i, stage=stage).start
            a, b = (c.restore(stage.updates, like).params for c in (ours, theirs))
            leaves = jax.tree_util.tree_leaves_with_path(a)
            assert len(leaves) > 5
            for (path, x), y in zip(leaves, jax.tree.leaves(b), strict=True):
                np.testing.assert_allclose(x, y, atol=1e-6, err_msg=f"{name}{path}")


@pytest.mark.slow
def test_a_death_ends_the_others_and_fewer_processes_go_on(tmp_path):
    """launch/main.py: two processes, of which the second is killed; then one."""
    line = [
        "launch/main.py",
        "--config=configs/soma_tiny.py",
        f"--workdir={tmp_path / 'run'}",
        "--config.run.host_devices=1",
        "--config.run.checkpoint_seconds=1e-9",
        "--config.model.width=8",
        "--config.model.embedding=8",
        "--config.seed.updates=20",
    ]
    processes = start(2, *line, cluster="ompi")
    first = tmp_path / "run" / "experts" / "002" / "checkpoints"
    deadline = time.monotonic() + 300
    while not list(first.glob("0*[0-9]")) and processes[1].poll() is None:
        assert time.monotonic() < deadline, "no checkpoint after five minutes"
        time.sleep(0.01)
    processes[1].kill()
    killed = time.monotonic()
    codes, outputs = end(processes)
    assert time.monotonic() - killed < distributed.HEARTBEAT_SECONDS + 30, outputs
    assert codes[0] not in (0, None)
    # The coordination service names the processes that it no longer hears, a line each.
    assert "unhealthy (stopped sending heartbeats):\n1\n" in outputs[0]
    assert "Run the same command again" in outputs[0]
    done = subprocess.run(
        [sys.executable, *line], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "going on from update" in done.stdout
    assert (tmp_path / "run" / "report" / "summary.json").exists()


def test_a_cluster_s_variables_alone_join_nothing(monkeypatch):
    """An interactive shell on a cluster has them, and its programs are alone."""
    for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID"):
        monkeypatch.setenv(f"SLURM_{name}", "1")
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("joined"))
    distributed.join(None, None, None, None)
    assert distributed.leads()
    assert distributed.highest(3, 4) == [3, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, "localhost:1", None, None), "--processes=COUNT"),
        ((None, None, 2, 0), "--coordinator"),
        ((None, "localhost:1", 2, 2), "did not find each other"),
        (("slurm", None, None, None), "did not find each other"),
    ],
)
def test_half_a_description_is_refused(monkeypatch, arguments, words):
    for name in os.environ:
        if name.startswith("SLURM_"):
            monkeypatch.delenv(name)
    before = jax.config.jax_cpu_collectives_implementation
    try:
        with pytest.raises(SomaError, match=words):
            distributed.join(*arguments)
    finally:
        jax.config.update("jax_cpu_collectives_implementation", before)


def test_processes_that_cannot_share_are_refused(monkeypatch):
    mesh = ensemble.make_mesh(1, several_processes.STAGE, jax.devices()[:1])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(SomaError, match="process 1 of 2 would have nothing to do"):
        ensemble.Ensemble(mesh, several_processes.STAGE)
