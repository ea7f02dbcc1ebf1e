import json
import shutil

import numpy as np
import pytest

from soma_jax import evaluate, recipe, summary
from soma_jax.data import store, windows
from soma_jax.routing.router import Router
from soma_jax.stats import paired_bootstrap


@pytest.fixture(scope="module")
def workdir(make_workdir, tmp_path_factory):
    return make_workdir(tmp_path_factory.mktemp("evaluate") / "run")


def text(length: int) -> bytes:
    return np.random.default_rng(length).integers(256, size=length, dtype=np.uint8).tobytes()


def check(result: dict, scored: windows.Windows, workdir, k: int) -> None:
    """What the command printed is what scoring all windows at once gives."""
    config, experts, router = recipe.load(workdir.path)
    scores = evaluate.score([state.params for state in experts], router, scored, k)
    documents = np.unique(scored.document, return_inverse=True)[1]
    interval = paired_bootstrap(
        np.bincount(documents, scores.sums[:, k - 1]),
        np.bincount(documents, scores.counts),
        config.evaluation.bootstrap,
        config.random_seed,
    )
    for name, unit in (("nats_per_byte", 1), ("bits_per_byte", np.log(2))):
        found = [result[name], *result[f"{name}_interval"]]
        np.testing.assert_allclose(found, np.array(interval) / unit, rtol=1e-6)
    shares = np.bincount(scores.routes[:, 0], minlength=3) / len(scored)
    np.testing.assert_allclose(result["routed_first"], shares)
    assert result["windows"] == len(scored)
    assert result["scored_bytes"] == scores.counts.sum()


def test_the_runs_own_test_text_is_scored_by_the_protocol(launch, workdir):
    before = {path: path.stat() for path in workdir.path.rglob("*")}
    done = launch("evaluate", f"--workdir={workdir.path}", "--json", text=True)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["updates"] == [1, 2, 3]
    assert (result["documents"], result["documents_left_out"]) == (20, 60)
    config = workdir.read_config()
    drawn = summary.drawn_windows(store.open_store(workdir.store("test")), config.evaluation)
    check(result, drawn, workdir, 2)
    after = {path: path.stat() for path in workdir.path.rglob("*")}
    assert {p: s.st_mtime_ns for p, s in before.items()} == {
        p: s.st_mtime_ns for p, s in after.items()
    }


def test_any_text_is_scored_whole_and_a_damaged_checkpoint_passed_over(
    launch, make_workdir, tmp_path
):
    """Documents of every edge length, and one that is read in several blocks."""
    workdir = make_workdir(tmp_path / "run")
    newest = workdir.expert(2) / "checkpoints" / "00000003"
    # Which file holds the parameters is Orbax's choice, and not every byte of it counts.
    for damaged in (path for path in (newest / "state").rglob("*") if path.is_file()):
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
        damaged.write_bytes(content)

    lengths = [0, 1, 256, 257, 258, 1024, 1025, 1026, (1 << 20) + 300, 2000]
    (tmp_path / "text").mkdir()
    for number, length in enumerate(lengths):
        (tmp_path / "text" / f"{number}.txt").write_bytes(text(length))
    arguments = (f"--data={tmp_path / 'text'}", "--active=1", "--json")
    done = launch("evaluate", f"--workdir={workdir.path}", *arguments, text=True)
    assert done.returncode == 0, done.stderr
    assert "00000003" in done.stderr
    result = json.loads(done.stdout)
    assert result["updates"] == [1, 2, 2]
    assert (result["documents"], result["documents_left_out"]) == (6, 4)
    assert result["scored_bytes"] == sum(max(0, length - 257) for length in lengths)
    check(result, windows.strided(list(map(text, lengths)), drop_incomplete=False), workdir, 1)


def test_experts_that_are_not_there_are_named_and_the_others_score(launch, make_workdir, tmp_path):
    workdir = make_workdir(tmp_path / "run")
    shutil.rmtree(workdir.expert(1))
    done = launch("evaluate", f"--workdir={workdir.path}", "--active=2", "--json", text=True)
    assert done.returncode == 0, done.stderr
    assert "expert 1 not trained yet" in done.stderr
    result = json.loads(done.stdout)
    assert result["experts"] == [0, 2]
    assert result["updates"] == [1, 3]
    # Windows go to the nearer of the two: as by a router that never knew the third.
    _, states, router = recipe.load(workdir.path)
    drawn = summary.drawn_windows(
        store.open_store(workdir.store("test")), workdir.read_config().evaluation
    )
    texts = [ids.tobytes()[:256] for ids in drawn.ids]
    similarities = Router.load(workdir.router).similarities(texts)
    np.testing.assert_array_equal(router.route(texts, 1)[:, 0], similarities[:, [0, 2]].argmax(1))
    assert len(states) == 2


def test_a_person_reads_the_same_figures(launch, workdir, tmp_path):
    (tmp_path / "some.jsonl").write_text(json.dumps({"body": "the river " * 100}) + "\n")
    arguments = (f"--data={tmp_path / 'some.jsonl'}", "--text_field=body", "--active=9")
    done = launch("evaluate", f"--workdir={workdir.path}", *arguments, text=True)
    assert done.returncode == 0, done.stderr
    for fact in (
        "experts 0, 1, 2 at updates 1, 2, 3",
        "3 score a window",
        "743 bytes",
        "nats/byte",
        "bits/byte",
    ):
        assert fact in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir={tmp}/nothing"], "is not a workdir"),
        ([], "--workdir"),
        (["--workdir={run}", "--active=0"], "--active"),
        (["--workdir={run}", "--data={tmp}/nothing"], "no such file or folder"),
        (["--workdir={run}", "--data={tmp}/short.txt"], "258 bytes"),
    ],
    ids=["no workdir", "no flag", "no expert", "no data", "short data"],
)
def test_bad_input_is_one_line_and_status_2(launch, workdir, tmp_path, arguments, message):
    (tmp_path / "short.txt").write_bytes(text(257))
    places = {"tmp": tmp_path, "run": workdir.path}
    done = launch("evaluate", *(a.format(**places) for a in arguments), text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout
