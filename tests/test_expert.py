import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from soma_jax import expert, model, probes, randomness
from soma_jax.config import Stage

SHAPE = model.ExpertConfig(width=4, blocks=1, embedding=4)
STAGE = Stage(updates=10, n_pert=2, sequences=2, window=4, learning_rate=1e-2, eps=1e-2)
KEY = randomness.key(0, "probes", 0)


@functools.cache
def seed_params():
    return model.init(jax.random.key(0), SHAPE)


@functools.cache
def updater(stage):
    return jax.jit(lambda state, batch, key: expert.update(state, batch, key, stage))


def windows(seed: int = 0, count: int = 2) -> Any:
    return np.random.default_rng(seed).integers(256, size=(count, 5), dtype=np.uint8)


def start(stage):
    return expert.init_state(seed_params(), stage)


def train(stage, updates=1, state=None, key=KEY):
    state = start(stage) if state is None else state
    for i in range(updates):
        batch = expert.split_batch(windows(i, stage.windows_per_update), stage)
        state, loss = updater(stage)(state, batch, key)
    return state, loss


def flat(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def assert_bits_equal(left, right):
    same = jax.tree.map(
        lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), left, right
    )
    assert all(jax.tree.leaves(same)), same


# Batches


def test_split_batch_gives_all_directions_the_same_windows():
    stage = dataclasses.replace(STAGE, sequences=4, head_sequences=3)
    drawn = windows(0, 4)
    batch = expert.split_batch(drawn, stage)
    np.testing.assert_array_equal(batch.probes, drawn)
    np.testing.assert_array_equal(batch.head, drawn[:3])


def test_split_batch_gives_each_direction_its_own_windows():
    stage = dataclasses.replace(STAGE, n_pert=3, sequences=2, own_batch=True, head_sequences=5)
    drawn = np.stack([windows(i, 6) for i in range(2)])  # two experts
    batch = expert.split_batch(drawn, stage)
    assert batch.probes.shape == (2, 3, 2, 5)
    np.testing.assert_array_equal(batch.probes[1, 2], drawn[1, 4:6])
    np.testing.assert_array_equal(batch.head, drawn[:, :5])


def test_split_batch_without_the_delta_rule_has_no_windows_for_it():
    assert expert.split_batch(windows(), STAGE).head.shape == (0, 5)


# What moves


@pytest.mark.parametrize("head_sequences", [0, 2])
def test_a_zero_rate_leaves_the_parameters_bit_equal(head_sequences):
    stage = dataclasses.replace(
        STAGE, learning_rate=0.0, weight_decay=0.1, head_sequences=head_sequences
    )
    state, _ = train(stage, updates=2)
    assert_bits_equal(state.params, seed_params())
    assert int(state.update) == 2


@pytest.mark.parametrize("head_sequences", [0, 2])
def test_the_head_moves_by_the_delta_rule_and_is_frozen_without_it(head_sequences):
    state, _ = train(dataclasses.replace(STAGE, head_sequences=head_sequences), updates=2)
    assert (flat(state.params["body"]) != flat(seed_params()["body"])).mean() > 0.9
    if head_sequences:
        # The first Adam steps are the rate long wherever there is a gradient: everywhere.
        moved = np.abs(state.params["head"] - seed_params()["head"])
        assert np.median(moved) > STAGE.learning_rate / 2
    else:
        assert_bits_equal(state.params["head"], seed_params()["head"])
        assert state.head_optimizer is None


@pytest.mark.parametrize(("head_sequences", "gain"), [(0, 0.5), (2, 3)])
def test_updates_go_down_the_loss(head_sequences, gain):
    stage = dataclasses.replace(STAGE, head_sequences=head_sequences)
    state, batch, losses = start(stage), expert.split_batch(windows(), stage), []
    for _ in range(80):
        state, loss = updater(stage)(state, batch, KEY)
        losses.append(float(loss))
    before = jax.jit(model.sequence_losses)(seed_params(), windows()).mean()
    assert losses[0] == pytest.approx(float(before), rel=0.01)
    assert losses[-1] < losses[0] - gain


