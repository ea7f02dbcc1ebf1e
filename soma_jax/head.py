"""The delta rule for the tied byte matrix E: exact, local, no reverse-mode differentiation."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from soma_jax import model


def delta_rule(
    params: model.Params, window_BxL: jax.Array
) -> tuple[jax.Array, jax.Array, model.Params]:
    r"""The decoder's gradient of the mean loss, with the features h held fixed (paper, Eq. 7).

    dE = 1/(BT) sum_{b,t} (softmax(E h_bt) - onehot(y_bt)) h_bt^T. The embedding's path is left out
    on purpose.

    Args:
      params: the expert.
      window_BxL: bytes [B, T + 1].

    Returns:
      dE [V, d_E], the unperturbed mean loss [], nats/byte, and what each matrix of the body
      multiplied on the way (`model.forward`).
    """
    window = window_BxL.astype(jnp.int32)
    h_TxBxe, _, inputs = model.forward(params, window[:, :-1])
    targets = window[:, 1:].T
    log_p = jax.nn.log_softmax(h_TxBxe @ params["head"].T)
    error = jnp.exp(log_p) - jax.nn.one_hot(targets, model.VOCABULARY, dtype=log_p.dtype)
    loss = -jnp.take_along_axis(log_p, targets[..., None], axis=-1).mean()
    return jnp.tensordot(error, h_TxBxe, ((0, 1), (0, 1))) / targets.size, loss, inputs
