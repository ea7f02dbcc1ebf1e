import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soma_jax import activity, ensemble, expert, model
from soma_jax.config import Stage

SHAPE = model.ExpertConfig(width=4, blocks=2, embedding=6)
LENGTH = 4
SITES = ("gates", "hidden", "written")
MATRICES = {
    "gates": ("lstm_input", "lstm_recurrent"),
    "hidden": ("mlp_in",),
    "written": ("mlp_out",),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def problem():
    params = model.init(jax.random.key(0), SHAPE)
    params = jax.tree.map(lambda x: 1.5 * x.astype(jnp.float64), params)
    windows = np.random.default_rng(0).integers(0, 256, (3, LENGTH + 1), dtype=np.uint8)
    return params, jnp.asarray(windows)


def run(tx, params, windows, key, state=None):
    """(gradient, state) of one update."""
    state = tx.init(params) if state is None else state
    return tx.update(params, state, params, complete=lambda x: x, key=key, batch=(windows, None))


def by_noise(params, windows, function):
    """`function` of the losses [T, B], differentiated by the noise at every site."""
    zero = jax.tree.map(lambda units: jnp.zeros((LENGTH, len(windows), units)), model.sites(params))

    def losses(noise):
        ran = model.forward(params, windows[:, :-1].astype(int), None, noise)
        log_p = jax.nn.log_softmax(ran.features @ params["head"].T)
        return -jnp.take_along_axis(log_p, windows[:, 1:].T[..., None].astype(int), -1)[..., 0]

    return jax.jacrev(lambda noise: function(losses(noise)))(zero)


def expected_gradient(params, windows, credit):
    """Of the body's matrices, when a unit's error is its effect on the losses of K bytes: by
    reverse mode through the noise, and a loop over bytes."""
    inputs = model.forward(params, windows[:, :-1].astype(int)).inputs
    of_bytes = by_noise(params, windows, lambda losses: losses.sum(1))  # [T, T, B, units]

    def errors(jacobian, credit):
        return jnp.stack([jacobian[t : t + credit, t].sum(0) for t in range(LENGTH)])

    result = {"blocks": []}
    for i, block in enumerate(of_bytes["blocks"]):
        last = i == SHAPE.blocks - 1
        of = {
            site: errors(block[site], 1 if last and site != "gates" else credit) for site in SITES
        }
        result["blocks"].append(
            {
                name: jnp.einsum("tbi,tbj->ij", inputs["blocks"][i][name], of[site])
                / windows.size
                * (LENGTH + 1)
                / LENGTH
                for site in SITES
                for name in MATRICES[site]
            }
        )
    of_projection = errors(of_bytes["input_projection"], credit)
    result["input_projection"] = jnp.einsum(
        "tbi,tbj->ij", inputs["input_projection"], of_projection
    ) / (LENGTH * len(windows))
    return result


def test_with_all_bytes_credited_what_is_expected_is_the_gradient():
    params, windows = problem()
    exact = jax.grad(
        lambda body: model.sequence_losses({"head": params["head"], "body": body}, windows).mean()
    )(params["body"])
    expected = expected_gradient(params, windows, LENGTH)
    for name in ("input_projection",):
        np.testing.assert_allclose(expected[name], exact[name], rtol=1e-6, atol=1e-12)
    for ours, theirs in zip(expected["blocks"], exact["blocks"], strict=True):
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-9)


def estimates(credit, draws, mask=None):
    params, windows = problem()
    tx = activity.perturbation(1e-4, credit)
    one = jax.jit(lambda key: run(tx, params, windows, key)[0])
    return params, windows, jax.lax.map(one, jax.random.split(jax.random.key(3), draws))


def assert_mean(estimates, expected):
    """The mean over draws is the expected one, within 5 standard errors (a coordinate in two
    million lies outside by chance; there are 400)."""
    mean, error = estimates.mean(0), estimates.std(0) / np.sqrt(len(estimates))
    assert error.max() > 0
    np.testing.assert_array_less(np.abs(mean - expected), 5 * error + 1e-9)


