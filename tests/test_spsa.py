import doctest
import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from directions import dense
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from soma_jax import model, probes
from soma_jax.spsa import SPSAState, spsa

LAWS = pytest.mark.parametrize("name", list(probes.LAWS))


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)])


def estimate(value_fn, params, key, batch=None, *, n_pert, eps, law="dense", **options):
    """One compiled update from a fresh state: (estimate, state)."""
    tx = spsa(n_pert, eps, law=probes.LAWS[law], **options)

    def update(params, key, batch):
        state = tx.init(params)
        return tx.update(params, state, params, value_fn=value_fn, key=key, batch=batch)

    return jax.jit(update)(params, key, batch)


def quadratic():
    """(params, value_fn, gradient at params, activities of sparse probes)."""
    rng = np.random.default_rng(0)
    params = {"matrix": jnp.ones((3, 5)), "gain": jnp.ones(4)}
    b = rng.normal(size=19).astype(np.float32)
    half = rng.normal(size=(19, 19)).astype(np.float32) / 8
    hessian = half @ half.T

    def value_fn(params, batch):
        # Structured directions know products alone; one with the identity shows the matrix.
        x = jnp.concatenate([(jnp.eye(3) @ params["matrix"]).ravel(), params["gain"]])
        return x @ b + x @ hessian @ x / 2

    gradient = jax.grad(value_fn)(params, None)
    q = {"matrix": jnp.full((3, 5), 0.5), "gain": jnp.ones(4)}
    return params, value_fn, gradient, q


def waves(xp=jnp):
    """(params, batch of 8, value_fn): a loss of each sequence, cheap to compile."""
    params = {
        "gain": np.array([1, 0.5, 2], np.float32),
        "w": np.array([[-1, -0.5, 0.1], [0.2, 0.5, 1]], np.float32),
    }
    batch = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)

    def value_fn(params, batch):
        return ((xp.sin(batch @ params["w"]) * params["gain"]) ** 2).sum(-1)

    return params, batch, value_fn


# The estimate is the paper's


@LAWS
@pytest.mark.parametrize("own_batch", [False, True])
def test_estimate_equals_a_loop_over_directions(name, own_batch):
    """Eq. 2, one direction and one sign after the other, with the directions as matrices."""
    n, eps, key = 8, 0.05, jax.random.key(3)
    params, batch, value_fn = waves(np)
    total, losses = np.zeros(9), []
    for j in range(n):
        z = dense(probes.LAWS[name](key, j, params))
        seen = batch[j] if own_batch else batch
        plus, minus = (
            value_fn({k: np.float64(params[k]) + sign * eps * z[k] for k in params}, seen).mean()
            for sign in (1, -1)
        )
        total += (plus - minus) / (2 * eps) * flat(z) / n
        losses += [plus, minus]
    g, state = estimate(
        waves()[2], params, key, batch, n_pert=n, eps=eps, law=name, own_batch=own_batch
    )
    assert np.abs(total).min() > 1e-3
    np.testing.assert_allclose(flat(g), total, atol=1e-5)
    assert float(state.loss) == pytest.approx(np.mean(losses), rel=1e-6)


@LAWS
def test_mean_of_many_directions_is_the_gradient_weighted_by_activity(name):
    params, value_fn, gradient, q = quadratic()
    n = 40_000
    g, _ = estimate(value_fn, params, jax.random.key(0), n_pert=n, eps=0.5, law=name, chunk=n)
    gradient, q = flat(gradient), flat(q) if name == "sparse" else np.ones(19)
    # One direction's variance at j: E[z_j^2 (z.g)^2] - (q_j g_j)^2.
    variance = q * (gradient**2 + (q * gradient**2).sum() - q * gradient**2) - (q * gradient) ** 2
    assert np.all(np.abs(flat(g) - q * gradient) < 5 * np.sqrt(variance / n))


