"""lm-evaluation-harness, run as a user runs it, on a task made of the WikiText test text."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import soma_jax
from soma_jax import model, release
from soma_jax.config import default_config, resolve
from soma_jax.data import corpus
from soma_jax.data.windows import wikitext_segments
from soma_jax.routing.router import Router

pytest.importorskip("lm_eval")

TOPICS = [b"government states war people ", b"species water animals plants "]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    settings = default_config()
    settings.experts = settings.active = 2
    settings.model.width, settings.model.blocks, settings.model.embedding = 8, 1, 8
    config = resolve(settings)
    experts = [model.init(jax.random.key(i), config.expert_shape) for i in range(2)]
    for params in experts:  # the most probable byte is always ASCII
        params["head"] = params["head"].at[128:].set(0)
    router = Router.fit([topic * 9 for topic in TOPICS] * 3, 2, seed=0, min_df=1)
    path = tmp_path_factory.mktemp("harness") / "some"
    release.write(path, config, experts, router, {"updates": [1, 1], "screened": []}, "")
    return path


@pytest.fixture(scope="module")
def soma(checkpoint):
    from soma_jax.harness import Soma

    return Soma(path=str(checkpoint), batch_size=1, device=None)


def asked(*arguments):
    return SimpleNamespace(args=arguments)


def test_a_continuation_is_scored_after_its_context(checkpoint, soma):
    ens = soma_jax.load(checkpoint)
    greedy = ens.generate("The river ", 12, temperature=0.0)
    other = greedy[:11] + ("a" if greedy[11] != "a" else "b")
    requests = [asked("The river ", greedy), asked("The river ", other), asked("", "né")]
    found = soma.loglikelihood(requests)
    assert [is_greedy for _, is_greedy in found] == [True, False, False]
    for request, (nats, _) in zip(requests, found, strict=True):
        context, continuation = (part.encode() for part in request.args)
        (log_p,) = ens.log_probabilities([context + continuation])
        assert nats == pytest.approx(log_p[-len(continuation) :].sum(), rel=1e-6)
    assert soma.loglikelihood([]) == soma.loglikelihood_rolling([]) == []


def test_text_is_generated_until_a_stop(checkpoint, soma):
    whole = soma_jax.load(checkpoint).generate("The river ", 40, temperature=0.0)
    (text,) = soma.generate_until([asked("The river ", {"max_gen_toks": 40})])
    assert text == whole
    stop = whole[7:9]
    (text,) = soma.generate_until([asked("The river ", {"until": ["\x01\x02", stop]})])
    assert text == whole[: whole.find(stop)]


@pytest.mark.slow
def test_figures_and_byte_counts_are_ours(checkpoint, tmp_path):
    (document,) = corpus.read_documents("wikitext103:test")
    articles = [a.decode() for a in wikitext_segments(document.read())[:4]]
    ens = soma_jax.load(checkpoint)
    # A multiple choice, whose right answer is the model's own continuation.
    answer = ens.generate("The river ", 8, temperature=0.0)
    files = {
        "rolling": [{"page": article} for article in articles],
        "choice": [{"asked": "The river ", "choices": ["zqzqzqzq", answer], "gold": 1}],
    }
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    tasks = {
        "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{page}}"
metric_list:
  - metric: bits_per_byte
  - metric: byte_perplexity
""",
        "choice": """output_type: multiple_choice
doc_to_text: "{{asked}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list:
  - metric: acc
""",
    }
    for name, task in tasks.items():
        head = f"task: soma_{name}\ndataset_path: json\ntest_split: test\n"
        files = f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / name}.jsonl\n"
        (tmp_path / f"{name}.yaml").write_text(head + files + task)
    line = [sys.executable, "-m", "soma_jax.harness", "run", "--model", "soma"]
    line += ["--model_args", f"path={checkpoint}", "--include_path", str(tmp_path)]
    line += ["--tasks", "soma_rolling,soma_choice", "--output_path", str(tmp_path / "out")]
    environment = os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    (written,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(written.read_text())["results"]

    counts = [len(article.encode()) for article in articles]
    nats = [-row.sum(dtype="float64") for row in ens.log_probabilities(articles)]
    mean = sum(nats) / sum(counts)
    rolling = results["soma_rolling"]
    assert rolling["bits_per_byte,none"] == pytest.approx(mean / math.log(2), rel=1e-6)
    assert rolling["byte_perplexity,none"] == pytest.approx(math.exp(mean), rel=1e-6)
    assert results["soma_choice"]["acc,none"] == 1.0
