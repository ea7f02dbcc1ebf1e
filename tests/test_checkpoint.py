"""Checkpoints: complete, found damaged when they are, and never silently lost."""

import json
import math
import shutil

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import strategies as st

from soma_jax import expert, model
from soma_jax.checkpoint import Checkpoints
from soma_jax.config import Stage
from soma_jax.errors import SomaError


@pytest.fixture
def state():
    params = model.init(jax.random.key(0), model.ExpertConfig(width=8, blocks=1, embedding=8))
    return expert.init_state(params, Stage(head_sequences=1))


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


def largest_file(directory):
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path, state):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.newest(state) is None
    checkpoints.save(3, state)
    step, restored = checkpoints.newest(jax.eval_shape(lambda: state))
    assert step == 3
    assert_same(restored, state)


def test_a_relative_directory_is_the_same_directory(tmp_path, state, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Checkpoints("here").save(1, state)
    assert Checkpoints(tmp_path / "here").steps() == [1]


def test_only_the_newest_are_kept(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10):
        checkpoints.save(step, state)
    assert checkpoints.steps() == [2, 10]


def test_what_is_there_is_not_saved_over(tmp_path, state):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    with pytest.raises(SomaError, match="exists"):
        checkpoints.save(1, state.replace(update=jnp.int32(7)))
    assert_same(checkpoints.restore(1, state), state)


def test_later_checkpoints_can_be_dropped(tmp_path, state):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state)
    checkpoints.delete_after(1)
    assert checkpoints.steps() == [1]


def truncate(step):
    file = largest_file(step)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(step):
    file = largest_file(step)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


def lose_a_file(step):
    largest_file(step).unlink()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, lose_a_file])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, state, damage, caplog):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    checkpoints.save(2, state.replace(update=jnp.int32(2)))
    damage(tmp_path / "00000002")
    step, restored = checkpoints.newest(state)
    assert step == 1
    assert_same(restored, state)
    checkpoints.delete_after(step)
    checkpoints.save(2, state)  # and it can be made again
    assert checkpoints.newest(state)[0] == 2


def test_when_none_is_whole_nothing_starts_from_zero(tmp_path, state):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    truncate(tmp_path / "00000001")
    with pytest.raises(SomaError, match="none of the checkpoints"):
        checkpoints.newest(state)


def test_another_shape_or_dtype_is_refused(tmp_path, state):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)
    for other in (
        state.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params)),
        state.replace(params=jax.tree.map(lambda x: jnp.zeros((2, *x.shape)), state.params)),
    ):
        with pytest.raises(SomaError, match="00000001"):
            checkpoints.restore(1, other)


def test_a_failed_save_says_so_and_leaves_the_earlier_one(tmp_path, state, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state)

    def full(*args, **kwargs):
        (tmp_path / "00000002.orbax-checkpoint-tmp").mkdir()  # as a save that got half way
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ocp.Checkpointer, "save", full)
        with pytest.raises(SomaError, match="No space left on device"):
            checkpoints.save(2, state)
    assert checkpoints.newest(state)[0] == 1


def test_the_best_finite_one_is_kept_beside_the_newest(tmp_path, state):
    checkpoints = Checkpoints(tmp_path, keep=2)
    kept = []
    for step, loss in enumerate([math.nan, 2.0, 1.0, -math.inf, math.nan, 3.0, 0.5, math.inf, 4.0]):
        checkpoints.save(step, state, loss)
        kept.append(checkpoints.steps())
    assert kept[3:] == [[2, 3], [2, 3, 4], [2, 4, 5], [5, 6], [6, 7], [6, 7, 8]]
    (tmp_path / "00000006" / "about" / "metadata").write_bytes(b"{")  # a damaged one is no best one
    checkpoints.save(9, state, 5.0)
    assert checkpoints.steps() == [8, 9]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    small = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.int32(4)}
    directory = tmp_path_factory.mktemp("saved")
    Checkpoints(directory).save(1, small)
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return directory, small, {path: path.read_bytes() for path in files}


# Where reading fails in several places at once, some report to an event loop that Orbax has closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=200, deadline=None)
def test_a_damaged_file_is_refused_or_gives_what_was_saved(saved, data):
    """Any bit of any file flipped, any end cut off, any part overwritten."""
    directory, small, files = saved
    path = data.draw(st.sampled_from([path for path, content in files.items() if content]))
    content = files[path]
    start = data.draw(st.integers(0, len(content) - 1))
    damaged = data.draw(
        st.one_of(
            st.integers(0, 7).map(
                lambda bit: (
                    content[:start] + bytes([content[start] ^ 1 << bit]) + content[start + 1 :]
                )
            ),
            st.just(content[:start]),
            st.binary(min_size=1, max_size=64).map(
                lambda some: content[:start] + some + content[start + len(some) :]
            ),
        )
    )
    path.write_bytes(damaged)
    try:
        restored = Checkpoints(directory).restore(1, small)
    except SomaError:
        return
    finally:
        path.write_bytes(content)
    assert_same(restored, small)


def test_a_whole_checkpoint_with_another_digest_is_refused(saved, tmp_path):
    directory, small, _ = saved
    shutil.copytree(directory / "00000001", tmp_path / "00000001")
    about = tmp_path / "00000001" / "about" / "metadata"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"sha256": "0" * 64}))
    with pytest.raises(SomaError, match="its content is not what was saved"):
        Checkpoints(tmp_path).restore(1, small)
