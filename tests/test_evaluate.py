import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax import evaluate, model
from soma_jax.data.windows import CONTEXT, STRIDE, WINDOW, Windows, strided
from soma_jax.routing.router import Router

N = 3
TOPICS = [
    b"river water boat fish lake ",
    b"music violin song choir drum ",
    b"court law judge jury ",
]


def text(length: int, seed: int) -> bytes:
    """Words of one topic, another one after each 300 bytes, and a few bytes that are not UTF-8."""
    rng = np.random.default_rng(seed)
    words = [rng.permutation(TOPICS[i % N].split()) for i in range(seed, seed + 1 + length // 300)]
    parts = [(b" ".join(map(bytes, some)) + b" \xff\x00 ") * 12 for some in words]
    return b"".join(part[:300] for part in parts)[:length]


@pytest.fixture(scope="module")
def experts():
    config = model.ExpertConfig(width=4, blocks=1, embedding=8)
    return [model.init(jax.random.key(i), config) for i in range(N)]


@pytest.fixture(scope="module")
def router():
    return Router.fit([topic * 9 for topic in TOPICS] * 3, N, seed=0, min_df=1)


@pytest.fixture(scope="module")
def windows():
    """Full windows and short ones, of all topics."""
    return strided(
        [text(n, i) for i, n in enumerate((2000, 2600, 1025, 258))], drop_incomplete=False
    )


def some_of(windows: Windows, rows) -> Windows:
    return Windows(windows.ids[rows], windows.lengths[rows], windows.document[rows])


def test_a_score_is_the_log_of_the_mean_probability(experts, router, windows):
    """Against float64, from the logits of `model.apply` and the experts that the router names."""
    assert len(set(windows.lengths)) > 3
    scores = evaluate.score(experts, router, windows, N)
    apply = jax.jit(model.apply)
    for row, (ids, length) in enumerate(zip(windows.ids, windows.lengths, strict=True)):
        (routed,) = router.route([ids[:CONTEXT].tobytes()], N)
        targets = ids[CONTEXT + 1 : length].astype(int)
        p = []
        for index in routed:
            logits, _ = apply(experts[index], ids[None, :-1].astype(np.int32))
            exp = np.exp(np.asarray(logits[0, CONTEXT : length - 1], np.float64))
            p.append(exp[np.arange(len(targets)), targets] / exp.sum(-1))
        nats = [-np.log(np.mean(p[:k], axis=0)).sum() for k in range(1, N + 1)]
        assert scores.routes[row].tolist() == routed.tolist()
        assert scores.counts[row] == len(targets)
        np.testing.assert_allclose(
            scores.sums[row] / len(targets), np.array(nats) / len(targets), atol=1e-6
        )
    for k in range(1, N + 1):
        assert scores.nats(k) == pytest.approx(scores.sums[:, k - 1].sum() / scores.counts.sum())


def test_experts_are_routed_on_the_first_256_bytes(experts, router, windows):
    scores = evaluate.score(experts, router, windows, 2)
    assert scores.routes.shape == (len(windows), 2)
    assert len(set(scores.routes[:, 0])) == N
    changed = windows.ids.copy()
    changed[:, CONTEXT:] = np.frombuffer((TOPICS[0] * 50)[: WINDOW - CONTEXT], np.uint8)
    again = evaluate.score(experts, router, Windows(changed, windows.lengths, windows.document), 2)
    np.testing.assert_array_equal(again.routes, scores.routes)


def test_a_score_does_not_depend_on_other_windows_or_padding(experts, router, windows):
    scores = evaluate.score(experts, router, windows, 2)
    count = len(windows)
    noise = np.random.default_rng(0).integers(256, size=windows.ids.shape, dtype=np.uint8)
    beyond = np.arange(WINDOW) >= windows.lengths[:, None]
    others = {
        "another order": (some_of(windows, np.arange(count)[::-1]), np.arange(count)[::-1]),
        "among many": (
            some_of(windows, np.tile(np.arange(count), 12)),
            np.tile(np.arange(count), 12),
        ),
        "one alone": (some_of(windows, [5]), [5]),
        "other padding": (
            Windows(np.where(beyond, noise, windows.ids), windows.lengths, windows.document),
            np.arange(count),
        ),
    }
    assert beyond.any()
    for what, (some, rows) in others.items():
        again = evaluate.score(experts, router, some, 2)
        np.testing.assert_array_equal(again.sums, scores.sums[rows], err_msg=what)
        np.testing.assert_array_equal(again.routes, scores.routes[rows], err_msg=what)


def test_blocks_do_not_change_scores(experts, router, windows, monkeypatch):
    whole = evaluate.score(experts, router, windows, 2)
    monkeypatch.setattr(evaluate, "_BLOCK", 5)
    np.testing.assert_array_equal(evaluate.score(experts, router, windows, 2).sums, whole.sums)


@pytest.mark.parametrize("length", [0, 1, 256, 257, 258, 1024, 1025, 1026, 1025 + 2 * STRIDE])
def test_every_byte_after_the_first_257_is_scored_once(experts, router, length):
    some = strided([text(length, 0)], drop_incomplete=False)
    scores = evaluate.score(experts, router, some, 1)
    assert scores.counts.sum() == max(0, length - 257)
    assert np.isnan(scores.nats(1)) == (length <= 257)


@settings(max_examples=5, deadline=None)
@given(document=st.binary(min_size=258, max_size=1100), k=st.integers(1, N + 1))
def test_an_expert_without_final_gain_scores_ln_256(experts, router, document, k):
    """All logits are zero then, so every byte has probability 1/256 under any mean."""
    silent = [
        {**params, "body": {**params["body"], "final_gain": np.zeros(4, np.float32)}}
        for params in experts
    ]
    scores = evaluate.score(silent, router, strided([document], drop_incomplete=False), k)
    assert scores.nats(min(k, N)) == pytest.approx(np.log(256), abs=1e-6)


def test_one_expert_needs_no_router(experts, windows):
    single = Router.fit([], 1, seed=0)
    without = evaluate.score(experts[:1], None, windows, 1)
    np.testing.assert_array_equal(
        without.sums, evaluate.score(experts[:1], single, windows, 4).sums
    )
