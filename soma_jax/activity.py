r"""Estimators that perturb activities: a loss for every byte, and every product's inputs.

A direction in weight space is judged by one number for a whole window. Noise at the outputs
y = x W of an LSTM expert's products (its sites, `model.sites`) is judged byte by byte, the weights
stay shared, so that all windows are one large product, and the outer product with x is exact: only
the error dl/dy has to be estimated. Two ways to do that, both with forward passes alone:

`perturbation` (node perturbation): with xi = +-1 for each unit, byte and window, and the loss's
differences dl_t = [l_t(+sigma xi) - l_t(-sigma xi)] / (2 sigma), a unit's error is

    xi_t (dl_t + ... + dl_{t+K-1}),

unbiased for K = T up to O(sigma^2). All units' noise is in it.

`feedback`: the noise is only used to learn what units do to the stream r that the readout reads,
the mean A of dr_t/dy_t over bytes, windows and updates, and a unit's error is

    A^T e_t,   e_t = dl_t/dr_t,   which the readout's delta rule knows.

It is biased, since A is a mean, and has next to no noise. What happens inside a unit is not left to
the mean: A starts from a unit's output, and the slope of the GELU, or of the gates and the cell of
an LSTM's unit, leads to its input (the cell carries an error over K bytes, as in e-prop).

The derivatives used are those of the readout and, in `feedback`, of units by themselves. No error
goes from layer to layer, or from unit to unit through time; nothing is kept for a backward pass.

References:
  Werfel, Xie and Seung, "Learning curves for stochastic gradient descent in linear feedforward
  networks", 2003 (node perturbation); Lansdell, Prakash and Kording, "Learning to solve the credit
  assignment problem", 2020 (feedback learned by perturbation); Bellec et al., "A solution to the
  learning dilemma for recurrent networks of spiking neurons", 2020 (e-prop).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from soma_jax import model
from soma_jax.head import readout_rule

PyTree = Any


class PerturbationState(NamedTuple):
    """State of `perturbation`."""

    loss: jax.Array  # float32 []: mean loss of the last update's perturbed forwards


class FeedbackState(NamedTuple):
    """State of `feedback`. An LSTM's unit has four gates and one output."""

    loss: jax.Array  # float32 []: mean loss of the last update's unperturbed forwards
    changes: PyTree  # like the sites: fading sums of output x change of the stream, [outputs, d]
    outputs: PyTree  # like the sites: fading sums of squared changes of outputs, [outputs, 1]