@pytest.mark.parametrize("credit", [1, 2, LENGTH])
def test_the_estimate_is_unbiased_for_the_losses_that_are_credited(credit):
    params, windows, ours = estimates(credit, 4000)
    expected = expected_gradient(params, windows, credit)
    assert_mean(ours["body"]["input_projection"], expected["input_projection"])
    for block, of in zip(ours["body"]["blocks"], expected["blocks"], strict=True):
        for name in of:
            assert_mean(block[name], of[name])
        assert not block["lstm_gain"].any()


@pytest.mark.parametrize("site", SITES)
def test_each_site_alone(site, monkeypatch):
    draw = activity.draw

    def only(*args):
        noise = jax.tree.map(jnp.zeros_like, draw(*args))
        for quiet, all_of in zip(noise["blocks"], draw(*args)["blocks"], strict=True):
            quiet[site] = all_of[site]
        return noise

    monkeypatch.setattr(activity, "draw", only)
    params, windows, ours = estimates(LENGTH, 2000)
    expected = expected_gradient(params, windows, LENGTH)
    for block, of in zip(ours["body"]["blocks"], expected["blocks"], strict=True):
        for name in of:
            if name in MATRICES[site]:
                assert_mean(block[name], of[name])
            else:
                assert not block[name].any()


def test_the_variance_is_that_of_all_other_units_noise():
    """One byte: a unit's error is xi_u sum_v xi_v delta_v, whose variance is |delta|^2 - delta_u^2;
    the estimate is that times the input."""
    params, windows = problem()
    windows = windows[:1, :2]
    tx = activity.perturbation(1e-4, 1)
    one = jax.jit(lambda key: run(tx, params, windows, key)[0]["body"]["blocks"])
    ours = jax.lax.map(one, jax.random.split(jax.random.key(4), 20_000))
    noise = jax.tree.map(lambda units: jnp.zeros((1, 1, units)), model.sites(params))

    def loss(noise):
        h = model.forward(params, windows[:, :1].astype(int), None, noise).features
        return -jax.nn.log_softmax(h @ params["head"].T)[0, 0, windows[0, 1].astype(int)]

    delta = jax.grad(loss)(noise)
    total = sum(jnp.square(x).sum() for x in jax.tree.leaves(delta))
    inputs = model.forward(params, windows[:, :1].astype(int)).inputs["blocks"]
    for i in range(SHAPE.blocks):
        for site in SITES:
            for name in MATRICES[site]:
                x, d = inputs[i][name][0, 0], delta["blocks"][i][site][0, 0]
                expected = jnp.square(x)[:, None] * (total - jnp.square(d))
                # The variance of 20,000 draws has a relative standard error of at most
                # sqrt((kurtosis - 1) / 20,000), and xi sum xi delta has a kurtosis below 4.
                np.testing.assert_allclose(
                    ours[i][name].var(0), expected, rtol=5 * np.sqrt(3 / 20_000), atol=1e-12
                )


# Feedback


def test_a_units_own_slopes_are_the_derivative_without_its_neighbours():
    """With no recurrent matrix nothing goes between units, so that an LSTM's derivative by its
    gates is what they do by themselves."""
    rng = np.random.default_rng(1)
    x, xi = rng.normal(size=(5, 2, 4)), rng.normal(size=(5, 2, 16))
    block = {"lstm_input": rng.normal(size=(4, 16)), "lstm_recurrent": np.zeros((4, 16))}
    state = (jnp.zeros((2, 4)), jnp.asarray(rng.normal(size=(2, 4))))
    h = lambda noise: model.lstm(block, x, state, noise)[0]  # noqa: E731
    expected = jax.jvp(h, (jnp.zeros_like(xi),), (xi,))[1]
    slopes = model.lstm(block, x, state)[2]
    np.testing.assert_allclose(activity._output_change(slopes, xi), expected, rtol=1e-10)


