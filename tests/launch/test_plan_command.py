import pytest
from test_planning import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of one setting, a run of another, and something else."""
    runs = tmp_path_factory.mktemp("plan") / "runs"
    for seed in range(2):
        make_run(runs / "n2" / str(seed), seed=seed)
    make_run(runs / "n4" / "0", experts=4, n_pert=16, decay_to=0.5)
    (runs / "n2" / "notes.txt").write_text("no run")
    return runs


def test_it_prints_a_table_and_the_choice(launch, runs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    arguments = (f"--runs={runs}/*/*", "--seconds=200", "--devices=2", "--device_seconds=300")
    done = launch("plan", *arguments, text=True)
    assert done.returncode == 0, done.stderr
    for fact in (f"{runs}/n2 ", f"{runs}/n4/0", "x 1.50", "Choose ", "cosine"):
        assert fact in done.stdout
    assert "notes" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs={runs}/*/*"], "no limit"),
        (["--runs={runs}/*/*", "--operations=0"], "--operations must be a positive number"),
        (["--runs={runs}/*/*", "--seconds=1e-3"], "not one update"),
        (["--runs={runs}/none/*", "--seconds=9"], "no such directory"),
        (["--runs={runs}/*", "--seconds=9"], "n2 is not a workdir"),
    ],
    ids=["no limit", "no budget", "too short", "no runs", "no run"],
)
def test_bad_input_is_one_line_and_status_2(launch, runs, arguments, message):
    done = launch("plan", *(a.format(runs=runs) for a in arguments), text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout
