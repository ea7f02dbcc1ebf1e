"""The router: who gets which text, and that a saved router is the same router or an error."""

import dataclasses
import json
import os
from typing import Any

import numpy as np
import pytest

from soma_jax.errors import SomaError
from soma_jax.routing import Router, router
from soma_jax.routing.features import TextFeatures

TOPICS = [
    ["whale", "ship", "harpoon", "captain", "ocean", "sail", "wind", "deck"],
    ["function", "return", "static", "pointer", "compile", "buffer", "loop", "index"],
    ["congress", "nation", "president", "treaty", "public", "citizen", "law", "union"],
]


def chunks(n: int = 90) -> list[bytes]:
    """Chunk i, 300 bytes or more, is about topic i % 3."""
    rng = np.random.default_rng(0)
    return [" and the ".join(rng.choice(TOPICS[i % 3], 30)).encode() for i in range(n)]


@pytest.fixture(scope="module")
def fitted() -> Router:
    return Router.fit(chunks(), 3, seed=0)


def by_hand(centroids: list[list[float]]) -> Router:
    """Features of a text: the shares of the words 'aa' and 'bb'."""
    text_features = TextFeatures(
        terms=("aa", "bb"),
        idf=np.ones(2, np.float32),
        components=np.eye(2, dtype=np.float32),
        mean=np.zeros(2, np.float32),
    )
    return Router(text_features, np.array(centroids, np.float32))


def test_topics_become_experts(fitted):
    expert = fitted.assign(chunks())
    assert expert.dtype == np.int32
    topic_of = [np.bincount(np.arange(90)[expert == e] % 3, minlength=3) for e in range(3)]
    assert sorted(counts.argmax() for counts in topic_of) == [0, 1, 2]
    assert [sorted(counts) for counts in topic_of] == [[0, 0, 30]] * 3


def test_top_terms_are_the_words_of_the_topic(fitted):
    topic_of = fitted.assign(chunks()[:3])
    for topic, expert in enumerate(topic_of):
        assert set(fitted.top_terms(5)[expert]) <= set(TOPICS[topic])
    assert [len(terms) for terms in fitted.top_terms(5)] == [5, 5, 5]
    # No more than there are: only words above the mean are listed.
    assert all(len(terms) < 24 for terms in fitted.top_terms(100))


def test_the_nearest_experts_come_first_and_ties_go_by_index():
    same = by_hand([[0, 1], [1, 0], [1, 0], [0, 1], [-1, 0]])
    assert same.route([b"aa", b"bb bb bb aa"], k=5).tolist() == [[1, 2, 0, 3, 4], [0, 3, 1, 2, 4]]
    assert same.assign([b"aa", b"bb"]).tolist() == [1, 0]


def test_route_with_whole_texts_begins_with_the_assigned_expert(fitted):
    texts = chunks()
    np.testing.assert_array_equal(fitted.route(texts, 1, 10**6)[:, 0], fitted.assign(texts))


def test_k_is_clipped_to_the_number_of_experts(fitted):
    routed = fitted.route(chunks(7), k=4)
    assert routed.shape == (7, 3)
    assert routed.dtype == np.int32
    np.testing.assert_array_equal(np.sort(routed, axis=1), [[0, 1, 2]] * 7)


def test_only_the_first_bytes_of_a_text_route_it(fitted):
    sea, code = chunks()[:2]
    sea, code = sea[:256], code[:256]
    np.testing.assert_array_equal(fitted.route([sea + code * 9], 3), fitted.route([sea], 3))
    assert fitted.route([sea + code * 9], 1) != fitted.route([sea + code * 9], 1, prefix_bytes=2000)
    router = by_hand([[1, 0], [0, 1]])
    assert router.route([b"aa bb bb"], 1, prefix_bytes=3).tolist() == [[0]]
    assert router.route([b"aa bb bb"], 1, prefix_bytes=8).tolist() == [[1]]


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"zzz unknown", b"\xe2\x82"])
def test_texts_without_a_known_word_are_all_routed_alike(fitted, text):
    np.testing.assert_array_equal(fitted.route([text], 3), fitted.route([b""], 3))


def test_no_texts_are_no_routes(fitted):
    assert fitted.route([], 2).shape == (0, 2)
    assert fitted.assign([]).shape == (0,)


@pytest.mark.parametrize(("k", "prefix_bytes"), [(0, 256), (-1, 256), (1, 0)])
def test_routing_to_nobody_or_by_nothing_is_refused(fitted, k, prefix_bytes):
    with pytest.raises(SomaError, match="1 or more"):
        fitted.route(chunks(1), k, prefix_bytes)


def test_scores_do_not_depend_on_the_batch(fitted, monkeypatch):
    texts = [*chunks(), b"", b"whale loop", b"law"]
    together = fitted.similarities(texts)
    assert together.dtype == np.float32
    np.testing.assert_array_equal(
        together, np.concatenate([fitted.similarities([text]) for text in texts])
    )
    np.testing.assert_array_equal(together, fitted.similarities(texts[::-1])[::-1])
    experts = fitted.route(texts, 3)
    monkeypatch.setattr(router, "_BLOCK", 7)
    np.testing.assert_array_equal(experts, fitted.route(texts, 3))


def test_similarities_are_cosines(fitted):
    texts = chunks()
    np.testing.assert_allclose(
        fitted.similarities(texts), fitted.features(texts) @ fitted.centroids.T, atol=1e-6
    )