@pytest.mark.parametrize("credit", [1, 3, 5])
def test_errors_go_back_through_a_unit_as_its_changes_go_forward(credit):
    rng = np.random.default_rng(2)
    slopes = model.CellSlopes(
        *(jnp.asarray(rng.normal(size=s)) for s in ((5, 2, 3, 4), *[(5, 2, 4)] * 3))
    )
    error = rng.normal(size=(5, 2, 4))

    def change(xi):  # a change at byte t reaches the bytes before t + credit
        at = lambda t: activity._output_change(slopes, jnp.zeros_like(xi).at[t].set(xi[t]))  # noqa: E731
        return sum((at(t)[t : t + credit] * error[t : t + credit]).sum() for t in range(len(xi)))

    expected = jax.grad(change)(jnp.zeros((5, 2, 16)))
    np.testing.assert_allclose(activity._input_error(slopes, error, credit), expected, atol=1e-12)


def test_what_is_learned_is_the_mean_effect_on_the_stream():
    params, windows = problem()
    tx = activity.feedback(1e-4, len(windows), 1, fade=1.0)
    step = jax.jit(lambda key, state: run(tx, params, windows, key, state)[1])

    def one(state, key):
        return step(key, state), None

    state, _ = jax.lax.scan(one, tx.init(params), jax.random.split(jax.random.key(5), 3000))
    learned = jax.tree.map(jnp.divide, state.changes, state.outputs)
    # What the last block writes is added to the stream as it is.
    count = 3000 * len(windows) * LENGTH
    np.testing.assert_allclose(
        learned["blocks"][1]["written"], np.eye(4), atol=5 * 10 / np.sqrt(count)
    )

    zero = jax.tree.map(lambda u: jnp.zeros((LENGTH, len(windows), u)), model.sites(params))
    stream = lambda noise: model.forward(params, windows[:, :-1].astype(int), None, noise).stream  # noqa: E731
    jacobian = jax.jacfwd(stream)(zero)["blocks"][0]["written"]  # [T, B, d, T, B, units]
    expected = jnp.einsum("tbitbj->ji", jacobian) / (LENGTH * len(windows))
    np.testing.assert_allclose(
        learned["blocks"][0]["written"], expected, atol=5 * 10 / np.sqrt(count)
    )


def test_the_estimate_of_feedback_is_close_to_the_gradient_and_learns():
    stage = Stage(
        estimator="feedback", parameters="all", sequences=8, n_pert=4, window=LENGTH, credit=4,
        eps=0.02, learning_rate=0.02, weight_decay=0.0, head_sequences=0,
    )  # fmt: skip
    params = jax.tree.map(lambda x: x.astype(jnp.float32), problem()[0])
    windows = np.random.default_rng(1).integers(0, 4, (8, LENGTH + 1), dtype=np.uint8)
    batch = expert.split_batch(windows, stage)
    update = jax.jit(functools.partial(expert.update, stage=stage))
    state, losses = expert.init_state(params, stage), []
    for _ in range(60):
        state, loss = update(state, batch, jax.random.key(0))
        losses.append(float(loss))
    # Less than the entropy of the four bytes there are: it has learned what follows what.
    assert losses[-1] < np.log(4) < 4 < losses[0]
    assert int(state.failed) == -1


@pytest.mark.parametrize("estimator", ["feedback", "node_perturbation"])
def test_devices_that_share_the_windows_reach_what_one_does(estimator):
    stage = Stage(
        estimator=estimator, parameters="all", sequences=8, window=LENGTH, credit=2,
        n_pert=8 if estimator == "node_perturbation" else 4,
        eps=0.02, learning_rate=0.02, weight_decay=0.0, head_sequences=0,
    )  # fmt: skip
    params = problem()[0]
    windows = np.random.default_rng(1).integers(0, 256, (1, 8, LENGTH + 1), dtype=np.uint8)
    reached = []
    for devices in (1, 2):
        mesh = ensemble.make_mesh(1, stage, jax.devices()[:devices])
        assert mesh.shape["probe"] == devices
        many = ensemble.Ensemble(mesh, stage)
        states = many.place(ensemble.stack([expert.init_state(params, stage)]))
        keys = many.place(jax.random.split(jax.random.key(7), 1))
        for _ in range(5):
            batch = many.place_batch(expert.split_batch(windows, stage))
            states, _ = many.update(states, batch, keys)
        reached.append(ensemble.unstack(states)[0].params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), *reached)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="credit must be at least 1, not 0"):
        activity.perturbation(0.1, 0)
    with pytest.raises(ValueError, match="not 1 and 0"):
        activity.feedback(0.1, 0, 1)
