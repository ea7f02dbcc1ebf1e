import subprocess
import sys

import jax
import numpy as np
import pytest

import soma_jax
from soma_jax import evaluate, inference, model, pretrained, release
from soma_jax.config import default_config, resolve
from soma_jax.data import corpus, windows
from soma_jax.errors import SomaError
from soma_jax.routing.router import Router

N = 4
TOPICS = [
    b"river water boat fish lake ",
    b"music violin song choir drum ",
    b"court law judge jury crime ",
    b"star planet orbit moon comet ",
]
LENGTHS = [1, 256, 257, 258, 600, 1025, 1026, 2000]


def text(length: int, topic: int = 0) -> bytes:
    rng = np.random.default_rng(length)
    words = b" ".join(rng.choice(TOPICS[topic].split(), 400)) + b" \xc3\xff"
    return (words[-150:] + words)[:length]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A released checkpoint of drawn experts."""
    settings = default_config()
    settings.active = 2
    settings.model.width, settings.model.blocks, settings.model.embedding = 8, 1, 16
    settings.evaluation.documents = 10
    config = resolve(settings)
    experts = [model.init(jax.random.key(i), config.expert_shape) for i in range(N)]
    router = Router.fit([topic * 9 for topic in TOPICS] * 3, N, seed=0, min_df=1)
    path = tmp_path_factory.mktemp("release") / "some"
    about = {"updates": [7, 8, 9, 10], "screened": [1]}
    release.write(path, config, experts, router, about, "# some\n")
    return path


@pytest.fixture(scope="module")
def ens(directory):
    return soma_jax.load(directory)


def test_importing_the_package_brings_nothing_else():
    line = "import soma_jax, sys; assert soma_jax.load; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", line], check=True, timeout=60)


def test_experts_are_read_when_a_text_is_first_routed_to_them(directory, monkeypatch):
    read = []
    one = release.read_expert
    monkeypatch.setattr(release, "read_expert", lambda d, i, c: read.append(i) or one(d, i, c))
    ens = soma_jax.load(directory)
    routed = ens.route(TOPICS[1] * 9, k=1)
    assert not read
    ens.generate(TOPICS[1] * 20, 3, k=1)
    ens.generate(TOPICS[1] * 20, 3, k=1)
    assert read == routed
    assert ens.updates() == [7, 8, 9, 10]
    assert sorted(read) == [0, 1, 2, 3]


def test_every_byte_is_scored_once_and_knows_nothing_of_later_ones(ens):
    whole = text(2000)
    (full,) = ens.log_probabilities([whole])
    assert (full < 0).all()
    for some, log_p in zip(
        LENGTHS, ens.log_probabilities([whole[:n] for n in LENGTHS]), strict=True
    ):
        np.testing.assert_array_equal(log_p, full[:some], err_msg=str(some))
    assert ens.log_probabilities([b"", b"a"])[0].shape == (0,)


def test_a_score_is_the_protocols_after_the_first_257_bytes(ens):
    texts = [text(n, n % N) for n in LENGTHS]
    first = inference.beginnings(ens.experts, ens.router, texts, 2)
    expected = [-row[:n].sum(dtype=np.float64) for row, n in zip(first, LENGTHS, strict=True)]
    cut = windows.strided(texts, drop_incomplete=False)
    scores = evaluate.score(ens.experts, ens.router, cut, 2)
    expected += np.bincount(cut.document, scores.sums[:, 1], len(texts))
    np.testing.assert_allclose(ens.score(texts), expected / np.array(LENGTHS), atol=1e-6)
    assert len({tuple(ens.route(some)) for some in texts}) > 1


def test_many_texts_are_scored_group_by_group(ens, monkeypatch):
    texts = [text(n, n % N) for n in LENGTHS]
    expected = ens.score(texts)
    monkeypatch.setattr(pretrained, "_GROUP", 3)
    np.testing.assert_array_equal(ens.score(texts), expected)


def test_an_empty_text_has_no_score_and_a_str_is_its_utf8(ens):
    assert np.isnan(ens.score([""])[0])
    assert ens.score(["né" * 9]) == ens.score(["né".encode() * 9])
    assert ens.score(["né"], k=1) != ens.score(["né"], k=N)


def test_generated_text_is_what_was_drawn(ens):
    settings = {"temperature": 0.7, "top_k": 20, "seed": 3}
    drawn = b"".join(ens.stream(["The river"], 50, **settings))
    assert ens.generate("The river", 50, **settings) == drawn.decode("utf-8", "backslashreplace")
    several = ens.generate(["The river", b"law"], 50, **settings)
    assert several[0] == ens.generate("The river", 50, **settings)
    assert several[1] == ens.generate(b"law", 50, **settings)
    assert len(ens.generate("law", 300)) >= 300  # escapes in place of what is not UTF-8


def test_the_runs_test_text_is_that_of_its_config_without_what_was_screened(ens):
    drawn, left_out = ens.test_windows()
    documents = [d.read() for d in corpus.read_documents("embedded:test")]
    expected = windows.one_per_document([documents[0], *documents[2:]], count=10, seed=0)
    np.testing.assert_array_equal(drawn.ids, expected.ids)
    assert left_out == len(documents) - 10
    assert ens.score_windows(drawn).sums.shape == (10, 2)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda ens: ens.score("a text"), "list"),
        (lambda ens: ens.score([]), "list"),
        (lambda ens: ens.generate([]), "list"),
        (lambda ens: ens.route("a", k=0), "k=0"),
        (lambda ens: ens.generate("a", top_k=-1), "top_k"),
        (lambda ens: ens.generate("a", reroute=-1), "reroute"),
        (lambda _: soma_jax.load("nothing"), "is not a workdir"),
    ],
)
def test_bad_input_is_told(ens, use, message):
    with pytest.raises(SomaError, match=message):
        use(ens)
