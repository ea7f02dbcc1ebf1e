"""The expert: a byte-level pre-norm LSTM language model, as pure functions on a pytree (paper, 1).

Bytes in, bytes out. One matrix E (256 x d_E) embeds and decodes; the body is `blocks` residual
blocks of width d:

    x += LSTM(LN(x));   x += W2 GELU(W1 LN(x))

There is no bias anywhere. The EGGROLL control is another model (paper, section 5): GRU blocks with
biases in the gates and a ReLU, and an embedding of its own beside the decoder E.

Nothing here knows about perturbations: an estimator calls these functions under `jax.vmap` with
perturbed parameters.

Shape letters: B sequences, L = T + 1 bytes of a window, T predicted bytes, d width, V = 256 bytes.
Activations are time-major, [T, B, d]: the recurrence then scans the leading axis and every other
product is one large matrix product. Losses are computed block of bytes by block of bytes, all
layers of a block before the next: what lies between two layers then stays in cache.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

VOCABULARY = 256

Params = dict[str, Any]  # {"head": E [V, d_E], "body": {...}}
State = list[tuple[jax.Array, ...]]  # per block: the output h, an LSTM's cell c; each [B, d]


@dataclasses.dataclass(frozen=True)
class ExpertConfig:
    """Shape of an expert."""

    width: int = 32  # d
    blocks: int = 2  # D
    embedding: int = 32  # d_E
    recurrence: str = "lstm"  # or "gru"
    tied: bool = True  # E embeds, too; else the body holds an embedding

    @property
    def matrix_parameters(self) -> int:
        """Of the body's products: 16 D d^2 (GRU blocks: 12 D d^2), and 2 d_E d for the projections
        when d != d_E."""
        d, blocks = self.width, self.blocks
        projections = 2 * self.embedding * d if d != self.embedding else 0
        return (16 if self.recurrence == "lstm" else 12) * blocks * d**2 + projections

    @property
    def body_parameters(self) -> int:
        """The products', (2D + 1) d gains, a GRU's 2 D d biases, an embedding of its own."""
        d, blocks = self.width, self.blocks
        biases = 0 if self.recurrence == "lstm" else 2 * blocks * d
        embedding = 0 if self.tied else self.head_parameters
        return self.matrix_parameters + (2 * blocks + 1) * d + biases + embedding

    @property
    def head_parameters(self) -> int:
        return VOCABULARY * self.embedding

    @property
    def operations_per_byte(self) -> int:
        """Matrix-product operations of one forward of one byte; a multiply-add is two."""
        return 2 * (self.matrix_parameters + self.head_parameters)


def init(key: jax.Array, config: ExpertConfig) -> Params:
    """Draws an expert: matrices N(0, 1/fan_in), LayerNorm gains 1 (the paper does not state it),
    biases 0, an embedding of its own N(0, 1)."""
    d, d_e = config.width, config.embedding
    keys = iter(jax.random.split(key, 5 * config.blocks + 4))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) / jnp.sqrt(rows)

    # E is drawn for its use as a decoder, whose fan-in is d_E.
    params: Params = {"head": matrix(d_e, VOCABULARY).T, "body": {"blocks": []}}
    for _ in range(config.blocks):
        recurrence = {
            "lstm_gain": jnp.ones(d),
            "lstm_input": matrix(d, 4 * d),
            "lstm_recurrent": matrix(d, 4 * d),
        } if config.recurrence == "lstm" else {
            "gru_gain": jnp.ones(d),
            "gru_input": matrix(d, 2 * d),
            "gru_forget": matrix(d, d),
            "gru_candidate": matrix(d, d),
            "gru_bias": jnp.zeros(2 * d),
        }  # fmt: skip
        mlp = {
            "mlp_gain": jnp.ones(d),
            "mlp_in": matrix(d, 4 * d),
            "mlp_out": matrix(4 * d, d),
        }
        params["body"]["blocks"].append(recurrence | mlp)
    params["body"]["final_gain"] = jnp.ones(d)
    if d != d_e:
        params["body"]["input_projection"] = matrix(d_e, d)
        params["body"]["output_projection"] = matrix(d, d_e)
    if not config.tied:
        params["body"]["embedding"] = matrix(d_e, VOCABULARY).T * jnp.sqrt(d_e)
    return params


def layer_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """LayerNorm over the last axis with a gain and no bias."""
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * gain


def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU. `jax.nn.gelu`'s erfc keeps digits far below zero that a loss never sees, and
    takes 2.5 times as long on a CPU."""
    return x * (0.5 + 0.5 * lax.erf(x * math.sqrt(0.5)))


