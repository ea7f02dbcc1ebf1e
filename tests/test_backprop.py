import jax.numpy as jnp
import numpy as np
import pytest

from soma_jax.backprop import backprop


def test_it_is_the_gradient_of_the_mean_loss():
    x = {"w": jnp.array([1.0, -2.0, 0.5])}
    batch = jnp.array([[1.0, 2.0, 3.0], [0.0, -1.0, 4.0]])
    tx = backprop()
    update, state = tx.update(
        x, tx.init(x), x, value_fn=lambda x, b: jnp.square(b @ x["w"]), batch=batch
    )
    y = np.asarray(batch) @ np.asarray(x["w"])
    np.testing.assert_allclose(update["w"], 2 * y @ np.asarray(batch) / 2, rtol=1e-6)
    assert float(state.loss) == pytest.approx((y**2).mean())
