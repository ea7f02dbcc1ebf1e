import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax import model, probes
from soma_jax.model import ExpertConfig

TINY = ExpertConfig(width=8, blocks=2, embedding=6)  # 6 != 8: with projections
GRU = ExpertConfig(width=8, blocks=3, embedding=6, recurrence="gru", tied=False)
apply, byte_losses = jax.jit(model.apply), jax.jit(model.byte_losses, static_argnums=2)


def shapes(config: ExpertConfig) -> model.Params:
    return jax.eval_shape(lambda key: model.init(key, config), jax.random.key(0))


def random_expert(config: ExpertConfig, seed: int = 0) -> model.Params:
    """An expert of ordinary size whose gains are not 1, so that a forgotten gain shows."""
    rng = np.random.default_rng(seed)

    def draw(x):
        scale, mean = (0.2, 1) if x.ndim == 1 else (min(x.shape) ** -0.5, 0)
        return jnp.asarray(rng.normal(mean, scale, x.shape), x.dtype)

    return jax.tree.map(draw, shapes(config))


def random_bytes(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def to_float64(params: model.Params) -> model.Params:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


# Size


@pytest.mark.parametrize("recurrence", ["lstm", "gru"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("width", "blocks", "embedding"), [(32, 2, 32), (4, 1, 4), (5, 3, 2), (3, 2, 7), (48, 2, 32)]
)
def test_parameter_formulas_count_the_leaves(width, blocks, embedding, recurrence, tied):
    config = ExpertConfig(width, blocks, embedding, recurrence, tied)
    params = shapes(config)
    matrices = [x for x in jax.tree.leaves(params["body"]) if x.ndim == 2 and x.shape[0] != 256]
    assert sum(x.size for x in matrices) == config.matrix_parameters
    assert sum(x.size for x in jax.tree.leaves(params["body"])) == config.body_parameters
    assert params["head"].shape == (256, embedding)
    assert params["head"].size == config.head_parameters


def test_default_expert_is_the_papers():
    assert ExpertConfig().body_parameters == 32_928
    assert ExpertConfig().operations_per_byte == 81_920


@pytest.mark.parametrize(
    ("experts", "width", "heads", "total"),
    [
        (1, 509, 1, "8.33M"),
        (2, 361, 2, "8.41M"),
        (8, 181, 8, "8.55M"),
        (256, 32, 1, "8.44M"),
        (4, 32, 1, "0.14M"),
    ],
)
def test_ensembles_have_the_papers_sizes(experts, width, heads, total):
    config = ExpertConfig(width=width)
    parameters = experts * config.body_parameters + heads * config.head_parameters
    assert f"{parameters / 1e6:.2f}M" == total


def test_the_gru_control_has_the_papers_size():
    shape = ExpertConfig(width=339, blocks=6, embedding=339, recurrence="gru", tied=False)
    assert f"{(shape.body_parameters + shape.head_parameters) / 1e6:.2f}M" == "8.46M"


def test_matrices_start_with_variance_one_over_fan_in_and_gains_at_one():
    params = model.init(jax.random.key(0), ExpertConfig(width=48, blocks=1, embedding=40))
    body, (block,) = params["body"], params["body"]["blocks"]
    fan_in = {
        40: [params["head"], body["input_projection"]],
        48: [block["lstm_input"], block["lstm_recurrent"], block["mlp_in"]],
        192: [block["mlp_out"]],
    }
    fan_in[48].append(body["output_projection"])
    for rows, matrices in fan_in.items():
        for x in matrices:
            # The standard error of a normal sample's variance is sqrt(2 / size) of it.
            assert float((x**2).mean()) * rows == pytest.approx(1, abs=5 * math.sqrt(2 / x.size))
            assert abs(float(x.mean())) * math.sqrt(rows * x.size) < 5
    for gain in (block["lstm_gain"], block["mlp_gain"], body["final_gain"]):
        np.testing.assert_array_equal(gain, 1)
    flat = np.sort(np.concatenate([np.ravel(x)[:8] for m in fan_in.values() for x in m]))
    assert np.diff(flat).min() > 0  # no two matrices share their numbers


# What it computes


def torch_logits(params: model.Params, ids: np.ndarray) -> np.ndarray:
    """The same expert in PyTorch's own modules, in float64."""
    torch = pytest.importorskip("torch")
    tensor = lambda x: torch.tensor(np.asarray(x, np.float64))  # noqa: E731

    def norm(x, gain):
        module = torch.nn.LayerNorm(x.shape[-1], bias=False, dtype=torch.float64)
        module.weight.data = tensor(gain)
        return module(x)

    body, head = params["body"], tensor(params["head"])
    with torch.no_grad():
        x = torch.nn.functional.embedding(torch.tensor(ids.astype(np.int64)), head)
        if "input_projection" in body:
            x = x @ tensor(body["input_projection"])
        for block in body["blocks"]:
            d = x.shape[-1]
            module = torch.nn.LSTM(d, d, bias=False, batch_first=True, dtype=torch.float64)
            module.weight_ih_l0.data = tensor(block["lstm_input"]).T.contiguous()
            module.weight_hh_l0.data = tensor(block["lstm_recurrent"]).T.contiguous()
            x = x + module(norm(x, block["lstm_gain"]))[0]
            hidden = torch.nn.GELU()(norm(x, block["mlp_gain"]) @ tensor(block["mlp_in"]))
            x = x + hidden @ tensor(block["mlp_out"])
        x = norm(x, body["final_gain"])
        if "output_projection" in body:
            x = x @ tensor(body["output_projection"])
        return (x @ head.T).numpy()


@pytest.mark.parametrize("width", [32, 48])
def test_logits_equal_an_implementation_in_torch(width):
    params, ids = random_expert(ExpertConfig(width=width)), random_bytes(3, 9)
    logits, _ = apply(params, ids)
    assert logits.shape == (3, 9, 256)
    # Logits reach about 10 here: float32's own rounding is below 1e-5.
    np.testing.assert_allclose(logits, torch_logits(params, ids), rtol=1e-5, atol=1e-5)


def loop_losses(
    params: model.Params, windows: np.ndarray, inputs: dict[str, list] | None = None
) -> np.ndarray:
    """The cross-entropy one window, one byte and one block at a time, in float64; appends what each
    matrix multiplies to `inputs`."""
    inputs = {} if inputs is None else inputs

    def times(x, name, matrix):
        inputs.setdefault(name, []).append(x)
        return x @ matrix

    params = to_float64(params)
    body, head = params["body"], params["head"]
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
    gelu = np.vectorize(lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2)

    def norm(v, gain):
        return (v - v.mean()) / np.sqrt(v.var() + 1e-5) * gain

    losses = np.zeros((len(windows), windows.shape[1] - 1))
    for b, window in enumerate(windows):
        d = body["final_gain"].size
        state = [(np.zeros(d), np.zeros(d)) for _ in body["blocks"]]
        for t, (byte, target) in enumerate(itertools.pairwise(window)):
            x = times(head[byte], "input_projection", body["input_projection"])
            for i, block in enumerate(body["blocks"]):
                h, c = state[i]
                gates = times(norm(x, block["lstm_gain"]), f"{i} lstm_input", block["lstm_input"])
                gates = gates + times(h, f"{i} lstm_recurrent", block["lstm_recurrent"])
                take, keep, candidate, show = np.split(gates, 4)
                c = sigmoid(keep) * c + sigmoid(take) * np.tanh(candidate)
                h = sigmoid(show) * np.tanh(c)
                state[i] = h, c
                x = x + h
                hidden = times(norm(x, block["mlp_gain"]), f"{i} mlp_in", block["mlp_in"])
                x = x + times(gelu(hidden), f"{i} mlp_out", block["mlp_out"])
            x = times(norm(x, body["final_gain"]), "output_projection", body["output_projection"])
            logits = head @ x
            losses[b, t] = np.log(np.exp(logits).sum()) - logits[target]
    return losses


def test_losses_equal_a_loop_in_float64():
    params, windows = random_expert(TINY), random_bytes(2, 6)
    expected = loop_losses(params, windows)
    losses = byte_losses(params, windows)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(model.sequence_losses(params, windows), expected.mean(1), rtol=1e-5)


def test_the_gru_controls_losses_equal_a_loop_in_float64():
    params, windows = random_expert(GRU), random_bytes(2, 6)
    exact = to_float64(params)
    body, head = exact["body"], exact["head"]
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731

    def norm(v, gain):
        return (v - v.mean()) / np.sqrt(v.var() + 1e-5) * gain

    expected = np.zeros((2, 5))
    for b, window in enumerate(windows):
        state = [np.zeros(8)] * 3
        for t, (byte, target) in enumerate(itertools.pairwise(window)):
            x = body["embedding"][byte] @ body["input_projection"]
            for i, block in enumerate(body["blocks"]):
                of_gate, of_candidate = np.split(
                    norm(x, block["gru_gain"]) @ block["gru_input"] + block["gru_bias"], 2
                )
                f = sigmoid(of_gate + state[i] @ block["gru_forget"])
                candidate = np.tanh(of_candidate + (f * state[i]) @ block["gru_candidate"])
                state[i] = (1 - f) * state[i] + f * candidate
                x = x + state[i]
                hidden = norm(x, block["mlp_gain"]) @ block["mlp_in"]
                x = x + np.maximum(hidden, 0) @ block["mlp_out"]
            logits = head @ (norm(x, body["final_gain"]) @ body["output_projection"])
            expected[b, t] = np.log(np.exp(logits).sum()) - logits[target]
    np.testing.assert_allclose(byte_losses(params, windows), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("block", [0, 2])
def test_windows_go_on_from_a_given_state(block):
    params, windows = random_expert(GRU), random_bytes(2, 9)
    whole = byte_losses(params, windows)
    _, state = model.features(params, windows[:, :4].astype(np.int32))
    rest = model.byte_losses(params, windows[:, 4:], block, state)
    np.testing.assert_allclose(rest, whole[:, 4:], rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(st.binary(min_size=14, max_size=14))
def test_a_zeroed_final_gain_scores_ln_256_on_any_bytes(data):
    params = random_expert(TINY)
    params["body"]["final_gain"] = jnp.zeros(TINY.width)
    windows = np.frombuffer(data, np.uint8).reshape(2, 7)
    np.testing.assert_allclose(byte_losses(params, windows), math.log(256), rtol=2e-7)


@pytest.mark.parametrize("config", [TINY, GRU], ids=["lstm", "gru"])
@pytest.mark.parametrize("cuts", [[1], [3, 4], [2, 4, 6]])
def test_carrying_the_state_over_pieces_equals_one_pass(cuts, config):
    params, ids = random_expert(config), random_bytes(2, 8)
    whole, last = apply(params, ids)
    state, pieces = None, []
    for piece in np.split(ids, cuts, axis=1):
        logits, state = apply(params, piece, state)
        pieces.append(logits)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), state, last)


def test_a_prediction_depends_on_the_past_alone():
    params, ids = random_expert(TINY), random_bytes(1, 8)
    other = ids.copy()
    other[:, 5:] += 1
    logits, changed = apply(params, ids)[0], apply(params, other)[0]
    np.testing.assert_array_equal(logits[:, :5], changed[:, :5])
    assert np.abs(logits[:, 5:] - changed[:, 5:]).max(-1).min() > 1e-3


def test_a_windows_losses_do_not_depend_on_the_rest_of_the_batch():
    params, windows = random_expert(TINY), random_bytes(5, 7)
    losses = np.asarray(byte_losses(params, windows))
    order = [3, 0, 4, 2, 1]
    np.testing.assert_allclose(byte_losses(params, windows[order]), losses[order], rtol=1e-6)
    np.testing.assert_allclose(byte_losses(params, windows[1:2]), losses[1:2], rtol=1e-6)
    others = random_bytes(5, 7, seed=1)
    others[2] = windows[2]
    np.testing.assert_allclose(byte_losses(params, others)[2], losses[2], rtol=1e-6)


def test_vmap_over_perturbed_parameters_equals_a_loop():
    windows = random_bytes(2, 6)
    experts = [random_expert(TINY, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *experts)
    together = jax.jit(jax.vmap(model.byte_losses, in_axes=(0, None)))(stacked, windows)
    alone = [byte_losses(params, windows) for params in experts]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-5)


@pytest.mark.parametrize("block", [1, 2, 3, 5, 6, 7, 100])
def test_blocks_do_not_change_the_losses(block):
    params, windows = random_expert(TINY), random_bytes(3, 8)
    expected = loop_losses(params, windows)
    np.testing.assert_allclose(byte_losses(params, windows, block), expected, rtol=1e-6, atol=1e-5)


def test_gelu_is_exact():
    x = np.linspace(-9, 9, 1001).astype(np.float32)
    expected = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.astype(np.float64)]
    np.testing.assert_allclose(model.gelu(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", list(probes.LAWS))
def test_losses_of_perturbed_experts_are_exact_at_the_size_they_are_trained_at(name):
    """Against float64 and one expert at a time. A compiler may be wrong at some sizes alone: XLA's
    CPU backend of jax 0.10.2 was, on sums fused with products of more than 32,768 elements."""
    directions, sequences, bytes_ = 32, 2, 65
    params, windows = random_expert(ExpertConfig()), random_bytes(sequences, bytes_ + 1)
    law, key = probes.LAWS[name], jax.random.key(0)

    def losses(j, body, head, windows, block):
        z = law(key, j, params["body"])  # of float32 also where the losses are not
        z = jax.tree.map(lambda x: x.astype(head.dtype), z)
        moved = jax.tree.map(lambda p, z: p + 0.1 * z, body, z)
        return model.byte_losses({"head": head, "body": moved}, windows, block)

    together = jax.jit(
        jax.vmap(functools.partial(losses, block=16), in_axes=(0, None, None, None))
    )(jnp.arange(directions), params["body"], params["head"], windows)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        alone = jax.jit(functools.partial(losses, block=0))
        for j in (0, 1, 15, directions - 1):
            expected = alone(j, exact["body"], exact["head"], windows)
            assert expected.dtype == jnp.float64
            np.testing.assert_allclose(together[j], expected, atol=1e-5)


def test_matrix_inputs_are_what_each_matrix_multiplies():
    params, windows, expected = random_expert(TINY), random_bytes(2, 6), {}
    loop_losses(params, windows, expected)
    inputs = jax.jit(model.forward)(params, windows[:, :-1]).inputs
    named = {k: inputs[k] for k in ("input_projection", "output_projection")}
    for i, block in enumerate(inputs["blocks"]):
        named |= {f"{i} {name}": x for name, x in block.items() if x is not None}
    assert named.keys() == expected.keys()
    for name, x in named.items():
        assert x.shape[:2] == (5, 2)
        ours = np.swapaxes(x, 0, 1).reshape(10, -1)
        np.testing.assert_allclose(ours, expected[name], rtol=1e-4, atol=1e-5)
    # A tree like the body's: the number of rows of each matrix, nothing for a vector.
    rows = jax.tree.map(lambda p, x: x is None or x.shape[-1] == p.shape[0], params["body"], inputs)
    assert all(jax.tree.leaves(rows))
