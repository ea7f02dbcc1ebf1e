"""The expert: a byte-level pre-norm LSTM language model, as pure functions on a pytree (paper, 1).

Bytes in, bytes out. One matrix E (256 x d_E) embeds and decodes; the body is `blocks` residual
blocks of width d:

    x += LSTM(LN(x));   x += W2 GELU(W1 LN(x))

There is no bias anywhere. The EGGROLL control is another model (paper, section 5): GRU blocks with
biases in the gates and a ReLU, and an embedding of its own beside the decoder E.

Nothing here knows about estimators. One that perturbs weights calls these functions under
`jax.vmap` with perturbed parameters. One that perturbs activities adds noise at an LSTM expert's
*sites*, the outputs of the products before the readout: the gates, the MLP's hidden units, what the
MLP writes and what the input's projection does. The readout is the last LayerNorm, the output's
projection and the decoder E.

Shape letters: B sequences, L = T + 1 bytes of a window, T predicted bytes, d width, V = 256 bytes.
Activations are time-major, [T, B, d]: the recurrence then scans the leading axis and every other
product is one large matrix product. Losses are computed block of bytes by block of bytes, all
layers of a block before the next: what lies between two layers then stays in cache.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

VOCABULARY = 256
LAYER_NORM_EPS = 1e-5

Params = dict[str, Any]  # {"head": E [V, d_E], "body": {...}}
State = list[tuple[jax.Array, ...]]  # per block: the output h, an LSTM's cell c; each [B, d]


class CellSlopes(NamedTuple):
    """Derivatives inside an LSTM's unit, none of them between units; a is its four gates."""

    write: jax.Array  # [T, B, 3, d]: dc_t/da_t of the input, forget and candidate gates
    keep: jax.Array  # [T, B, d]: dc_t/dc_{t-1}
    read: jax.Array  # [T, B, d]: dh_t/dc_t
    output: jax.Array  # [T, B, d]: dh_t/da_t of the output gate


class Forward(NamedTuple):
    """What a forward leaves behind. `inputs` and `slopes` are of LSTM experts."""

    features: jax.Array  # [T, B, d_E]: what the decoder multiplies
    state: State
    stream: jax.Array  # [T, B, d]: what the readout reads
    inputs: Params  # like the body: what each matrix multiplies, [T, B, rows]; None for a vector
    slopes: (
        Params  # like the sites: a unit's output by its input, [T, B, units]; CellSlopes of gates
    )


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
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + LAYER_NORM_EPS) * gain


def gelu(x: jax.Array) -> jax.Array:
    """The exact GELU. `jax.nn.gelu`'s erfc keeps digits far below zero that a loss never sees, and
    takes 2.5 times as long on a CPU."""
    return x * (0.5 + 0.5 * lax.erf(x * math.sqrt(0.5)))


def gelu_slope(x: jax.Array) -> jax.Array:
    """The derivative of `gelu`."""
    density = jnp.exp(-jnp.square(x) / 2) / math.sqrt(2 * math.pi)
    return 0.5 + 0.5 * lax.erf(x * math.sqrt(0.5)) + x * density


def lstm(
    block: Params,
    x_TxBxd: jax.Array,
    state: tuple[jax.Array, ...],
    noise: jax.Array | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...], CellSlopes]:
    """An LSTM without bias; gates are laid out [input, forget, candidate, output].

    `noise` [T, B, 4d] is added to the gates before they are squashed. Returns the outputs h
    [T, B, d], the state after them, and the units' slopes.
    """
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
        return (h, c), (h, c, tanh)

    inputs = x_TxBxd @ block["lstm_input"]
    cell = state[1]
    state, (h_TxBxd, c, tanh) = lax.scan(step, state, inputs if noise is None else inputs + noise)
    before = jnp.concatenate([cell[None], c[:-1]])
    i, f, g, o = (0.5 + 0.5 * tanh[..., k, :] if k != 2 else tanh[..., k, :] for k in range(4))
    write = jnp.stack([g * i * (1 - i), before * f * (1 - f), i * (1 - jnp.square(g))], -2)
    slopes = CellSlopes(write, f, o * (1 - jnp.square(jnp.tanh(c))), h_TxBxd * (1 - o))
    return h_TxBxd, state, slopes


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