@LAWS
def test_relative_variance_is_the_papers(name):
    """Section 6: sum_j q_j (1 + s - 2 q_j) g_j^2 / (n |g|^2); (d - 1)/n for dense probes and, since
    |z|^2 = d, for structured ones; (d + 1)/n for Gaussian ones."""
    params, value_fn, gradient, q = quadratic()
    n, repeats = 3, 20_000
    keys = jax.random.split(jax.random.key(1), repeats)
    run = lambda key: estimate(value_fn, params, key, n_pert=n, eps=0.5, law=name)[0]  # noqa: E731
    leaves = jax.tree.leaves(jax.jit(jax.vmap(run))(keys))
    estimates = np.concatenate([np.reshape(x, (repeats, -1)) for x in leaves], axis=1)
    gradient, q = flat(gradient), flat(q) if name == "sparse" else np.ones(19)
    norm = (gradient**2).sum()
    errors = ((estimates - q * gradient) ** 2).sum(1) / norm
    expected = (q * (1 + q.sum() - 2 * q) * gradient**2).sum() / (n * norm)
    if name != "sparse":
        assert expected == pytest.approx((19 - 1) / n)
    if name == "gaussian":
        expected = (19 + 1) / n
    assert abs(errors.mean() - expected) < 5 * errors.std() / math.sqrt(repeats)


def test_estimates_the_gradient_of_an_expert():
    """Against reverse-mode differentiation, coordinate by coordinate."""
    params = model.init(jax.random.key(0), model.ExpertConfig(width=4, blocks=1, embedding=4))
    windows = np.random.default_rng(0).integers(256, size=(2, 5), dtype=np.uint8)

    def value_fn(body, windows):
        return model.sequence_losses({"head": params["head"], "body": body}, windows)

    n, body, key = 4096, params["body"], jax.random.key(0)
    g, _ = estimate(value_fn, body, key, windows, n_pert=n, eps=1e-2, law="sparse", chunk=64)
    gradient = flat(jax.jit(jax.grad(lambda body: value_fn(body, windows).mean()))(body))
    q = flat(jax.tree.map(lambda x: np.full(x.shape, 0.5 if x.ndim == 2 else 1.0), body))
    variance = q * (gradient**2 + (q * gradient**2).sum() - q * gradient**2) - (q * gradient) ** 2
    scores = (flat(g) - q * gradient) / np.sqrt(variance / n)
    assert np.abs(scores).max() < 5
    assert (scores**2).mean() == pytest.approx(1, abs=5 * math.sqrt(2 / scores.size))
    cosine = flat(g) @ (q * gradient) / np.linalg.norm(flat(g)) / np.linalg.norm(q * gradient)
    assert cosine > 0.9


@LAWS
def test_relative_variance_on_an_expert_is_the_papers(name):
    """On a model, against its exact gradient by reverse mode; eps is small beside its curvature."""
    params = model.init(jax.random.key(0), model.ExpertConfig(width=4, blocks=1, embedding=4))
    windows = np.random.default_rng(0).integers(256, size=(2, 5), dtype=np.uint8)
    body, n, repeats = params["body"], 4, 1000

    def value_fn(body, windows):
        return model.sequence_losses({"head": params["head"], "body": body}, windows)

    gradient = flat(jax.jit(jax.grad(lambda body: value_fn(body, windows).mean()))(body))
    q = flat(jax.tree.map(lambda x: np.full(x.shape, 0.5 if x.ndim == 2 else 1.0), body))
    if name != "sparse":
        q = np.ones_like(q)
    run = lambda key: estimate(  # noqa: E731
        value_fn, body, key, windows, n_pert=n, eps=3e-3, law=name, chunk=n
    )[0]
    keys = jax.random.split(jax.random.key(1), repeats)
    estimates = jax.vmap(lambda tree: ravel_pytree(tree)[0])(jax.jit(jax.vmap(run))(keys))
    norm = (gradient**2).sum()
    errors = ((np.asarray(estimates, np.float64) - q * gradient) ** 2).sum(1) / norm
    expected = (q * (1 + q.sum() - 2 * q) * gradient**2).sum() / (n * norm)
    if name == "gaussian":
        expected = (q.size + 1) / n
    assert abs(errors.mean() - expected) < 5 * errors.std() / math.sqrt(repeats)
    assert errors.std() / math.sqrt(repeats) < expected / 20


