import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def workdir(tmp_path):
    """The committed result of an experiment, where launch/experiment.py would have left it."""
    home = tmp_path / "experiments" / "allocation"
    home.mkdir(parents=True)
    result = json.loads((ROOT / "docs" / "results" / "allocation.json").read_text())
    result["date"] = "2026-11-30"
    (home / "result.json").write_text(json.dumps(result))
    (home / "allocation.png").write_bytes((ROOT / "docs/results/allocation.png").read_bytes())
    return tmp_path / "experiments"


def test_it_writes_the_pages_and_says_where(launch, workdir, tmp_path):
    done = launch("report", f"--workdir={workdir}", f"--into={tmp_path}/docs/results", text=True)
    assert done.returncode == 0, done.stderr
    pages = [workdir / "report.md", workdir / "report.html", tmp_path / "docs" / "results.md"]
    assert done.stdout.split() == [str(page) for page in pages]
    for page in pages:
        text = page.read_text()
        assert "rank one, a window each" in text
        assert "2026-11-30" in text
        assert "--experiment=plan" in text  # not run
    assert "(results/allocation.png)" in pages[2].read_text()
    assert (tmp_path / "docs" / "results" / "allocation.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda home: (home / "result.json").unlink(), "run one first"),
        (lambda home: (home / "result.json").write_text("{"), "allocation/result.json"),
    ],
    ids=["nothing run", "damaged"],
)
def test_bad_input_is_one_line_and_status_2(launch, workdir, damage, message):
    damage(workdir / "allocation")
    done = launch("report", f"--workdir={workdir}", text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout
