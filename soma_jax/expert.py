"""One expert: its state, its update, its own validation. Pure functions, alone by construction.

An expert's trajectory depends on its settings, the parameters it starts from, its windows and its
key, and on nothing else.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from soma_jax import model, optimizers, probes, whitening
from soma_jax.config import Stage
from soma_jax.head import delta_rule


class ExpertState(flax.struct.PyTreeNode):
    """All that an expert's next update depends on, and all that a checkpoint holds."""

    params: model.Params
    body_optimizer: Any
    head_optimizer: Any  # None when E is frozen
    plateau: Any
    carried: Any  # model.State from which each stream goes on, or None
    update: jax.Array  # int32 []: updates done
    failed: jax.Array  # int32 []: the update at which the loss was not finite, or -1


class Batch(flax.struct.PyTreeNode):
    """The windows of one update of one expert, uint8."""

    probes: Any  # [B, T + 1], or [n_pert, B, T + 1] with a batch for each direction
    head: Any  # [head_sequences, T + 1], some of the same windows
    streams: Any  # [windows_per_update, T + 1], all of them, where states are carried; else None


def split_batch(windows: Any, stage: Stage) -> Batch:
    """Arranges windows [..., windows_per_update, T + 1] for an update."""
    return Batch(
        probes=_by_probe(windows, stage, windows.ndim - 2),
        head=windows[..., : stage.head_sequences, :],
        streams=windows if stage.carry else None,
    )


def _by_probe(x: Any, stage: Stage, axis: int = 0) -> Any:
    """What belongs to the windows of an update, on an axis, as the directions see it."""
    if not stage.own_batch:
        return x
    batches = x.reshape(*x.shape[:axis], -1, stage.sequences, *x.shape[axis + 1 :])
    return batches.repeat(stage.share, axis) if stage.share > 1 else batches


