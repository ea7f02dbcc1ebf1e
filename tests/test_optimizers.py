import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax import optimizers
from soma_jax.config import Stage

STAGE = Stage(n_pert=1, weight_decay=0.3, b1=0.8, b2=0.95, adam_eps=1e-4, learning_rate=0.02)


def adam(x: float, gradients: list[float], stage: Stage) -> list[float]:
    """Adam with the decay inside the gradient, in float64."""
    m = v = 0.0
    path = []
    for t, g in enumerate(gradients, start=1):
        g = g + stage.weight_decay * x
        m = stage.b1 * m + (1 - stage.b1) * g
        v = stage.b2 * v + (1 - stage.b2) * g**2
        m_hat, v_hat = m / (1 - stage.b1**t), v / (1 - stage.b2**t)
        x = x - stage.learning_rate * m_hat / (math.sqrt(v_hat) + stage.adam_eps)
        path.append(x)
    return path


@pytest.mark.parametrize("part", ["body", "head"])
def test_weight_decay_is_added_before_the_moments(part):
    gradients = [0.5, -0.1, 0.02]
    x, path = {"x": jnp.asarray(1.5)}, []
    tx = getattr(optimizers, part)(STAGE)
    state = tx.init(x)
    for update, g in enumerate(gradients):
        if part == "body":
            # In one dimension the estimate of a linear loss is its slope.
            value_fn = lambda x, batch: batch * x["x"]  # noqa: E731
            extra = {"value_fn": value_fn, "key": jax.random.key(update), "batch": jnp.asarray(g)}
            step, state = tx.update(x, state, x, **extra)
        else:
            step, state = tx.update({"x": jnp.asarray(g)}, state, x)
        x = jax.tree.map(jnp.add, x, step)
        path.append(float(x["x"]))
    np.testing.assert_allclose(path, adam(1.5, gradients, STAGE), rtol=1e-5)
    # Decoupled decay is another path: the test sees the difference.
    assert (
        abs(path[-1] - adam(1.5, gradients, dataclasses.replace(STAGE, weight_decay=0))[-1]) > 0.01
    )


def test_hyperparameters_are_the_stages():
    stage = dataclasses.replace(STAGE, eps=0.03)
    state = optimizers.body(stage).init({"x": jnp.ones(2)})
    rates = {name: float(value) for name, value in state.hyperparams.items()}
    assert rates == pytest.approx({"learning_rate": 0.02, "eps": 0.03})
    state = optimizers.head(stage).init(jnp.ones(2))
    assert set(state.hyperparams) == {"learning_rate"}


def scales(losses: list[float], patience: int) -> list[float]:
    """The plateau rule of the paper in plain Python: an improvement is 1e-8 or more."""
    best, stale, scale, result = math.inf, 0, 1.0, []
    for loss in losses:
        if loss < best - 1e-8:
            best, stale = loss, 0
        else:
            stale += 1
        if stale == patience:
            scale, stale = scale / 2, 0
        result.append(scale)
    return result


# Multiples of 4e-9 straddle the 1e-8 that counts as an improvement; NaN and infinity never do.
LOSSES = st.lists(
    st.sampled_from([4e-9 * i for i in range(8)] + [0.5, 1.0, 2.0, math.inf, math.nan]),
    min_size=24,
    max_size=24,
)


@functools.cache
def follower(looks: int):
    """A compiled function from validation losses to the scale after each."""
    tx = optimizers.plateau(dataclasses.replace(STAGE, patience=50 * looks, validate_every=50))

    def look(state, loss):
        _, state = tx.update({}, state, value=loss)
        return state, state.scale

    return jax.jit(lambda losses: jax.lax.scan(look, tx.init(jnp.ones(1)), losses)[1])


@settings(deadline=None, max_examples=40)
@given(LOSSES, st.sampled_from([1, 3, 8]))
def test_plateau_halves_after_patience_updates_without_improvement(losses, looks):
    path = follower(looks)(jnp.asarray(losses, jnp.float32))
    assert path.tolist() == scales(losses, looks)


@pytest.mark.parametrize("floor", [0.0, 1e-5, 3e-4])
def test_rate_and_eps_halve_together_down_to_the_floor_and_never_rise(floor):
    stage = dataclasses.replace(STAGE, learning_rate=1e-3, eps=2e-3, floor=floor, updates=1000)
    for start in (stage.learning_rate, stage.eps):
        path = [
            float(optimizers.scaled(stage, start, jnp.float32(0.5**i), jnp.int32(7 * i)))
            for i in range(12)
        ]
        np.testing.assert_allclose(path, [max(start * 0.5**i, floor) for i in range(12)], rtol=1e-6)
        assert (np.diff(path) <= 0).all()


def test_a_start_below_the_floor_stays_where_it_is():
    stage = dataclasses.replace(STAGE, learning_rate=1e-6, floor=1e-5)
    for scale in (1.0, 0.5, 2.0**-20):
        rate = optimizers.scaled(stage, stage.learning_rate, jnp.float32(scale), jnp.int32(0))
        assert float(rate) == pytest.approx(1e-6)


def test_cosine_goes_from_one_to_decay_to():
    stage = dataclasses.replace(STAGE, updates=200, decay_to=0.1, floor=0.0)
    at = lambda update: float(  # noqa: E731
        optimizers.scaled(stage, 1.0, jnp.float32(1), jnp.int32(update))
    )
    assert [at(0), at(100), at(200)] == pytest.approx([1, 0.55, 0.1])
    assert at(50) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert (np.diff([at(i) for i in range(0, 201, 20)]) < 0).all()


def test_leaf_adam_is_adam_with_one_second_moment_for_each_leaf():
    """Against the formula in float64, three updates."""
    rng = np.random.default_rng(0)
    params = {"w": np.zeros((3, 4)), "gain": np.zeros(5)}
    tx = optimizers.scale_by_leaf_adam(0.9, 0.99, 1e-8)
    state = tx.init(jax.tree.map(jnp.asarray, params))
    m = {k: np.zeros(x.shape) for k, x in params.items()}
    v = dict.fromkeys(params, 0.0)
    for t in (1, 2, 3):
        g = {k: rng.normal(size=x.shape) for k, x in params.items()}
        updates, state = tx.update(jax.tree.map(jnp.asarray, g), state)
        for k, x in g.items():
            m[k] = 0.9 * m[k] + 0.1 * x
            v[k] = 0.99 * v[k] + 0.01 * (x**2).mean()
            expected = m[k] / (1 - 0.9**t) / np.sqrt(v[k] / (1 - 0.99**t))
            np.testing.assert_allclose(updates[k], expected, rtol=1e-5)
    assert state.nu["w"].shape == ()
