"""EGGROLL's update against the formula, computed member by member in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directions import dense

from soma_jax import probes
from soma_jax.eggroll import eggroll

N, SIGMA = 6, 0.3


def loss(params, batch):
    hidden = jnp.tanh(batch @ params["w"]) * params["gain"]
    return jnp.square(hidden - 0.3).sum(-1)


def loss_in_numpy(w, gain, batch):
    return np.square(np.tanh(batch @ w) * gain - 0.3).sum(-1).mean()


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    return {
        "gain": jnp.asarray(rng.normal(size=4), jnp.float32),
        "w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
    }


@pytest.mark.parametrize("own_batch", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
def test_the_update_is_the_formulas_on_small_matrices(params, rank, own_batch):
    rng = np.random.default_rng(1)
    batch = rng.normal(size=(N, 2, 3) if own_batch else (2, 3)).astype(np.float32)
    key = jax.random.key(5)
    tx = eggroll(N, SIGMA, rank=rank, own_batch=own_batch, chunk=2)
    update, state = tx.update(
        params, tx.init(params), params, value_fn=loss, key=key, batch=jnp.asarray(batch)
    )

    members, losses = [], []
    for j in range(N):
        direction = dense(probes.low_rank_gaussian(rank)(key, j, params))
        for sign in (1, -1):
            e = {name: sign * np.asarray(z, np.float64) for name, z in direction.items()}
            moved = {name: np.asarray(params[name], np.float64) + SIGMA * e[name] for name in e}
            members.append(e)
            losses.append(loss_in_numpy(**moved, batch=batch[j] if own_batch else batch))
    fitness = -(np.array(losses) - np.mean(losses)) / np.std(losses)
    for name, got in update.items():
        ascent = sum(f * e[name] for f, e in zip(fitness, members, strict=True)) / (2 * N)
        np.testing.assert_allclose(got, -ascent, rtol=1e-4, atol=1e-6)
    assert float(state.loss) == pytest.approx(np.mean(losses), rel=1e-6)
    assert float(state.deviation) == pytest.approx(np.std(losses), rel=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_directions_have_the_moments_that_theory_says(rank):
    """Of one m x n matrix: E|z|^2 = mn, E[z z^T] = I, and the relative variance of an estimate,
    (mn + 1 + (2m + 2n + 2)/r)/q, for q directions."""
    m, n, draws = 3, 4, 40_000
    law = probes.low_rank_gaussian(rank)
    z = jax.jit(jax.vmap(lambda j: law(jax.random.key(0), j, jnp.zeros((m, n)))))(jnp.arange(draws))
    z = np.einsum("krm,krn->kmn", z.columns, z.rows).reshape(draws, -1)
    np.testing.assert_allclose(z.T @ z / draws, np.eye(m * n), atol=0.06)
    g = np.random.default_rng(0).normal(size=m * n)
    g /= np.linalg.norm(g)
    errors = np.square((z @ g)[:, None] * z - g).sum(1)
    expected = m * n + 1 + (2 * m + 2 * n + 2) / rank
    assert abs(errors.mean() - expected) < 5 * errors.std() / np.sqrt(draws)


def test_equal_losses_leave_the_parameters_alone(params):
    tx = eggroll(2, SIGMA)
    update, state = tx.update(
        params, tx.init(params), params, value_fn=lambda p, _: jnp.ones(3), key=jax.random.key(0)
    )
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(update))
    assert float(state.deviation) == 0
