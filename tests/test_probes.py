import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directions import dense, structured

from soma_jax import probes, randomness

LAWS = pytest.mark.parametrize("name", list(probes.LAWS))
RADEMACHER = pytest.mark.parametrize("name", [name for name in probes.LAWS if name != "gaussian"])
STRUCTURED = pytest.mark.parametrize("name", ["rank_one", "flipout"])
# 33 coordinates are two random words of 32 signs: neighbours in a word and in a leaf both occur,
# as do two leaves of one shape.
TREE = {
    "a": np.zeros((3, 11), np.float32),
    "b": np.zeros((3, 11), np.float32),
    "gain": np.zeros(11, np.float32),
    "scalar": np.zeros((), np.float32),
}


def draw(name: str):
    """draw(key, params): direction 0 of an update, dense."""
    return lambda key, params: dense(probes.LAWS[name](key, 0, params))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def assert_frequency(hits: np.ndarray, probability: float):
    """Within five standard errors."""
    error = math.sqrt(probability * (1 - probability) / hits.size)
    assert abs(hits.mean() - probability) < 5 * error


@RADEMACHER
def test_values_have_their_frequencies(name):
    like = {"matrix": jnp.zeros((301, 97)), "cube": jnp.zeros((5, 7, 903)), "v": jnp.zeros(9999)}
    z = jax.jit(draw(name))(jax.random.key(3), like)
    for leaf, x in z.items():
        assert x.shape == like[leaf].shape
        active = 0.5 if name == "sparse" and leaf != "v" else 1.0
        if active == 1:
            assert set(np.unique(x)) == {-1, 1}
        else:
            assert set(np.unique(x)) == {-1, 0, 1}
            assert_frequency(np.asarray(x == 0), 0.5)
        assert_frequency(np.asarray(x == 1), active / 2)
        assert_frequency(np.asarray(x == -1), active / 2)


@RADEMACHER
@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 32, 33, 1000])
def test_every_coordinate_of_any_size_is_drawn(name, size):
    """No coordinate is constant, and none is a copy of another."""
    keys = jax.random.split(jax.random.key(size), 64)
    z = jax.jit(jax.vmap(draw(name), in_axes=(0, None)))(keys, jnp.zeros((1, size)))
    z = np.asarray(z)[:, 0]
    assert z.shape == (64, size)
    assert (z == 1).any(0).all()
    assert (z == -1).any(0).all()
    assert len({column.tobytes() for column in z.T}) == size


@LAWS
def test_pairs_of_coordinates_are_independent(name):
    """E[z z^T] is diagonal, and neither the sign nor the activity of one coordinate says anything
    about another's: within a leaf, within a random word, between leaves of one shape."""
    n = 8192
    keys = jax.random.split(jax.random.key(0), n)
    z = jax.jit(jax.vmap(lambda key: draw(name)(key, TREE)))(keys)
    z = np.concatenate([np.reshape(x, (n, -1)) for x in jax.tree.leaves(z)], axis=1)
    is_matrix = flat(jax.tree.map(lambda x: np.full(x.shape, x.ndim == 2), TREE))
    q = np.where(is_matrix & (name == "sparse"), 0.5, 1.0)
    second_moment = z.T @ z / n
    # Six standard errors: there are thousands of pairs.
    np.testing.assert_allclose(second_moment.diagonal(), q, atol=6 / math.sqrt(n))
    seen = np.concatenate([z, z**2 - q], axis=1)
    seen = seen[:, seen.any(0)]
    deviation = np.sqrt((seen**2).mean(0))
    correlation = (seen / deviation).T @ (seen / deviation) / n
    np.testing.assert_allclose(correlation, np.eye(len(correlation)), atol=6 / math.sqrt(n))


@LAWS
def test_directions_updates_and_experts_are_uncorrelated(name):
    """Keys as a run makes them: a stream's key for each expert, its updates, their directions."""
    like = {"matrix": jnp.zeros((64, 257)), "gain": jnp.zeros(33)}
    direction_of = jax.jit(lambda key, j: dense(probes.LAWS[name](key, j, like)))
    drawn = []
    for seed, expert in itertools.product((0, 1), (0, 1, 2)):
        key = randomness.key(seed, "probes", expert)
        for update, direction in itertools.product((0, 1, 2), (0, 1, 2)):
            drawn.append(flat(direction_of(jax.random.fold_in(key, update), direction)))
    z = np.stack(drawn).astype(np.float64)
    products = z @ z.T / np.sqrt(np.outer((z**2).sum(1), (z**2).sum(1)))
    # |z|^2 coordinates of one sign or another: normal of this width, whose tail at 6 is 2e-9; of a
    # rank-one direction the product of two such, whose tail at 20 is about as thin.
    within = 20 if name in ("rank_one", "flipout") else 6
    off_diagonal = np.abs(products - np.eye(len(z))).max()
    assert off_diagonal < within / math.sqrt((z[0] != 0).sum())


@LAWS
def test_a_direction_is_a_function_of_its_key(name):
    """Drawn again, without jit, and among others under vmap, it is the same."""
    law = draw(name)
    compiled = jax.jit(law)
    keys = jax.random.split(jax.random.key(7), 5)
    together = jax.jit(jax.vmap(law, in_axes=(0, None)))(keys, TREE)
    for i, key in enumerate(keys):
        alone = flat(compiled(key, TREE))
        np.testing.assert_array_equal(alone, flat(compiled(key, TREE)))
        np.testing.assert_array_equal(alone, flat([x[i] for x in jax.tree.leaves(together)]))
    np.testing.assert_array_equal(flat(law(keys[0], TREE)), flat(compiled(keys[0], TREE)))