def lstm(
    block: Params, x_TxBxd: jax.Array, state: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """An LSTM without bias; gates are laid out [input, forget, candidate, output]."""
    d = x_TxBxd.shape[-1]
    # sigmoid(x) = (1 + tanh(x/2)) / 2 makes all four gates one tanh over one contiguous array:
    # on a CPU the activations cost more than the products, and this halves them.
    half = jnp.array([0.5, 0.5, 1.0, 0.5], x_TxBxd.dtype)[:, None]

    def step(carry, x_Bx4d):
        h, c = carry
        gates = (x_Bx4d + h @ block["lstm_recurrent"]).reshape(*h.shape[:-1], 4, d)
        tanh = jnp.tanh(gates * half)
        sigmoid = 0.5 + 0.5 * tanh
        c = sigmoid[..., 1, :] * c + sigmoid[..., 0, :] * tanh[..., 2, :]
        h = sigmoid[..., 3, :] * jnp.tanh(c)
        return (h, c), h

    state, h_TxBxd = lax.scan(step, state, x_TxBxd @ block["lstm_input"])
    return h_TxBxd, state


def gru(
    block: Params, x_TxBxd: jax.Array, state: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """A GRU whose one gate both forgets and writes (paper, section 5); `gru_input` and `gru_bias`
    are laid out [gate, candidate].

        f = sigmoid(x W_f + h U_f + b_f);  c = tanh(x W_c + (f h) U_c + b_c);  h += f (c - h)
    """
    d = x_TxBxd.shape[-1]

    def step(h, x_Bx2d):
        gate = jax.nn.sigmoid(x_Bx2d[..., :d] + h @ block["gru_forget"])
        candidate = jnp.tanh(x_Bx2d[..., d:] + (gate * h) @ block["gru_candidate"])
        h = h + gate * (candidate - h)
        return h, h

    h, h_TxBxd = lax.scan(step, state[0], x_TxBxd @ block["gru_input"] + block["gru_bias"])
    return h_TxBxd, (h,)


def initial_state(params: Params, sequences: int) -> State:
    """The zero state from which every window starts."""
    return [
        (jnp.zeros((sequences, *b["mlp_gain"].shape), b["mlp_gain"].dtype),)
        * (2 if "lstm_gain" in b else 1)
        for b in params["body"]["blocks"]
    ]


def features(
    params: Params, ids_BxT: jax.Array, state: State | None = None
) -> tuple[jax.Array, State]:
    """Everything before the decoder: integer bytes [B, T] to features [T, B, d_E] and the state."""
    return forward(params, ids_BxT, state)[:2]


def forward(
    params: Params, ids_BxT: jax.Array, state: State | None = None
) -> tuple[jax.Array, State, Params]:
    """`features`, and what each matrix of an LSTM expert's body multiplies on the way: a tree like
    the body's, [T, B, rows] for a matrix and None for a vector."""
    body = params["body"]
    state = initial_state(params, ids_BxT.shape[0]) if state is None else state
    inputs: Params = {"blocks": [], "final_gain": None}
    x = body.get("embedding", params["head"])[ids_BxT.T]
    if "input_projection" in body:
        inputs["input_projection"] = x
        x = x @ body["input_projection"]
    new_state: State = []
    for block, block_state in zip(body["blocks"], state, strict=True):
        is_lstm = "lstm_gain" in block
        first = block_state[0]
        normed = layer_norm(x, block["lstm_gain" if is_lstm else "gru_gain"])
        h, block_state = (lstm if is_lstm else gru)(block, normed, block_state)
        x = x + h
        of_mlp = layer_norm(x, block["mlp_gain"])
        hidden = (gelu if is_lstm else jax.nn.relu)(of_mlp @ block["mlp_in"])
        x = x + hidden @ block["mlp_out"]
        new_state.append(block_state)
        inputs["blocks"].append(
            {
                "lstm_gain": None,
                "lstm_input": normed,
                "lstm_recurrent": jnp.concatenate([first[None], h[:-1]]),
                "mlp_gain": None,
                "mlp_in": of_mlp,
                "mlp_out": hidden,
            }
        )
    x = layer_norm(x, body["final_gain"])
    if "output_projection" in body:
        inputs["output_projection"] = x
        x = x @ body["output_projection"]
    return x, new_state, inputs


def apply(
    params: Params, ids_BxT: jax.Array, state: State | None = None
) -> tuple[jax.Array, State]:
    """Next-byte logits [B, T, V] for integer bytes [B, T], and the state to go on from."""
    h_TxBxe, state = features(params, ids_BxT, state)
    return (h_TxBxe @ params["head"].T).swapaxes(0, 1), state


def byte_losses(
    params: Params, window_BxL: jax.Array, block: int = 0, state: State | None = None
) -> jax.Array:
    """Next-byte cross-entropy in nats of windows of T + 1 bytes, [B, T], in float32 or better.

    `block` is the number of bytes whose activations exist at a time; 0 is all. It is a matter of
    speed and memory only. `state` is where the windows start from; None is the zero state.
    """
    window_LxB = window_BxL.astype(jnp.int32).T
    inputs, targets = window_LxB[:-1], window_LxB[1:]

    def losses_of(state: Any, ids: Any) -> tuple[State, jax.Array]:
        inputs_TxB, targets_TxB = ids
        h_TxBxe, state = features(params, inputs_TxB.T, state)
        logits = h_TxBxe @ params["head"].T
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        target = jnp.take_along_axis(logits, targets_TxB[..., None], axis=-1)[..., 0]
        return state, jax.nn.logsumexp(logits, axis=-1) - target

    state = initial_state(params, window_BxL.shape[0]) if state is None else state
    length = inputs.shape[0]
    block = min(block or length, length)
    whole = length - length % block
    blocks = [x[:whole].reshape(-1, block, x.shape[1]) for x in (inputs, targets)]
    state, losses = lax.scan(losses_of, state, tuple(blocks))
    losses = losses.reshape(whole, -1)
    if whole < length:
        _, rest = losses_of(state, (inputs[whole:], targets[whole:]))
        losses = jnp.concatenate([losses, rest])
    return losses.T


def sequence_losses(
    params: Params, window_BxL: jax.Array, block: int = 0, state: State | None = None
) -> jax.Array:
    """Mean next-byte cross-entropy of each window, [B], nats/byte; as `byte_losses`."""
    return byte_losses(params, window_BxL, block, state).mean(-1)
