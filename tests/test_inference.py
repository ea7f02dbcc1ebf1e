import jax
import numpy as np
import pytest

from soma_jax import evaluate, inference, model
from soma_jax.data.windows import CONTEXT, WINDOW, Windows
from soma_jax.routing.router import Router

N, LENGTH = 5, 70
TOPICS = [
    b"river water boat fish lake ",
    b"music violin song choir drum ",
    b"court law judge jury crime ",
    b"star planet orbit moon comet ",
    b"bread butter soup salt oven ",
]
APPLY = jax.jit(model.apply)


@pytest.fixture(scope="module")
def experts():
    config = model.ExpertConfig(width=4, blocks=1, embedding=8)
    return [model.init(jax.random.key(i), config) for i in range(N)]


@pytest.fixture(scope="module")
def router():
    return Router.fit([topic * 9 for topic in TOPICS] * 3, N, seed=0, min_df=1)


def reference(params, ids: np.ndarray) -> np.ndarray:
    """Log-probability of every byte but the first, float64 [n, L - 1]."""
    logits = np.asarray(APPLY(params, ids[:, :-1].astype(np.int32))[0], np.float64)
    top = logits.max(-1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, ids[:, 1:, None].astype(int), -1)[..., 0]


@pytest.mark.parametrize(
    "n", [1, 3, 16, 17, 150], ids=lambda n: f"{n} texts"
)  # less than a piece, a piece, more than all devices take at once
def test_each_text_is_read_by_its_own_experts(experts, n):
    """Routes in any order, with groups of very unequal sizes, and an expert named twice."""
    rng = np.random.default_rng(n)
    ids = rng.integers(256, size=(n, LENGTH), dtype=np.uint8)
    routes = np.minimum(rng.geometric(0.5, size=(n, 3)) - 1, N - 1)
    routes[0] = 2
    found = inference.log_probabilities(experts, ids, routes, skip=20)
    assert found.dtype == np.float32
    each = np.stack([reference(params, ids) for params in experts])
    expected = each[routes, np.arange(n)[:, None]][..., 20:]
    np.testing.assert_allclose(found, expected, atol=2e-5)  # two float32 forwards, logits near 10


def test_nothing_is_read_for_no_texts(experts):
    empty = np.zeros((0, LENGTH), np.uint8)
    assert inference.log_probabilities(experts, empty, np.zeros((0, 2), int)).shape == (0, 2, 69)


def test_only_the_routed_experts_are_looked_up(experts):
    class Asked(list):
        asked: set = set()  # noqa: RUF012

        def __getitem__(self, index):
            self.asked.add(index)
            return super().__getitem__(index)

    some = Asked(experts)
    ids = np.zeros((40, LENGTH), np.uint8)
    inference.log_probabilities(some, ids, np.array([[3, 1]] * 40))
    assert some.asked == {1, 3}


def test_a_text_scores_the_same_in_any_company(experts):
    rng = np.random.default_rng(0)
    ids = rng.integers(256, size=(60, LENGTH), dtype=np.uint8)
    routes = rng.integers(N, size=(60, 2))
    together = inference.log_probabilities(experts, ids, routes)
    for rows in ([7], [59, 7, 3], rng.permutation(60)):
        alone = inference.log_probabilities(experts, ids[rows], routes[rows])
        np.testing.assert_array_equal(alone, together[rows])


def test_a_mixture_is_the_log_of_the_mean_probability():
    log_p = np.random.default_rng(0).normal(-3, 2, (4, 3, 50)).astype(np.float32)
    log_p[0, 0, 0] = -200  # float32 holds no such probability
    log_p[1, :, 1] = [-150, -160, -170]
    expected = np.log(np.exp(log_p.astype(np.float64)).mean(1))
    found = inference.mixture(log_p)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=5e-7)  # a few float32 roundings


@pytest.mark.parametrize("k", [1, 2, N])
def test_the_loss_is_that_of_evaluate(experts, router, k):
    """Float32 mixtures against float64 ones, over whole windows."""
    rng = np.random.default_rng(k)
    texts = [(TOPICS[i % N] * 50)[i : i + WINDOW] for i in range(40)]
    ids = np.stack([np.frombuffer(text, np.uint8) for text in texts])
    ids = np.where(rng.random(ids.shape) < 0.2, rng.integers(256, size=ids.shape), ids)
    ids = ids.astype(np.uint8)
    routes = router.route([row.tobytes() for row in ids], k, CONTEXT)
    log_p = inference.mixture(inference.log_probabilities(experts, ids, routes, CONTEXT))
    windows = Windows(ids, np.full(40, WINDOW, np.int32), np.arange(40, dtype=np.int32))
    scores = evaluate.score(experts, router, windows, k)
    assert -log_p.mean(dtype=np.float64) == pytest.approx(scores.nats(k), abs=1e-6)


@pytest.mark.parametrize("reroute", [0, 16, 100, 256, 1000])
def test_a_beginning_is_routed_on_what_is_there(experts, router, reroute):
    """Byte by byte: the experts are those of the bytes that were there at the last routing."""
    texts = [(b"the " * 12 + TOPICS[i] * 2 + TOPICS[i - 1] * 9)[: 300 - 80 * i] for i in range(3)]
    texts.append(b"." * 13 + b"song" + TOPICS[1])  # its first word is whole one byte after the 16th
    assert set(router.route([texts[3][:16]], 2)[0]) != set(router.route([texts[3][:17]], 2)[0])
    found = inference.beginnings(experts, router, texts, 2, reroute)
    assert found.shape == (4, CONTEXT + 1)
    chosen = set()
    for text, row in zip(texts, found, strict=True):
        ids = np.frombuffer(b"\n" + text[: CONTEXT + 1], np.uint8)[None]
        each = np.exp([reference(params, ids)[0] for params in experts])
        for position in range(len(text[: CONTEXT + 1])):
            there = position // reroute * reroute if reroute else 0
            if position == CONTEXT and reroute:
                there = CONTEXT
            (routed,) = router.route([text[:there]], 2)
            chosen.add(tuple(routed))
            expected = np.log(each[routed, position].mean())
            assert row[position] == pytest.approx(expected, abs=2e-5), (position, there)
    assert (len(chosen) > 1) == (reroute > 0)


def test_a_byte_does_not_change_what_came_before_it(experts, router):
    text = (TOPICS[0] * 3 + TOPICS[1] * 9)[: CONTEXT + 1]
    changed = text[:150] + TOPICS[2] * 4
    one, other = inference.beginnings(experts, router, [text, changed], 2)
    np.testing.assert_array_equal(one[:150], other[:150])
    assert (one[150:] != other[150:]).any()