@pytest.mark.parametrize("own_batch", [False, True])
def test_both_signs_see_the_same_batch(own_batch):
    """What the batch alone decides cancels exactly, however large it is."""
    batch = np.random.default_rng(0).normal(0, 1e6, (4, 3)).astype(np.float32)
    value_fn = lambda x, batch: batch + 0 * x  # noqa: E731
    g, _ = estimate(
        value_fn, jnp.ones(()), jax.random.key(0), batch, n_pert=4, eps=1e-3, own_batch=own_batch
    )
    assert float(g) == 0


def test_losses_are_subtracted_sequence_by_sequence():
    """Large losses that differ from each other would round a difference of means away."""
    noise = 2.0**19 * np.arange(7, dtype=np.float32)
    g, _ = estimate(
        lambda x, batch: x + batch, jnp.ones(()), jax.random.key(0), noise, n_pert=1, eps=0.25
    )
    assert float(g) == pytest.approx(1, rel=1e-6)


def test_low_precision_losses_are_subtracted_in_float32():
    """The difference of two bfloat16 losses has more digits than bfloat16 holds."""
    value_fn = lambda x, batch: jnp.where(x > 1, 256, -1.0).astype(jnp.bfloat16)  # noqa: E731
    g, _ = estimate(value_fn, jnp.ones(()), jax.random.key(0), n_pert=1, eps=0.5)
    assert float(g) == 257


def test_a_radius_that_rounds_away_is_refused():
    params = jnp.ones(3, jnp.bfloat16)
    with pytest.raises(ValueError, match="rounds away on bfloat16"):
        estimate(lambda x, batch: x.sum(), params, jax.random.key(0), n_pert=1, eps=1e-3)


# It works anywhere


@pytest.mark.parametrize("own_batch", [False, True])
def test_chunks_do_not_change_the_result(own_batch):
    params, batch, value_fn = waves()
    results = []
    for chunk in (1, 2, 3, 100):
        g, state = estimate(
            value_fn, params, jax.random.key(0), batch,
            n_pert=8, eps=0.1, own_batch=own_batch, chunk=chunk,
        )  # fmt: skip
        results.append(np.append(flat(g), state.loss))
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-6)