def perturbation(
    sigma: jax.Array | float, credit: int, *, axis_name: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Replaces the updates by the node-perturbation estimate of the gradient.

    The last block's MLP acts on its own byte only: for it K is 1. The readout's own gradient is
    exact.

    Args:
      sigma: size of the noise at every site; may be traced.
      credit: K, the bytes whose losses a unit's noise is credited with, its own the first.
      axis_name: a `jax.shard_map` axis over which the windows are split, if any.

    Returns:
      A transformation whose `update(updates, state, params, *, complete, key, batch)` ignores
      `updates`. `params` are an LSTM expert's, or its body, and then `complete(params)` joins it
      with its E. `batch` is windows [B, T + 1] and the state from which they go on, or None.
    """
    if credit < 1:
        raise ValueError(f"credit must be at least 1, not {credit}")

    def init(params: PyTree) -> PerturbationState:
        del params
        return PerturbationState(jnp.zeros((), jnp.float32))

    def update(
        updates: PyTree,
        state: PerturbationState,
        params: PyTree | None = None,
        *,
        complete: Callable[[PyTree], model.Params],
        key: jax.Array,
        batch: tuple[jax.Array, model.State | None],
        **extra: Any,
    ) -> tuple[PyTree, PerturbationState]:
        del updates, state, extra
        expert = complete(params)
        windows, start, first = _of_device(batch, axis_name)
        noise = draw(key, expert, windows.shape[1] - 1, len(windows), first)
        run, targets = _forward(expert, windows, start, noise, sigma, count=0)
        losses, _, readout = readout_rule(expert, run, targets)
        plus, minus = jnp.split(losses, 2, axis=1)
        difference = (plus - minus) / (2 * sigma)
        errors = jax.tree.map(lambda xi: xi * _ahead(difference, credit)[..., None], noise)
        last = noise["blocks"][-1]
        errors["blocks"][-1] |= {
            site: last[site] * difference[..., None] for site in ("hidden", "written")
        }
        inputs = jax.tree.map(lambda x: sum(jnp.split(x, 2, axis=1)) / 2, run.inputs)
        gradient, loss = _gradient(
            expert, params, inputs, errors, readout, losses.mean(), axis_name
        )
        return gradient, PerturbationState(loss)

    return optax.GradientTransformationExtraArgs(init, update)


def feedback(
    sigma: jax.Array | float,
    perturbed: int,
    credit: int,
    *,
    fade: float = 0.95,
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces the updates by the estimate of the gradient that learned feedback gives.

    Args:
      sigma: size of the noise at every site; may be traced.
      perturbed: how many of the windows are run with noise at both signs, too, to learn from.
      credit: K, the bytes over which a cell carries an error, the unit's own the first.
      fade: what is left of an update's part in the means when the next one is done.
      axis_name: as of `perturbation`.

    Returns:
      A transformation with the interface of `perturbation`.
    """
    if credit < 1 or perturbed < 1:
        raise ValueError(f"credit and perturbed must be at least 1, not {credit} and {perturbed}")

    def init(params: PyTree) -> FeedbackState:
        body = params.get("body", params)
        d = body["final_gain"].shape[0]
        outputs = model.sites({"body": body})
        for block in outputs["blocks"]:
            block["gates"] //= 4
        return FeedbackState(
            jnp.zeros((), jnp.float32),
            jax.tree.map(lambda units: jnp.zeros((units, d)), outputs),
            jax.tree.map(lambda units: jnp.zeros((units, 1)), outputs),
        )

    def update(
        updates: PyTree,
        state: FeedbackState,
        params: PyTree | None = None,
        *,
        complete: Callable[[PyTree], model.Params],
        key: jax.Array,
        batch: tuple[jax.Array, model.State | None],
        **extra: Any,
    ) -> tuple[PyTree, FeedbackState]:
        del updates, extra
        expert = complete(params)
        windows, start, first = _of_device(batch, axis_name)
        share = perturbed // (1 if axis_name is None else lax.axis_size(axis_name))
        # Every so many of the windows, so that they are the same however devices share them.
        stride = len(windows) // share
        noise = draw(key, expert, windows.shape[1] - 1, share, first // stride)
        run, targets = _forward(expert, windows, start, noise, sigma, count=len(windows))
        plus, minus = jnp.split(run.stream[:, len(windows) :], 2, axis=1)
        change = (plus - minus) / (2 * sigma)

        def products(xi: jax.Array, slopes: Any) -> tuple[jax.Array, jax.Array]:
            moved = _output_change(_windows(slopes, slice(0, len(windows), stride)), xi)
            change_by_output = jnp.tensordot(moved, change, ((0, 1), (0, 1)), precision="highest")
            return change_by_output, jnp.square(moved).sum((0, 1))[:, None]

        pairs = jax.tree.map(products, noise, run.slopes)
        new = jax.tree.transpose(jax.tree.structure(noise), None, pairs)
        changes, outputs = jax.tree.map(
            lambda old, new: fade * old + new,
            (state.changes, state.outputs),
            _over_devices(lax.psum, new, axis_name),
        )
        clean = _windows(run._replace(state=[]), slice(len(windows)))
        losses, error, readout = readout_rule(expert, clean, targets[:, : len(windows)])

        def input_error(change: jax.Array, output: jax.Array, slopes: Any) -> jax.Array:
            mean = change / jnp.maximum(output, jnp.finfo(output.dtype).tiny)
            return _input_error(slopes, error @ mean.T, credit)

        errors = jax.tree.map(input_error, changes, outputs, clean.slopes)
        gradient, loss = _gradient(
            expert, params, clean.inputs, errors, readout, losses.mean(), axis_name
        )
        return gradient, FeedbackState(loss, changes, outputs)

    return optax.GradientTransformationExtraArgs(init, update)


def draw(key: jax.Array, expert: model.Params, length: int, windows: int, first: Any = 0) -> PyTree:
    """Independent signs for every unit, byte and window: a tree like `model.sites`, [T, B, units].

    Those of a window are a function of the key and its number, counted from `first`.
    """
    sites = model.sites(expert)
    units = jax.tree.leaves(sites)
    bits_per_byte = -(-sum(units) // 8)

    def of_window(number: jax.Array) -> jax.Array:
        bits = jax.random.bits(jax.random.fold_in(key, number), (length, bits_per_byte), jnp.uint8)
        return jnp.unpackbits(bits, axis=-1)

    bits = jax.vmap(of_window, out_axes=1)(first + jnp.arange(windows))
    signs = 2.0 * bits.astype(expert["head"].dtype) - 1
    ends = [sum(units[: i + 1]) for i in range(len(units))]
    parts = [signs[..., end - n : end] for n, end in zip(units, ends, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(sites), parts)


def _of_device(
    batch: tuple[jax.Array, model.State | None], axis_name: str | None
) -> tuple[jax.Array, model.State | None, jax.Array | int]:
    """The device's windows and their start, and the number of its first one."""
    windows, start = batch
    if axis_name is None:
        return windows, start, 0
    mine = windows.shape[0] // lax.axis_size(axis_name)
    first = lax.axis_index(axis_name) * mine
    return *jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, mine), batch), first


def _forward(
    expert: model.Params,
    windows: jax.Array,
    start: model.State | None,
    noise: PyTree,
    sigma: jax.Array | float,
    count: int,
) -> tuple[model.Forward, jax.Array]:
    """One forward of the first `count` windows as they are, and of as many, evenly spaced, as there
    is noise for under sigma times the noise and its negative: [as they are, +, -]. And their
    targets, [T, B]."""
    stride = len(windows) // jax.tree.leaves(noise)[0].shape[1]

    def rows(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:count], x[::stride], x[::stride]])

    def signed(xi: jax.Array) -> jax.Array:
        none = jnp.zeros((xi.shape[0], count, xi.shape[2]), xi.dtype)
        return jnp.concatenate([none, sigma * xi, -sigma * xi], 1)

    ids = rows(windows.astype(jnp.int32))
    run = model.forward(expert, ids[:, :-1], jax.tree.map(rows, start), jax.tree.map(signed, noise))
    return run, ids[:, 1:].T


