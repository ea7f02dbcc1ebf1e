import jax
import jax.numpy as jnp
import numpy as np
import pytest

from soma_jax import model
from soma_jax.head import delta_rule


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