def sites(params: Params) -> Params:
    """Units of each site of an LSTM expert: where `forward` takes noise, and what it gives slopes
    of."""
    body = params["body"]
    blocks = [
        {
            "gates": b["lstm_input"].shape[1],
            "hidden": b["mlp_in"].shape[1],
            "written": b["mlp_out"].shape[1],
        }
        for b in body["blocks"]
    ]
    result: Params = {"blocks": blocks}
    if "input_projection" in body:
        result["input_projection"] = body["input_projection"].shape[1]
    return result


def forward(
    params: Params, ids_BxT: jax.Array, state: State | None = None, noise: Params | None = None
) -> Forward:
    """`features`, and what it leaves behind on the way.

    Args:
      params: of the expert.
      ids_BxT: integer bytes.
      state: from which the sequences go on; None is the zero state.
      noise: a tree like `sites`, [T, B, units]: what is added at an LSTM expert's.
    """

    def product(x: jax.Array, matrix: jax.Array, noise: jax.Array | None) -> jax.Array:
        y = x @ matrix
        return y if noise is None else y + noise

    body = params["body"]
    state = initial_state(params, ids_BxT.shape[0]) if state is None else state
    inputs: Params = {"blocks": [], "final_gain": None}
    slopes: Params = {"blocks": []}
    x = body.get("embedding", params["head"])[ids_BxT.T]
    if "input_projection" in body:
        inputs["input_projection"] = x
        x = product(x, body["input_projection"], noise["input_projection"] if noise else None)
        slopes["input_projection"] = jnp.ones_like(x)
    new_state: State = []
    for i, (block, block_state) in enumerate(zip(body["blocks"], state, strict=True)):
        of_block = noise["blocks"][i] if noise else dict.fromkeys(("gates", "hidden", "written"))
        is_lstm = "lstm_gain" in block
        first = block_state[0]
        normed = layer_norm(x, block["lstm_gain" if is_lstm else "gru_gain"])
        if is_lstm:
            h, block_state, of_cells = lstm(block, normed, block_state, of_block["gates"])
        else:
            h, block_state = gru(block, normed, block_state)
        x = x + h
        of_mlp = layer_norm(x, block["mlp_gain"])
        before = product(of_mlp, block["mlp_in"], of_block["hidden"])
        hidden = (gelu if is_lstm else jax.nn.relu)(before)
        written = product(hidden, block["mlp_out"], of_block["written"])
        x = x + written
        new_state.append(block_state)
        if is_lstm:
            recurrent = jnp.concatenate([first[None], h[:-1]])
            inputs["blocks"].append(
                {
                    "lstm_gain": None,
                    "lstm_input": normed,
                    "lstm_recurrent": recurrent,
                    "mlp_gain": None,
                    "mlp_in": of_mlp,
                    "mlp_out": hidden,
                }
            )
            slopes["blocks"].append(
                {"gates": of_cells, "hidden": gelu_slope(before), "written": jnp.ones_like(x)}
            )
    stream, x = x, layer_norm(x, body["final_gain"])
    if "output_projection" in body:
        inputs["output_projection"] = x
        x = x @ body["output_projection"]
    return Forward(x, new_state, stream, inputs, slopes)


def matrix_gradients(params: Params, inputs: Params, errors: Params) -> Params:
    """The gradient of the matrices before the readout: the outer product of what each multiplied
    and the error at the site that it feeds.

    Args:
      params: of an LSTM expert.
      inputs: `Forward.inputs`.
      errors: a tree like `sites`, [T, B, units]: the derivative of a window's summed loss by them.

    Returns:
      The gradient of the mean loss over the T B bytes, a tree like the body; zero elsewhere.
    """

    def outer(x: jax.Array, error: jax.Array) -> jax.Array:
        total = jnp.tensordot(x, error, ((0, 1), (0, 1)), precision="highest")
        return total / math.prod(x.shape[:2])

    gradient = jax.tree.map(jnp.zeros_like, params["body"])
    for i, block in enumerate(gradient["blocks"]):
        of_inputs, of_errors = inputs["blocks"][i], errors["blocks"][i]
        block["lstm_input"] = outer(of_inputs["lstm_input"], of_errors["gates"])
        block["lstm_recurrent"] = outer(of_inputs["lstm_recurrent"], of_errors["gates"])
        block["mlp_in"] = outer(of_inputs["mlp_in"], of_errors["hidden"])
        block["mlp_out"] = outer(of_inputs["mlp_out"], of_errors["written"])
    if "input_projection" in errors:
        gradient["input_projection"] = outer(inputs["input_projection"], errors["input_projection"])
    return gradient


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