def chunk_and_block(stage: Stage, chunk: int = 0) -> tuple[int, int]:
    """How many directions, and bytes of a window, to evaluate at a time; 0 is what suits.

    On a CPU the activations should stay in a core's cache: 1,024 rows of them, counted over
    directions, signs, windows and bytes, fill 512 KiB at d = 32. Dense directions have no product
    in common, so one at a time is best; structured ones want many rows in the recurrence's. An
    accelerator needs all the work at once.
    """
    if jax.default_backend() == "cpu":
        structured = stage.estimator == "eggroll" or stage.probe in probes.STRUCTURED
        rows, suits = 1024, 64 // stage.sequences if structured else 1
    else:
        rows, suits = 2**20, stage.n_pert
    chunk = min(chunk or max(1, suits), stage.n_pert)
    return chunk, max(1, rows // (2 * chunk * stage.sequences))


def init_state(params: model.Params, stage: Stage) -> ExpertState:
    """A fresh optimizer around given parameters (the seed's, for a branch)."""
    return ExpertState(
        params=params,
        body_optimizer=optimizers.body(stage).init(_estimated(params, stage)),
        head_optimizer=optimizers.head(stage).init(params["head"])
        if stage.head_sequences
        else None,
        plateau=optimizers.plateau(stage).init(params["body"]),
        carried=model.initial_state(params, stage.windows_per_update) if stage.carry else None,
        update=jnp.zeros((), jnp.int32),
        failed=jnp.full((), -1, jnp.int32),
    )


def _estimated(params: model.Params, stage: Stage) -> Any:
    """The part of the parameters whose gradient the estimator estimates."""
    return params if stage.parameters == "all" else params["body"]


def update(
    state: ExpertState,
    batch: Batch,
    key: jax.Array,
    stage: Stage,
    *,
    chunk: int = 0,
    axis_name: str | None = None,
) -> tuple[ExpertState, jax.Array]:
    """One optimizer step: the body by its estimator, E by the delta rule (paper, section 2).

    A step that is not finite is not taken: the state stays as it was, and `failed` says when.

    Args:
      state: the expert.
      batch: its windows.
      key: the expert's key; the update's own is folded in here.
      stage: settings.
      chunk: directions evaluated at once; 0 is what suits the device.
      axis_name: the mesh axis over which directions (and the head's windows) are split, if any.

    Returns:
      The next state and the mean loss [] of the update's perturbed forwards, nats/byte.
    """
    params = state.params
    chunk, block = chunk_and_block(stage, chunk)

    def at_now(optimizer: Any, factor: float = 1.0) -> Any:
        rates = {
            name: optimizers.scaled(
                stage, factor * getattr(stage, name), state.plateau.scale, state.update
            )
            for name in optimizer.hyperparams
        }
        return optimizer._replace(hyperparams=rates)

    def complete(some: Any) -> model.Params:
        return some if stage.parameters == "all" else {"head": params["head"], "body": some}

    def value_fn(some: Any, windows_and_state: Any) -> jax.Array:
        windows, start = windows_and_state
        return model.sequence_losses(complete(some), windows, block, start)

    start = jax.tree.map(lambda x: _by_probe(x, stage), state.carried)
    if stage.own_batch and axis_name is not None:  # of the windows that this device has
        mine = stage.n_pert // jax.lax.axis_size(axis_name)
        first = jax.lax.axis_index(axis_name) * mine
        start = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, mine), start)
    estimated, unperturbed = _estimated(params, stage), {}
    if stage.head_sequences:
        unperturbed["gradient"], _, inputs = delta_rule(params, batch.head)
        if stage.whitening:
            unperturbed["second_moments"] = whitening.second_moments(inputs)
    if axis_name is not None and unperturbed:
        # One collective, and before the estimator's: XLA's CPU backend starts independent ones at
        # once, and its threads then wait for each other forever.
        unperturbed = jax.lax.pmean(unperturbed, axis_name)
        estimated, unperturbed = jax.lax.optimization_barrier((estimated, unperturbed))
    factors = None
    if stage.whitening:
        factors = whitening.factors(unperturbed["second_moments"], stage.whitening)
    step, body_optimizer = optimizers.body(
        stage, factors=factors, chunk=chunk, axis_name=axis_name
    ).update(
        estimated,
        at_now(state.body_optimizer),
        estimated,
        value_fn=value_fn,
        complete=complete,
        key=jax.random.fold_in(key, state.update),
        batch=(batch.probes, start),
    )
    loss = body_optimizer.inner_state[0].loss
    moved = optax.apply_updates(estimated, step)
    new_params = moved if stage.parameters == "all" else {"head": params["head"], "body": moved}
    head_optimizer = state.head_optimizer
    if stage.head_sequences:
        step, head_optimizer = optimizers.head(stage).update(
            unperturbed["gradient"], at_now(head_optimizer, stage.head_rate), params["head"]
        )
        new_params["head"] = optax.apply_updates(params["head"], step)

    carried = state.carried
    if stage.carry:
        # By the unperturbed expert, after its step: a member's own state would be of a direction
        # that is no longer there.
        _, carried = model.features(new_params, batch.streams[:, :-1].astype(jnp.int32), carried)

    new_state = state.replace(
        params=new_params,
        carried=carried,
        body_optimizer=body_optimizer,
        head_optimizer=head_optimizer,
        update=state.update + 1,
    )
    # The body's optimizer state holds the loss.
    reached = jax.tree.leaves((new_params, body_optimizer, head_optimizer))
    finite = jnp.stack([jnp.isfinite(x).all() for x in reached]).all()
    good = finite & (state.failed < 0)
    failed = jnp.where(finite, state.failed, state.update)
    new_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), new_state, state)
    return new_state.replace(failed=failed), loss


def validate(
    state: ExpertState, windows_WxL: jax.Array, stage: Stage
) -> tuple[ExpertState, jax.Array]:
    """The expert's loss on its own validation windows [], which drives its plateau rule."""
    loss = model.sequence_losses(state.params, windows_WxL).mean()
    _, plateau = optimizers.plateau(stage).update({}, state.plateau, value=loss)
    failed = jnp.where(jnp.isfinite(loss) | (state.failed >= 0), state.failed, state.update)
    return state.replace(plateau=plateau, failed=failed), loss
