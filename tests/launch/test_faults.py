"""launch/main.py when machines, disks and people interfere: it ends as it would have."""

import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from test_main_command import assert_same, outcome, run, start

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A finished run, and the seconds it took."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    began = time.monotonic()
    code, output = run(workdir)
    assert code == 0, output
    return workdir, time.monotonic() - began


def test_killed_at_twenty_random_moments_it_ends_the_same(undisturbed, tmp_path):
    expected, seconds = undisturbed
    moments = random.Random(0)
    workdir, finished = tmp_path / "run", 0
    for _ in range(20):
        process = start(workdir)
        killer = threading.Timer(moments.uniform(0.05, 0.6) * seconds, process.kill)
        killer.start()
        output, _ = process.communicate(timeout=900)
        killer.cancel()
        assert process.returncode in (0, -signal.SIGKILL), output
        if process.returncode == 0:  # then the next one starts afresh
            assert_same(outcome(workdir), outcome(expected))
            shutil.rmtree(workdir)
            finished += 1
    code, output = run(workdir)
    assert code == 0, output
    assert_same(outcome(workdir), outcome(expected))
    assert finished < 15


def test_asked_to_stop_in_each_stage_it_stops_and_goes_on(undisturbed, tmp_path):
    """While it reads, clusters, compiles either stage, and scores."""
    workdir = tmp_path / "run"
    for words in ("screening", "cluster:", "seed:", "experts:", "evaluate:"):
        process = start(workdir)
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith(words):
                process.send_signal(signal.SIGTERM)
                break
        rest, _ = process.communicate(timeout=900)
        assert process.returncode == 128 + signal.SIGTERM, (words, printed, rest)
        assert "run the same command again" in rest
        assert "Traceback" not in rest
    code, output = run(workdir)
    assert code == 0, output
    assert_same(outcome(workdir), outcome(undisturbed[0]))


@pytest.fixture
def small_disk(tmp_path):
    """resize(KiB) makes a disk of that size, or of another size with what is on it."""
    mounted = tmp_path / "disk"
    mounted.mkdir()

    def mount(options):
        return subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", mounted], capture_output=True
        ).returncode

    if os.geteuid() or mount("size=1m"):
        pytest.skip("cannot mount a tmpfs here")
    yield mounted, lambda size: mount(f"remount,size={size}k")
    subprocess.run(["umount", "-l", mounted], check=True)


def test_full_at_every_save_the_disk_costs_no_result(undisturbed, small_disk):
    """A disk that grows little by little: full in the corpora, the router, and save after save."""
    disk, resize = small_disk
    needed = sum(p.stat().st_size for p in undisturbed[0].rglob("*") if p.is_file()) // 1024
    failures = 0
    for size in (*np.linspace(0.1, 1.0, 8) * needed, 4 * needed):
        assert resize(int(size)) == 0
        code, output = run(disk / "run")
        if code == 0:
            break
        failures += 1
        assert code == 2, output
        # One of ours; threads of Orbax and TensorStore print theirs before, beside and after it.
        assert re.search("error: .*cannot (write|save) .*make room", output, re.IGNORECASE), output
    assert code == 0, output
    assert failures >= 4
    assert_same(outcome(disk / "run"), outcome(undisturbed[0]))


def test_a_workdir_by_any_name(undisturbed, tmp_path, monkeypatch):
    """Relative, with spaces, through a symlink; and once more by its real name."""
    (tmp_path / "a place with spaces").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a place with spaces")
    relative = os.path.relpath(tmp_path / "link" / "my run", start.__globals__["ROOT"])
    code, output = run(relative)
    assert code == 0, output
    real = tmp_path / "a place with spaces" / "my run"
    assert_same(outcome(real), outcome(undisturbed[0]))
    code, output = run(real)
    assert code == 0
    assert "finished" in output
