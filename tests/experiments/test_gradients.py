"""Errors of estimates, against what a matrix of every window's gradient says of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directions import dense
from jax.flatten_util import ravel_pytree

from soma_jax import model, probes, stats
from soma_jax.config import Stage
from soma_jax.data import store
from soma_jax.experiments import gradients
from soma_jax.spsa import spsa


@pytest.fixture
def drawn():
    """An expert in float64, windows uint8 [6, 9] and their gradients [6, parameters]."""
    with jax.enable_x64(True):
        shape = model.ExpertConfig(width=3, embedding=3, blocks=1)
        params = model.init(jax.random.key(0), shape)
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        windows = np.random.default_rng(0).integers(0, 256, (6, 9), dtype=np.uint8)
        body, unravel = ravel_pytree(params["body"])

        def losses(flat):
            whole = {"head": jnp.asarray(params["head"]), "body": unravel(flat)}
            return model.sequence_losses(whole, windows)

        yield params, windows, np.asarray(jax.jacfwd(losses)(body))


def test_the_exact_gradient_is_of_the_mean_loss_and_nu_of_the_windows_gradients(drawn):
    params, windows, jacobian = drawn
    exact = gradients.exact(params, windows)
    g = jacobian.mean(0)
    np.testing.assert_allclose(exact.gradient, g, rtol=1e-9, atol=1e-12)
    assert exact.squared_norm == pytest.approx(g @ g)
    assert exact.nu == pytest.approx(((jacobian - g) ** 2).sum(1).mean() / (g @ g))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("probe", ["dense", "rank_one"])
def test_errors_are_those_of_directions_times_exact_derivatives(drawn, own, probe):
    """For a small radius: the mean over directions of (z . g of its batch) z."""
    params, windows, jacobian = drawn
    stage = Stage(n_pert=4, sequences=2, own_batch=own, probe=probe, eps=1e-5)
    keys = [jax.random.key(i) for i in range(5)]  # of which the devices do not have equal shares
    batches = gradients.draw_batches(6, stage, 5, np.random.default_rng(1))
    found = gradients.errors(gradients.exact(params, windows), stage, keys, batches)
    g = jacobian.mean(0)
    for key, batch, error in zip(keys, batches, found, strict=True):
        estimate = np.zeros_like(g)
        for j in range(4):
            z = np.asarray(ravel_pytree(dense(probes.LAWS[probe](key, j, params["body"])))[0])
            estimate += jacobian[batch[j] if own else batch].mean(0) @ z * z / 4
        # The truncation is of the order of (eps |z|)^2 = 1e-8, rounding of 1e-16 / eps.
        assert error == pytest.approx(((estimate - g) ** 2).sum() / (g @ g), rel=1e-6)


def test_a_measure_stands_beside_its_prediction(drawn):
    params, windows, _ = drawn
    exact = gradients.exact(params, windows)
    stage = Stage(n_pert=16, sequences=2, probe="dense", eps=1e-5)
    keys = [jax.random.key(i) for i in range(120)]
    batches = gradients.draw_batches(6, stage, 120, np.random.default_rng(1))
    found = gradients.measure(exact, stage, keys, batches)
    interval = stats.t_interval(gradients.errors(exact, stage, keys, batches))
    assert [found["measured"], *found["interval"]] == list(interval)
    parameters = exact.gradient.size
    assert found["predicted"] == gradients.predicted_variance(parameters, exact.nu, 16, 2, False)
    # Twice a 95% interval: 4 standard errors.
    assert abs(found["measured"] - found["predicted"]) < interval.high - interval.low


def test_batches_are_independent_within_an_estimate_and_even_over_the_repeats():
    rng = np.random.default_rng(0)
    shared = gradients.draw_batches(8, Stage(sequences=400), 24, rng)
    assert shared.shape == (24, 400)
    for place in shared.T:
        np.testing.assert_array_equal(np.bincount(place), np.full(8, 3))
    # Two places of one estimate hold the same window once in 8: 9,600 / 2 pairs, 5 deviations.
    same = (shared[:, ::2] == shared[:, 1::2]).mean()
    assert abs(same - 1 / 8) < 5 * np.sqrt(7 / 64 / 4800)
    own = gradients.draw_batches(8, Stage(n_pert=3, sequences=2, own_batch=True), 5, rng)
    assert own.shape == (5, 3, 2)
    assert all(len(set(place)) == 5 for place in own.reshape(5, -1).T)


def test_windows_start_with_chunks_of_the_shard(corpus, tmp_path):
    built = store.build_store(corpus["train"], tmp_path / "store", "text", 64)
    shard = np.array([5, 40, 41])
    drawn = gradients.draw_windows(built, shard, 20, 16, np.random.default_rng(0))
    assert drawn.shape == (20, 17)
    expected = {built.windows(built.chunks[[i]], 17).tobytes() for i in shard}
    assert {window.tobytes() for window in drawn} == expected


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sequences", [1, 3])
def test_predicted_variance_is_that_of_a_toy_whose_gradients_are_known(own, sequences):
    """Per-window gradients mean + noise, linear loss: the only randomness is what is predicted."""
    d, n_pert, repeats = 24, 5, 4000
    rng = np.random.default_rng(0)
    mean = rng.normal(size=d).astype(np.float32)
    spread = 2.0
    nu = d * spread**2 / float(mean @ mean)
    tx = spsa(n_pert, 0.5, law=probes.dense_rademacher, own_batch=own, chunk=n_pert)

    def estimate(key):
        first, second = jax.random.split(key)
        shape = (n_pert, sequences, d) if own else (sequences, d)
        batch = mean + spread * jax.random.normal(first, shape)
        loss = lambda w, batch: batch @ w  # noqa: E731
        w = jnp.zeros(d)
        return tx.update(w, None, w, value_fn=loss, key=second, batch=batch)[0]

    estimates = jax.jit(jax.vmap(estimate))(jax.random.split(jax.random.key(1), repeats))
    errors = ((np.asarray(estimates) - mean) ** 2).sum(1) / float(mean @ mean)
    expected = gradients.predicted_variance(d, nu, n_pert, sequences, own)
    assert abs(errors.mean() - expected) < 5 * errors.std() / np.sqrt(repeats)