def _windows(tree: PyTree, some: slice) -> PyTree:
    """Some of the windows of what a forward leaves behind, [T, B, ...]."""
    return jax.tree.map(lambda x: x[:, some], tree)


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """x_{t + by}, zero beyond the last byte."""
    return jnp.concatenate([x[by:], jnp.zeros_like(x[:by])]) if by else x


def _ahead(x: jax.Array, count: int) -> jax.Array:
    """x_t + ... + x_{t + count - 1}."""
    return sum((_shifted(x, k) for k in range(min(count, len(x)))), jnp.zeros_like(x))


def _output_change(slopes: Any, xi: jax.Array) -> jax.Array:
    """How units' outputs answer to noise at their inputs, by themselves, [T, B, outputs]."""
    if not isinstance(slopes, model.CellSlopes):
        return slopes * xi
    *gates, of_output = jnp.split(xi, 4, -1)
    written = (slopes.write * jnp.stack(gates, -2)).sum(-2)

    def step(cell: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        cell = xs[0] * cell + xs[1]
        return cell, cell

    _, cells = lax.scan(step, jnp.zeros_like(written[0]), (slopes.keep, written))
    return slopes.read * cells + slopes.output * of_output


def _input_error(slopes: Any, error: jax.Array, credit: int) -> jax.Array:
    """The error at units' inputs that errors at their outputs make, [T, B, inputs]; a cell carries
    those of `credit` bytes."""
    if not isinstance(slopes, model.CellSlopes):
        return slopes * error
    read, of_cell = slopes.read * error, slopes.read * error
    keep = _shifted(slopes.keep, 1)
    for _ in range(min(credit, len(read)) - 1):
        of_cell = read + keep * _shifted(of_cell, 1)
    gates = slopes.write * of_cell[..., None, :]
    gates = jnp.concatenate([gates, (slopes.output * error)[..., None, :]], -2)
    return gates.reshape(*error.shape[:-1], -1)


def _over_devices(reduce: Callable, tree: PyTree, axis_name: str | None) -> PyTree:
    """`lax.psum` or `lax.pmean` of a tree in one exchange."""
    if axis_name is None:
        return tree
    flat, restore = ravel_pytree(tree)
    return restore(reduce(flat, axis_name))


def _gradient(
    expert: model.Params,
    params: PyTree,
    inputs: PyTree,
    errors: PyTree,
    readout: model.Params,
    loss: jax.Array,
    axis_name: str | None,
) -> tuple[PyTree, jax.Array]:
    """The gradient by `params`, which are an expert or its body, and the loss, over all devices."""
    body = model.matrix_gradients(expert, inputs, errors)
    body |= {name: of for name, of in readout.items() if name != "head"}
    gradient = {"head": readout["head"], "body": body} if "body" in params else body
    return _over_devices(lax.pmean, (gradient, loss.astype(jnp.float32)), axis_name)