def probe_mesh(devices):
    return jax.make_mesh(
        (devices,), ("probe",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("own_batch", [False, True])
def test_directions_split_over_devices_give_the_same_estimate(devices, own_batch):
    """The paper's DDPP: the same directions, the same batch, the same estimate."""
    params, batch, value_fn = waves()

    def run(params, key, batch, axis_name=None):
        return estimate(
            value_fn, params, key, batch, n_pert=8, eps=0.1, law="sparse",
            own_batch=own_batch, chunk=2, axis_name=axis_name,
        )  # fmt: skip

    split = jax.shard_map(
        functools.partial(run, axis_name="probe"),
        mesh=probe_mesh(devices),
        in_specs=(P(), P(), P("probe") if own_batch else P()),
        out_specs=P(),
    )
    one = jax.jit(run)(params, jax.random.key(5), batch)
    many = jax.jit(split)(params, jax.random.key(5), batch)
    np.testing.assert_allclose(flat(many), flat(one), atol=1e-6)


def test_directions_that_do_not_divide_over_devices_are_refused():
    run = jax.shard_map(
        lambda x: estimate(
            lambda x, _: x.sum(), x, jax.random.key(0), n_pert=3, eps=0.1, axis_name="probe"
        )[0],
        mesh=probe_mesh(2),
        in_specs=P(),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="n_pert=3 cannot be split over 2 devices"):
        run(jnp.ones(2))


@pytest.mark.parametrize(
    "params",
    [
        jnp.ones(()),
        jnp.ones(3),
        (jnp.ones(2), [jnp.ones((2, 2)), {"x": jnp.ones(())}]),
        {"empty": jnp.ones((0, 3)), "full": jnp.ones(2), "none": None},
    ],
    ids=["scalar", "vector", "nested", "empty leaf"],
)
def test_any_pytree_and_any_loss(params):
    value_fn = lambda params, _: sum(x.sum() for x in jax.tree.leaves(params))  # noqa: E731
    g, state = estimate(value_fn, params, jax.random.key(0), n_pert=8, eps=0.5)
    jax.tree.map(lambda g, p: np.testing.assert_equal(g.shape, p.shape), g, params)
    assert flat(g).size < 2 or (flat(g) != 0).any()
    assert state.loss.dtype == jnp.float32
    assert float(state.loss) == pytest.approx(float(value_fn(params, None)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtypes_are_kept(dtype):
    with jax.enable_x64(dtype == "float64"):
        params = {"w": jnp.ones((2, 2), dtype), "gain": jnp.ones(2, dtype)}
        value_fn = lambda p, _: (p["w"].sum() + p["gain"].sum()).astype(dtype)  # noqa: E731
        g, state = estimate(value_fn, params, jax.random.key(0), n_pert=4, eps=0.25)
    assert {x.dtype for x in jax.tree.leaves(g)} == {jnp.dtype(dtype)}
    assert state.loss.dtype == jnp.float32


def test_float64_losses_are_subtracted_in_float64():
    with jax.enable_x64(True):
        g, _ = estimate(
            lambda x, _: 1e6 + x, jnp.ones((), jnp.float64), jax.random.key(0), n_pert=1, eps=1e-4
        )
    assert float(g) == pytest.approx(1, rel=1e-5)


# It is an optax transformation


def parabola(x, batch):
    return (x**2).sum()


def test_optimizes_a_parabola_in_an_injected_chain_and_compiles_once():
    """With further arguments, as optax passes them on, and eps changed on the way."""

    @optax.inject_hyperparams
    def chain(learning_rate, eps):
        return optax.chain(
            spsa(4, eps, law=probes.dense_rademacher), optax.scale_by_learning_rate(learning_rate)
        )

    tx, traces = chain(learning_rate=0.1, eps=0.1), []

    @jax.jit
    def step(x, state, key):
        traces.append(key)
        updates, state = tx.update(
            x, state, x, value_fn=parabola, key=key, batch=None, value=0.0, grad=x
        )
        return optax.apply_updates(x, updates), state

    x = jnp.array([1.0, -2.0, 3.0])
    state = tx.init(x)
    for update in range(60):
        state.hyperparams["eps"] = jnp.asarray(0.1 / (1 + update), jnp.float32)
        x, state = step(x, state, jax.random.key(update))
    assert len(traces) == 1
    np.testing.assert_allclose(x, 0, atol=0.02)
    assert isinstance(state.inner_state[0], SPSAState)
    assert float(state.inner_state[0].loss) < 0.01


def test_incoming_updates_are_ignored():
    x, key = jnp.ones(3), jax.random.key(0)
    tx = spsa(2, 0.1, law=probes.dense_rademacher)
    results = [
        tx.update(u, tx.init(x), x, value_fn=parabola, key=key)[0] for u in (x, 100 * x, None)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize(("n_pert", "chunk"), [(0, 1), (-1, 1), (4, 0)])
def test_counts_below_one_are_refused(n_pert, chunk):
    with pytest.raises(ValueError, match=f"not {n_pert} and {chunk}"):
        spsa(n_pert, 1e-3, law=probes.dense_rademacher, chunk=chunk)


def test_missing_params_are_refused():
    tx = spsa(2, 1e-3, law=probes.dense_rademacher)
    with pytest.raises(ValueError, match="needs params"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), value_fn=parabola, key=jax.random.key(0))


def test_the_docstrings_example_runs():
    result = doctest.testmod(importlib.import_module("soma_jax.spsa"))
    assert result.attempted > 5
    assert result.failed == 0