def step_signs(update, key=KEY):
    """The signs of an update's direction, all turned or none: a first Adam step shows them."""
    stage = dataclasses.replace(STAGE, n_pert=1, weight_decay=0.0)
    state = start(stage).replace(update=jnp.int32(update))
    new, _ = train(stage, state=state, key=key)
    return np.sign(flat(new.params["body"]) - flat(seed_params()["body"]))


def test_an_updates_directions_depend_on_its_index_and_the_experts_key():
    steps = [step_signs(0), step_signs(1), step_signs(2)]
    steps.append(step_signs(0, randomness.key(0, "probes", 1)))
    z = np.stack(steps)
    products = np.abs(z @ z.T) / np.sqrt(np.outer((z**2).sum(1), (z**2).sum(1)))
    np.testing.assert_allclose(products, np.eye(4), atol=6 / np.sqrt((z[0] ** 2).sum()))
    update_key = jax.random.fold_in(KEY, 2)
    expected = flat(probes.sparse_rademacher(update_key, 0, seed_params()["body"]))
    np.testing.assert_array_equal(np.outer(z[2], z[2]), np.outer(expected, expected))


def test_own_batches_reach_their_directions():
    """With equal windows for all directions, a batch of their own is the shared batch."""
    own = dataclasses.replace(STAGE, own_batch=True)
    same = np.tile(windows(), (2, 1))
    state, loss = updater(own)(start(own), expert.split_batch(same, own), KEY)
    expected, expected_loss = updater(STAGE)(
        start(STAGE), expert.split_batch(windows(), STAGE), KEY
    )
    np.testing.assert_allclose(flat(state.params), flat(expected.params), atol=1e-6)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)


def test_rate_and_eps_of_an_update_follow_the_schedule():
    """Seen in the optimizer's state: the plateau's scale, the cosine and the floor."""
    stage = dataclasses.replace(STAGE, updates=4, decay_to=0.5, floor=1e-3, head_sequences=2)
    state = start(stage)
    state = state.replace(
        update=jnp.int32(2), plateau=state.plateau._replace(scale=jnp.float32(0.25))
    )
    state, _ = train(stage, state=state)
    expected = 1e-2 * 0.25 * (0.5 + 0.5 / 2)
    for optimizer in (state.body_optimizer, state.head_optimizer):
        for value in optimizer.hyperparams.values():
            assert float(value) == pytest.approx(expected)


# Failure


def poisoned(state, gain=3e38):
    """Finite parameters whose logits overflow."""
    body = state.params["body"] | {"final_gain": jnp.full(4, gain, jnp.float32)}
    return state.replace(params=state.params | {"body": body})


@pytest.mark.parametrize("head_sequences", [0, 2])
def test_an_update_that_is_not_finite_is_not_taken(head_sequences):
    stage = dataclasses.replace(STAGE, head_sequences=head_sequences)
    healthy, _ = train(stage, updates=2)
    assert int(healthy.failed) == -1
    before = poisoned(healthy)
    after, loss = train(stage, state=before)
    assert not np.isfinite(loss)
    assert_bits_equal(after, before.replace(failed=jnp.int32(2)))
    # It stays as it failed, even where its loss would be finite again.
    for state in (after, healthy.replace(failed=jnp.int32(2))):
        assert_bits_equal(train(stage, state=state)[0], state)


def test_an_update_whose_moments_overflow_is_not_taken():
    """An infinite second moment would hold the expert where it is for good, its loss finite."""
    before = poisoned(start(STAGE), gain=1e20)
    after, loss = train(STAGE, state=before)
    assert np.isfinite(loss)
    assert_bits_equal(after, before.replace(failed=jnp.int32(0)))


# Validation


def test_validation_is_the_mean_loss_and_drives_the_plateau():
    stage = dataclasses.replace(STAGE, patience=4, validate_every=2)
    validate = jax.jit(lambda state, windows: expert.validate(state, windows, stage))
    state, held_out, scales = start(stage), windows(9, 3), []
    for _ in range(6):
        state, loss = validate(state, held_out)
        scales.append(float(state.plateau.scale))
    expected = float(jax.jit(model.byte_losses)(seed_params(), held_out).mean())
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert scales == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert_bits_equal(state.replace(plateau=None), start(stage).replace(plateau=None))


