"""The decoder E's own rule: exact, local, no reverse-mode differentiation.

E also embeds; that path is left out on purpose (paper, section 2).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from soma_jax import model


def _losses(
    params: model.Params, features_TxBxe: jax.Array, targets_TxB: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Losses [T, B], their derivative by the features [T, B, d_E], dE [V, d_E] of their mean."""
    log_p = jax.nn.log_softmax(features_TxBxe @ params["head"].T)
    error = jnp.exp(log_p) - jax.nn.one_hot(targets_TxB, model.VOCABULARY, dtype=log_p.dtype)
    losses = -jnp.take_along_axis(log_p, targets_TxB[..., None], axis=-1)[..., 0]
    of_head = jnp.tensordot(error, features_TxBxe, ((0, 1), (0, 1))) / targets_TxB.size
    return losses, error @ params["head"], of_head


def delta_rule(
    params: model.Params, window_BxL: jax.Array
) -> tuple[jax.Array, jax.Array, model.Params]:
    r"""The decoder's gradient of the mean loss, with the features h held fixed (paper, Eq. 7).

    dE = 1/(BT) sum_{b,t} (softmax(E h_bt) - onehot(y_bt)) h_bt^T.

    Args:
      params: the expert.
      window_BxL: bytes [B, T + 1].

    Returns:
      dE [V, d_E], the unperturbed mean loss [], nats/byte, and what each matrix of the body
      multiplied on the way (`model.forward`).
    """
    window = window_BxL.astype(jnp.int32)
    run = model.forward(params, window[:, :-1])
    losses, _, of_head = _losses(params, run.features, window[:, 1:].T)
    return of_head, losses.mean(), run.inputs


def readout_rule(
    params: model.Params, run: model.Forward, targets_TxB: jax.Array
) -> tuple[jax.Array, jax.Array, model.Params]:
    """The delta rule for the whole readout, and the error it leaves for what comes before.

    Args:
      params: the expert.
      run: its forward.
      targets_TxB: the next bytes.

    Returns:
      Losses [T, B], nats; their derivative by the stream that the readout reads, [T, B, d]; and the
      gradient of their mean by the readout's parameters: "head", "final_gain" and, where there is
      one, "output_projection".
    """
    losses, error, of_head = _losses(params, run.features, targets_TxB)
    gradient = {"head": of_head}
    body = params["body"]
    if "output_projection" in body:
        of_projection = jnp.tensordot(run.inputs["output_projection"], error, ((0, 1), (0, 1)))
        gradient["output_projection"] = of_projection / targets_TxB.size
        error = error @ body["output_projection"].T
    centred = run.stream - run.stream.mean(-1, keepdims=True)
    scale = lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + model.LAYER_NORM_EPS)
    normed = centred * scale
    gradient["final_gain"] = (error * normed).mean((0, 1))
    error = error * body["final_gain"]
    along = (error * normed).mean(-1, keepdims=True)
    return losses, scale * (error - error.mean(-1, keepdims=True) - normed * along), gradient
