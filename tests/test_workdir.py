"""Who may work in a workdir: another process holds a part of it, and is killed."""

import dataclasses
import json
import subprocess
import sys
import threading

import pytest

from soma_jax.config import Config
from soma_jax.errors import SomaError
from soma_jax.workdir import SHARED, STAGES, Workdir

HOLDS = """
import sys
from soma_jax.workdir import Workdir
workdir = Workdir(sys.argv[1])
with workdir.lock([0, 2]), workdir.alone():
    print("held", flush=True)
    sys.stdin.readline()
print("left", flush=True)
"""


@pytest.fixture
def other(tmp_path):
    """Another process, which trains experts 0 and 2 of the workdir and makes what all need."""
    line = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(line, text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_an_expert_is_one_job_s_until_it_ends(other, tmp_path):
    workdir = Workdir(tmp_path / "run")
    for experts, words in (([1, 2], "expert 2 of"), (None, "another run is using")):
        with pytest.raises(SomaError, match=words), workdir.lock(experts):
            pass
    with workdir.lock([1, 3]), workdir.alone(STAGES):
        pass
    other.kill()  # SIGKILL: nothing of it is there to give the lock back
    other.wait()
    with workdir.lock():
        pass


def test_what_all_need_is_made_by_one_while_the_others_wait(other, tmp_path, capsys):
    workdir = Workdir(tmp_path / "run")
    told = threading.Event()

    def tell():
        told.set()
        other.stdin.write("\n")
        other.stdin.flush()

    threading.Timer(0.5, tell).start()
    with workdir.lock([1]), workdir.alone(SHARED):
        assert told.is_set()
        assert other.stdout.readline() == "left\n"
    assert "waiting for another job" in capsys.readouterr().out


def test_a_config_of_an_earlier_version_did_as_the_defaults_do(tmp_path):
    workdir = Workdir(tmp_path)
    written = dataclasses.asdict(Config(experts=3))
    del written["seed"]["credit"], written["run"]["only"], written["warm_start"]
    workdir.config.write_text(json.dumps(written))
    assert workdir.read_config() == Config(experts=3)
    workdir.check(Config(experts=3))
    with pytest.raises(SomaError, match=r"config\.experts was 3, now 2"):
        workdir.check(Config(experts=2))
    for strange in (written | {"colour": 1}, written | {"seed": written["seed"] | {"colour": 1}}):
        workdir.config.write_text(json.dumps(strange))
        with pytest.raises(SomaError, match="colour is not a field"):
            workdir.read_config()