def test_head_rate_scales_the_step_of_e_alone():
    stage = dataclasses.replace(STAGE, head_sequences=2, weight_decay=0.0)
    steps = {}
    for rate in (1.0, 4.0):
        state, _ = train(dataclasses.replace(stage, head_rate=rate))
        steps[rate] = jax.tree.map(
            lambda new, old: np.asarray(new - old), state.params, seed_params()
        )
    np.testing.assert_array_equal(flat(steps[4.0]["body"]), flat(steps[1.0]["body"]))
    np.testing.assert_allclose(steps[4.0]["head"], 4 * steps[1.0]["head"], atol=1e-6)
    assert np.abs(steps[1.0]["head"]).max() > 1e-3


@pytest.mark.parametrize("probe", list(probes.LAWS))
def test_what_an_update_evaluates_at_a_time_does_not_change_it(probe):
    stage = dataclasses.replace(STAGE, n_pert=4, probe=probe, eps=0.1)
    batch = expert.split_batch(windows(0, 2), stage)
    updates = [
        jax.jit(lambda s, b, k, chunk=chunk: expert.update(s, b, k, stage, chunk=chunk))
        for chunk in (0, 1, 4)
    ]
    (state, loss), *others = [update(start(stage), batch, KEY) for update in updates]
    for other, other_loss in others:
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
        np.testing.assert_allclose(flat(other.params), flat(state.params), atol=1e-5)


@pytest.mark.parametrize("probe", ["sparse", "rank_one"])
@pytest.mark.parametrize(("n_pert", "sequences"), [(64, 8), (256, 1), (4, 1), (64, 4096)])
def test_activations_of_an_update_fit_a_cores_cache(n_pert, sequences, probe):
    stage = dataclasses.replace(STAGE, n_pert=n_pert, sequences=sequences, probe=probe)
    chunk, block = expert.chunk_and_block(stage)
    assert 1 <= chunk <= n_pert
    assert 512 < 2 * chunk * sequences * block <= 1024 or (chunk, block) == (1, 1)
    assert chunk == 1 or probe == "rank_one"  # dense directions have no product in common


def test_a_whitened_update_is_the_formulas_step():
    """One update of rank-one directions, each product and inverse written out in float64."""
    stage = dataclasses.replace(
        STAGE, probe="rank_one", n_pert=3, head_sequences=2, whitening=0.1, weight_decay=0.0
    )
    params, drawn = seed_params(), windows(0, 2)
    body = params["body"]
    inputs = model.forward(params, drawn[:, :-1].astype(np.int32)).inputs

    def factor(p, x):
        if x is None:
            return np.ones(())
        x = np.asarray(x, np.float64).reshape(-1, p.shape[0])
        second = x.T @ x / len(x)
        second = second / second.diagonal().mean() + 0.1 * np.eye(len(second))
        root = np.linalg.inv(np.linalg.cholesky(second)).T
        return root * np.sqrt(len(root) / np.square(root).sum())

    factors = jax.tree.map(factor, body, inputs)
    losses = jax.jit(
        lambda body: model.sequence_losses({"head": params["head"], "body": body}, drawn)
    )
    total = jax.tree.map(lambda p: np.zeros(p.shape), body)
    for j in range(3):
        z = probes.LAWS["rank_one"](jax.random.fold_in(KEY, 0), j, body)
        z = jax.tree.map(
            lambda p, z, s: s @ np.outer(z.columns, z.rows) if s.ndim else np.asarray(z),
            body, z, factors,
        )  # fmt: skip
        moved = [
            losses(jax.tree.map(lambda p, z, e=e: jnp.asarray(p + e * z, p.dtype), body, z))
            for e in (1e-2, -1e-2)
        ]
        d = float((moved[0] - moved[1]).mean()) / 2e-2
        total = jax.tree.map(lambda t, z, d=d: t + d * z / 3, total, z)
    state, _ = train(stage)
    for new, old, g in zip(*map(jax.tree.leaves, (state.params["body"], body, total)), strict=True):
        step = -1e-2 * g / np.sqrt(np.square(g).mean())
        np.testing.assert_allclose(new - old, step, atol=2e-4)
        assert np.abs(step).max() > 5e-3


