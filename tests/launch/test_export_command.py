import json

import pytest

from soma_jax.files import write_json


@pytest.fixture(scope="module")
def workdir(make_workdir, tmp_path_factory):
    return make_workdir(tmp_path_factory.mktemp("export") / "run")


def finish(workdir) -> None:
    """The figures of a finished run that a card shows."""
    text = {"seed": 3.1, "bigram": 2.1, "trigram": 1.1, "gzip_9": 2.5}
    found = {"test": {**text, "documents_also_in_training": 0}, "wikitext103_test": text}
    found |= {"parameters": 12345, "byte_forwards": 10**6, "operations": 1e9, "device_hours": 0.5}
    found |= {"devices": 2, "device": "cpu", "versions": {"jax": "0.10"}}
    write_json(workdir.summary, found)
    write_json(workdir.screened, [])


def test_a_finished_run_becomes_a_checkpoint_that_scores_the_same(launch, workdir, tmp_path):
    to = tmp_path / "some"
    refused = launch("export", f"--workdir={workdir.path}", f"--to={to}", text=True)
    assert refused.returncode == 2
    assert "not a finished run" in refused.stderr
    assert not list(tmp_path.iterdir())

    finish(workdir)
    done = launch("export", f"--workdir={workdir.path}", f"--to={to}", text=True)
    assert done.returncode == 0, done.stderr
    about, card = json.loads((to / "release.json").read_text()), (to / "README.md").read_text()
    assert about["updates"] == [1, 2, 3]
    # The config that is nearest to the run's, and what is left to say.
    (command,) = (line for line in card.splitlines() if line.startswith("python launch/main.py"))
    assert "--config.experts=3" in command
    assert "--config.model.blocks=1" in command

    results = []
    for source in (f"--workdir={workdir.path}", f"--checkpoint={to}"):
        done = launch("evaluate", source, "--json", "--cold_start", text=True)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
        results[-1].pop("workdir")
    assert results[0] == results[1]
    assert about["losses"]["test"]["nats_per_byte"] == pytest.approx(results[0]["nats_per_byte"])
    assert f"{results[0]['nats_per_byte']:.4f}" in card
    cold = results[0]["cold_start_nats_per_byte"]
    assert "all 3 experts" in cold
    assert all(4 < loss < 8 for loss in cold.values())  # experts that were drawn, not trained
