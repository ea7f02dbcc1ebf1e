import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soma_jax import model
from soma_jax.head import delta_rule, readout_rule


@pytest.fixture(scope="module", params=[3, 4], ids=["projections", "plain"])
def problem(request):
    params = model.init(jax.random.key(0), model.ExpertConfig(4, 1, request.param))
    windows = np.random.default_rng(0).integers(8, size=(3, 6), dtype=np.uint8)
    return params, windows, *jax.jit(delta_rule)(params, windows)[:2]


def loss(decoder, embedding, body, windows):
    """Mean cross-entropy of an expert whose decoder and embedding are two matrices."""
    h, _ = model.features({"head": embedding, "body": body}, windows[:, :-1])
    log_p = jax.nn.log_softmax(h @ decoder.T)
    return -jnp.take_along_axis(log_p, windows[:, 1:].T[..., None].astype(int), -1).mean()


def test_is_the_gradient_in_the_decoders_path_alone(problem):
    params, windows, gradient, value = problem
    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    head = params["head"]
    expected, (by_decoder, by_embedding) = function(head, head, params["body"], windows)
    np.testing.assert_allclose(gradient, by_decoder, atol=1e-6)
    # Far from the gradient of both paths, or this test would say little.
    assert np.abs(by_embedding).max() > 1e-3
    assert float(value) == pytest.approx(float(expected), rel=1e-6)


def test_returns_the_mean_loss_of_the_windows(problem):
    params, windows, _, value = problem
    expected = float(jax.jit(model.byte_losses)(params, windows).mean())
    assert float(value) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("embedding", [3, 4], ids=["projections", "plain"])
def test_the_readouts_rule_is_its_gradient(embedding):
    params = model.init(jax.random.key(1), model.ExpertConfig(4, 1, embedding))
    params["body"]["final_gain"] *= jnp.array([0.5, 1.0, 2.0, -1.0])
    windows = np.random.default_rng(2).integers(256, size=(3, 6), dtype=np.uint8)
    run, targets = model.forward(params, windows[:, :-1].astype(int)), windows[:, 1:].T.astype(int)
    names = ["final_gain"] + ["output_projection"] * (embedding != 4)

    def losses(stream, readout):
        h = model.layer_norm(stream, readout["final_gain"])
        h = h @ readout.get("output_projection", jnp.eye(4))
        return -jnp.take_along_axis(
            jax.nn.log_softmax(h @ readout["head"].T), targets[..., None], -1
        )[..., 0]

    readout = {"head": params["head"]} | {name: params["body"][name] for name in names}
    ours, error, gradient = readout_rule(params, run, targets)
    np.testing.assert_allclose(ours, losses(run.stream, readout), rtol=1e-5)
    by_stream = jax.grad(lambda stream: losses(stream, readout).sum())(run.stream)
    np.testing.assert_allclose(error, by_stream, rtol=1e-4, atol=1e-5)
    expected = jax.grad(lambda readout: losses(run.stream, readout).mean())(readout)
    assert gradient.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(gradient[name], value, rtol=1e-4, atol=1e-6)