# Other estimators, and E among what they estimate


def test_directions_that_share_windows_see_them_in_turn():
    stage = dataclasses.replace(STAGE, n_pert=4, own_batch=True, share=2, carry=True)
    assert stage.windows_per_update == 4
    drawn = np.stack([windows(i, 4) for i in range(2)])  # two experts
    batch = expert.split_batch(drawn, stage)
    assert batch.probes.shape == (2, 4, 2, 5)
    for j in range(4):
        np.testing.assert_array_equal(batch.probes[:, j], drawn[:, j // 2 * 2 : j // 2 * 2 + 2])
    np.testing.assert_array_equal(batch.streams, drawn)


def test_backprop_of_all_parameters_is_adam_on_the_exact_gradient():
    stage = dataclasses.replace(STAGE, estimator="backprop", parameters="all", n_pert=1)
    state, loss = train(stage, updates=2)
    params, tx = seed_params(), optax.chain(optax.add_decayed_weights(1e-4), optax.adam(1e-2))
    optimizer = tx.init(params)
    for i in range(2):
        mean = lambda p, i=i: model.sequence_losses(p, windows(i)).mean()  # noqa: E731
        expected_loss, gradient = jax.value_and_grad(mean)(params)
        step, optimizer = tx.update(gradient, optimizer, params)
        params = optax.apply_updates(params, step)
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-6)
    np.testing.assert_allclose(flat(state.params), flat(params), atol=1e-6)
    moved = np.abs(state.params["head"] - seed_params()["head"]).max(1)
    # E learns by both its paths: also the bytes that are only read.
    read = np.setdiff1d(windows(0)[:, :-1], windows(0)[:, 1:])
    assert (moved[read] > 1e-3).all()


def test_sgd_is_the_estimate_times_the_rate():
    stage = dataclasses.replace(STAGE, estimator="backprop", n_pert=1, optimizer="sgd")
    stage = dataclasses.replace(stage, weight_decay=0.0)
    state, _ = train(stage)
    loss = lambda body: model.sequence_losses(  # noqa: E731
        {"head": seed_params()["head"], "body": body}, windows()
    ).mean()
    expected = jax.tree.map(
        lambda p, g: p - 1e-2 * g, seed_params()["body"], jax.grad(loss)(seed_params()["body"])
    )
    np.testing.assert_allclose(flat(state.params["body"]), flat(expected), atol=1e-6)
    assert_bits_equal(state.params["head"], seed_params()["head"])


@pytest.mark.parametrize("own_batch", [False, True])
def test_streams_go_on_from_the_state_of_the_unperturbed_expert(own_batch):
    """A first update whose rate is 0, then one whose losses are those of the two windows joined."""
    stage = dataclasses.replace(
        STAGE, n_pert=2, own_batch=own_batch, carry=True, learning_rate=0.0, eps=1e-4
    )
    count = stage.windows_per_update
    both = np.random.default_rng(0).integers(256, size=(count, 9), dtype=np.uint8)
    state = start(stage)
    for piece in (both[:, :5], both[:, 4:]):
        state, loss = updater(stage)(state, expert.split_batch(piece, stage), KEY)
    whole = np.asarray(model.byte_losses(seed_params(), both))
    assert float(loss) == pytest.approx(whole[:, 4:].mean(), abs=1e-5)
    fresh = np.asarray(model.byte_losses(seed_params(), both[:, 4:])).mean()
    assert abs(fresh - whole[:, 4:].mean()) > 1e-4  # so that a forgotten state would show
    _, expected = model.features(seed_params(), both[:, :-1].astype(np.int32))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), state.carried, expected)
