import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directions import as_matrix

from soma_jax import model, probes, whitening

SHAPE = model.ExpertConfig(width=8, blocks=2, embedding=6)
DAMPING = 0.05


def an_expert():
    params = model.init(jax.random.key(0), SHAPE)
    ids = np.random.default_rng(0).integers(256, size=(4, 32)).astype(np.int32)
    return params, ids


def factors_of(params, ids, damping=DAMPING):
    return whitening.factors(whitening.second_moments(model.forward(params, ids).inputs), damping)


def test_a_factor_is_a_root_of_the_inverse_of_the_damped_second_moment():
    params, ids = an_expert()
    factors = jax.jit(factors_of)(params, ids)
    inputs = model.forward(params, ids).inputs
    leaves = jax.tree.leaves(params["body"])
    seen = iter(jax.tree.leaves(inputs))
    for p, factor in zip(leaves, jax.tree.leaves(factors), strict=True):
        if p.ndim == 1:
            assert factor.shape == ()
            assert factor == 1
            continue
        x = np.asarray(next(seen), np.float64).reshape(-1, p.shape[0])
        second = x.T @ x / len(x)
        scaled = second / (np.trace(second) / p.shape[0]) + DAMPING * np.eye(p.shape[0])
        expected = np.linalg.inv(scaled)
        expected *= p.shape[0] / np.trace(expected)
        np.testing.assert_allclose(factor @ factor.T, expected, rtol=2e-3, atol=2e-3)
        assert np.square(factor).sum() == pytest.approx(p.shape[0], rel=1e-5)


def test_whitened_inputs_count_alike():
    """A direction's effect on a matrix's output has one variance, whichever input it goes by."""
    params, ids = an_expert()
    factors = factors_of(params, ids, 1e-4)
    x = np.asarray(model.forward(params, ids).inputs["blocks"][1]["mlp_out"]).reshape(-1, 32)
    seen = x @ np.asarray(factors["blocks"][1]["mlp_out"], np.float64)
    values = np.linalg.eigvalsh(seen.T @ seen / len(seen))
    before = np.linalg.eigvalsh(x.T @ x / len(x))
    assert values[-1] / values[-8] < 1.1  # the eight largest
    assert before[-1] / before[-8] > 5


@pytest.mark.parametrize("name", ["sparse", "dense", "gaussian", "rank_one"])
def test_whitened_directions_are_the_laws_times_the_factor(name):
    params, ids = an_expert()
    factors, law, key = (
        factors_of(params, ids),
        probes.LAWS[name],
        jax.random.key(3),
    )
    is_leaf = lambda x: isinstance(x, probes.LowRank)  # noqa: E731
    before = jax.tree.leaves(law(key, 2, params["body"]), is_leaf=is_leaf)
    after = jax.tree.leaves(
        whitening.whitened(law, factors)(key, 2, params["body"]), is_leaf=is_leaf
    )
    for z, whitened, factor in zip(before, after, jax.tree.leaves(factors), strict=True):
        assert type(z) is type(whitened)
        expected = factor @ as_matrix(z) if factor.ndim else z
        np.testing.assert_allclose(as_matrix(whitened), expected, rtol=1e-5, atol=1e-5)


def test_inputs_that_are_all_zero_are_damped():
    params, ids = an_expert()
    params["body"]["blocks"][0]["lstm_gain"] = jnp.zeros(8)
    factors = factors_of(params, ids)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(factors))