def test_a_single_expert_gets_everything_without_reading_it(tmp_path):
    texts = [b"", b"\x00\x01", b"the"]  # nothing that could be clustered
    single = Router.fit(texts, 1, seed=0)
    single.save(tmp_path)
    for one in (single, Router.load(tmp_path)):
        assert one.n_experts == 1
        assert one.assign(texts).tolist() == [0, 0, 0]
        assert one.route(texts, k=4).tolist() == [[0], [0], [0]]
        assert one.similarities(texts).shape == (3, 1)
        assert one.features(texts).shape == (3, 0)
        assert one.top_terms() == [[]]


@pytest.mark.parametrize(
    ("texts", "n_experts", "message"),
    [
        (chunks(12), 13, "12 chunks cannot make 13 clusters"),
        (chunks(90), 0, "cannot make 0 clusters"),
        ([b"whale ship", b"loop index"] * 9, 3, "only 2 of the 18 chunks"),
        ([b"\x00\x01"] * 9, 2, "n_experts=1"),
    ],
)
def test_what_cannot_be_fitted_says_why(texts, n_experts, message):
    with pytest.raises(SomaError, match=message):
        Router.fit(texts, n_experts, seed=0, min_df=1)


def test_settings_reach_the_features():
    small = Router.fit(chunks(), 2, seed=0, max_features=10, n_components=3)
    assert len(small.text_features.terms) == 10
    assert small.centroids.shape == (2, 3)


def test_same_texts_and_seed_give_the_same_router(fitted):
    assert Router.fit(chunks(), 3, seed=0).fingerprint == fitted.fingerprint


def test_the_seed_reaches_the_clustering():
    rng = np.random.default_rng(1)  # texts without topics: every start ends elsewhere
    texts = [" ".join(rng.choice(np.ravel(TOPICS), 20)).encode() for _ in range(60)]
    assert len({Router.fit(texts, 3, seed=seed).fingerprint for seed in range(3)}) > 1


@pytest.mark.parametrize("part", ["terms", "idf", "components", "mean", "centroids"])
def test_any_change_changes_the_fingerprint(part):
    one = by_hand([[1, 0], [0, 1]])
    if part == "centroids":
        other = by_hand([[1, 0], [0, -1]])
    else:
        value: Any = ("aa", "bc") if part == "terms" else getattr(one.text_features, part) + 1
        changed = dataclasses.replace(one.text_features, **{part: value})
        other = dataclasses.replace(one, text_features=changed)
    assert other.fingerprint != one.fingerprint


def test_a_loaded_router_is_the_saved_one(fitted, tmp_path):
    fitted.save(tmp_path / "deep" / "router")
    loaded = Router.load(tmp_path / "deep" / "router")
    assert loaded.fingerprint == fitted.fingerprint
    texts = [*chunks(), b"", b"whale loop \xff"]
    np.testing.assert_array_equal(loaded.features(texts), fitted.features(texts))
    np.testing.assert_array_equal(loaded.route(texts, 3), fitted.route(texts, 3))
    assert loaded.top_terms() == fitted.top_terms()


def test_words_of_any_script_survive_saving(tmp_path):
    texts = ["größe straße", "размер слова", "数据 模型"]
    fitted = Router.fit([text.encode() for text in texts] * 5, 3, seed=0)
    fitted.save(tmp_path)
    assert Router.load(tmp_path).text_features.terms == fitted.text_features.terms
    assert "größe" in fitted.text_features.terms


def test_saving_again_replaces_and_leaves_nothing_else(fitted, tmp_path):
    by_hand([[1, 0], [0, 1]]).save(tmp_path)
    fitted.save(tmp_path)
    assert Router.load(tmp_path).fingerprint == fitted.fingerprint
    assert sorted(os.listdir(tmp_path)) == ["router.json", "router.npz"]


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_interrupted_save_leaves_no_router(fitted, tmp_path, monkeypatch, fails_at):
    by_hand([[1, 0], [0, 1]]).save(tmp_path)
    replace, calls = os.replace, []

    def interrupted(source, target):
        calls.append(target)
        if len(calls) > fails_at:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted.save(tmp_path)
    with pytest.raises(SomaError, match="no router"):
        Router.load(tmp_path)
    monkeypatch.undo()
    fitted.save(tmp_path)
    assert Router.load(tmp_path).fingerprint == fitted.fingerprint


@pytest.mark.parametrize("name", ["router.json", "router.npz"])
def test_no_router_is_an_error(fitted, tmp_path, name):
    with pytest.raises(SomaError, match="no router"):
        Router.load(tmp_path / "nothing")
    fitted.save(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(SomaError, match=f"no router.*{name} is missing"):
        Router.load(tmp_path)


@pytest.mark.parametrize("name", ["router.json", "router.npz"])
def test_damage_is_an_error_or_harmless(fitted, tmp_path, name):
    fitted.save(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for position in rng.integers(len(whole), size=100):
        broken = bytearray(whole)
        broken[position] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        try:
            assert Router.load(tmp_path).fingerprint == fitted.fingerprint
            assert name == "router.json"  # a space or a count, say: nothing that is read
        except SomaError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017
    path.write_bytes(whole[:-10])
    with pytest.raises(SomaError, match="router"):
        Router.load(tmp_path)


def test_another_format_is_refused(fitted, tmp_path):
    fitted.save(tmp_path)
    about = json.loads((tmp_path / "router.json").read_text())
    (tmp_path / "router.json").write_text(json.dumps(about | {"format": "soma_jax router 2"}))
    with pytest.raises(SomaError, match="does not describe"):
        Router.load(tmp_path)


@pytest.mark.parametrize(
    "centroids",
    [
        np.array([[np.nan, 0]], np.float32),
        np.zeros((0, 2), np.float32),
        np.zeros((2, 3), np.float32),
        np.zeros((2, 2)),
    ],
)
def test_damaged_centroids_are_refused(centroids):
    with pytest.raises(SomaError, match="damaged"):
        Router(by_hand([[1, 0]]).text_features, centroids)