@RADEMACHER
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtypes_are_kept_and_do_not_change_the_direction(name, dtype):
    law, key = jax.jit(draw(name)), jax.random.key(1)
    expected = flat(law(key, TREE))
    with jax.enable_x64(dtype == "float64"):
        z = law(key, jax.tree.map(lambda x: np.asarray(x, dtype), TREE))
        assert {x.dtype for x in jax.tree.leaves(z)} == {jnp.dtype(dtype)}
        np.testing.assert_array_equal(flat(z).astype(np.float32), expected)


def test_gaussian_coordinates_are_standard_normal():
    z = np.sort(flat(jax.jit(draw("gaussian"))(jax.random.key(0), jnp.zeros((100, 101)))))
    expected = (np.arange(z.size) + 0.5) / z.size
    cdf = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in z])
    # The Kolmogorov-Smirnov statistic is above 1.95 / sqrt(n) with probability 0.001.
    assert np.abs(cdf - expected).max() < 1.95 / math.sqrt(z.size)


@STRUCTURED
def test_a_structured_direction_acts_as_the_matrix_it_stands_for(name):
    rng = np.random.default_rng(0)
    x, p = (rng.normal(size=s).astype(np.float32) for s in ((4, 2, 7), (7, 11)))
    z = probes.LAWS[name](jax.random.key(0), 3, p)
    matrix = np.asarray(dense(z))
    assert structured(z)
    assert set(np.unique(matrix)) == {-1, 1}
    assert np.linalg.matrix_rank(matrix) == (1 if name == "rank_one" else 7)
    for scale in (0.3, -0.3, jnp.float32(0.3)):  # of a numpy and of a jax matrix
        for moved in (p + scale * z, jnp.asarray(p) + scale * z):
            np.testing.assert_allclose(
                jnp.asarray(x) @ moved, x @ (p + scale * matrix), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("name", ["rank_one", "flipout", "gaussian of rank 3"])
def test_a_structured_direction_has_the_rows_and_the_transpose_of_its_matrix(name):
    law = probes.LAWS.get(name, probes.low_rank_gaussian(3))
    p = np.random.default_rng(0).normal(size=(7, 11)).astype(np.float32)
    z = law(jax.random.key(0), 3, p)
    moved, matrix = p + 0.3 * z, p + 0.3 * np.asarray(dense(z))
    rows, x = jnp.array([[3, 0], [6, 3]]), jnp.ones((2, 11))
    np.testing.assert_allclose(moved[rows], matrix[rows], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(x @ moved.T, x @ matrix.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.ones((2, 7)) @ moved, np.ones((2, 7)) @ matrix, rtol=1e-5)
    weights = jnp.array([0.5, -2.0])
    some = jax.vmap(lambda j: law(jax.random.key(0), j, p))(jnp.arange(2))
    expected = sum(w * dense(law(jax.random.key(0), j, p)) for j, w in enumerate(weights))
    np.testing.assert_allclose(some.weighted_sum(weights), expected, rtol=1e-5, atol=1e-5)


@STRUCTURED
def test_a_weighted_sum_is_the_sum_of_the_matrices(name):
    weights = np.random.default_rng(0).normal(size=5).astype(np.float32)
    law, key, like = probes.LAWS[name], jax.random.key(0), np.zeros((3, 4), np.float32)
    z = jax.vmap(lambda j: 0.5 * law(key, j, like))(jnp.arange(5))
    expected = sum(w * 0.5 * np.asarray(dense(law(key, j, like))) for j, w in enumerate(weights))
    np.testing.assert_allclose(z.weighted_sum(weights), expected, rtol=1e-5, atol=1e-6)


def products(jaxpr):
    """(batch dimensions, shapes) of all products in a program."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            _, batch = equation.params["dimension_numbers"]
            found.append((batch, [v.aval.shape for v in equation.invars]))
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                found += products(inner)
    return found


@STRUCTURED
def test_directions_share_one_product_with_the_matrix(name):
    """What makes them fast: no product of each direction with a matrix of its own."""
    law, p, x = probes.LAWS[name], jnp.ones((7, 11)), jnp.ones((5, 4, 7))

    def both_signs(j, x):
        z = law(jax.random.key(0), j, p)
        return jax.vmap(lambda sign: x @ (p + sign * z))(jnp.array([1.0, -1.0]))

    found = products(jax.make_jaxpr(jax.vmap(both_signs))(jnp.arange(5), x).jaxpr)
    with_matrix = [batch for batch, shapes in found if (7, 11) in shapes]
    assert with_matrix == [((), ())] * (1 if name == "rank_one" else 2)


WORDS: list[Any] = [
    (0, "probes"),
    (1, "probes"),
    (0, "windows"),
    (0, "probes", 0),
    (0, "probes", 1),
]
WORDS += [(0, "probes", 0, 0), (0, "probes", 0, 1), (0, "probes", 1, 0), (2**32 - 1, "probes")]


def test_keys_differ_by_seed_stream_and_index_and_are_repeatable():
    data = [jax.random.key_data(randomness.key(*words)).tobytes() for words in WORDS]
    assert len(set(data)) == len(WORDS)
    assert data == [jax.random.key_data(randomness.key(*words)).tobytes() for words in WORDS]


def test_integers_differ_by_seed_stream_and_index_and_are_repeatable():
    integers = [randomness.integer(*words) for words in WORDS]
    assert len(set(integers)) == len(WORDS)
    assert all(0 <= i < 2**31 for i in integers)
    assert integers == [randomness.integer(*words) for words in WORDS]
