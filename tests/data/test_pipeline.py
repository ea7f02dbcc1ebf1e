"""Training windows: every chunk once an epoch, pure in (seed, step), inside their documents."""

import itertools
import json

import grain
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from soma_jax.data.pipeline import (
    place,
    shard_windows,
    split_shard,
    streams,
    validation_windows,
)
from soma_jax.data.store import build_store
from soma_jax.errors import SomaError


def store_of(folder, documents, chunk_bytes=8):
    lines = (json.dumps({"text": document}) + "\n" for document in documents)
    (folder / "a.jsonl").write_text("".join(lines))
    return build_store(folder / "a.jsonl", folder / "store", chunk_bytes=chunk_bytes)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    # 25 chunks; each byte tells its chunk, so that windows of one byte show which were visited.
    documents = ["".join(chr(65 + i) * 8 for i in range(a, a + 5)) for a in range(0, 25, 5)]
    return store_of(tmp_path_factory.mktemp("store"), documents)


@pytest.fixture(scope="module")
def long_store(tmp_path_factory):
    return store_of(tmp_path_factory.mktemp("long"), ["x" * 8 * 510])


ALL = np.arange(25)


def visits(store, chunk_ids, seed, batch=4):
    """The chunks visited, one by one and without end."""
    ds = shard_windows(store, chunk_ids, length=1, batch=batch, seed=seed)
    for step in itertools.count():
        yield from (ds[step][:, 0] - 65).tolist()


def epochs(store, chunk_ids, seed, n, batch=4):
    order = list(itertools.islice(visits(store, chunk_ids, seed, batch), n * len(chunk_ids)))
    return [tuple(order[i * len(chunk_ids) : (i + 1) * len(chunk_ids)]) for i in range(n)]


def test_batches_are_bytes(store):
    batch = shard_windows(store, ALL, length=6, batch=3, seed=0)[0]
    assert batch.shape == (3, 6)
    assert batch.dtype == np.uint8
    assert all(window.tobytes() in store.bytes_.tobytes() for window in batch)


@pytest.mark.parametrize("batch", [1, 4, 25, 60])
def test_each_epoch_visits_every_chunk_once_in_a_new_order(store, batch):
    orders = epochs(store, ALL, seed=3, n=6, batch=batch)
    assert all(sorted(order) == list(range(25)) for order in orders)
    assert len(set(orders)) == 6


def test_only_chunks_of_the_shard_are_visited(store):
    shard = np.array([20, 3, 17, 4])
    assert all(sorted(order) == [3, 4, 17, 20] for order in epochs(store, shard, seed=0, n=5))


def test_seeds_share_no_orders(store):
    # Also not shifted by an epoch, as a seed plus an epoch would have it.
    orders = [order for seed in range(5) for order in epochs(store, ALL, seed, n=5)]
    assert len(set(orders)) == 25


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_the_order_is_grains_own(store, seed):
    shuffle_seed = int(np.random.SeedSequence(seed).generate_state(2)[0])
    theirs = grain.MapDataset.range(25).shuffle(seed=shuffle_seed).repeat().batch(4)
    ours = visits(store, ALL, seed)
    for step in range(20):
        assert list(itertools.islice(ours, 4)) == theirs[step].tolist()


def test_a_step_is_a_pure_function(store):
    arguments = {"length": 6, "batch": 4, "seed": 7}
    ds, again = (shard_windows(store, ALL, **arguments) for _ in range(2))
    steps = [0, 5, 6, 7, 31, 10**6, 10**9]  # an epoch is 6 1/4 steps
    forwards = [ds[step] for step in steps]
    backwards = [again[step] for step in reversed(steps)][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    other = shard_windows(store, ALL, **arguments | {"seed": 8})
    assert any((ds[step] != other[step]).any() for step in steps)


def test_iteration_equals_indexing_and_resumes_at_any_step(store):
    ds = shard_windows(store, ALL, length=6, batch=4, seed=7)
    iterator = iter(ds)
    for step in range(20):
        np.testing.assert_array_equal(next(iterator), ds[step])
    state = json.loads(json.dumps(iterator.get_state()))
    resumed = iter(ds)
    resumed.set_state(state)
    np.testing.assert_array_equal(next(resumed), ds[20])
    iterator.close()
    resumed.close()


def test_windows_lie_anywhere_inside_their_chunk(tmp_path):
    store = store_of(tmp_path, ["".join(map(chr, range(40, 104)))])
    ds = shard_windows(store, np.array([2]), length=3, batch=64, seed=0)
    starts = np.concatenate([ds[step][:, 0] for step in range(20)]) - 40
    values, counts = np.unique(starts, return_counts=True)
    assert values.tolist() == list(range(16, 22))  # the chunk is bytes 16 to 23
    assert counts.min() > 150  # of 1,280: about 213 each


def test_a_short_last_chunk_is_visited_like_any_other(tmp_path):
    store = store_of(tmp_path, ["a" * 8 + "b"])
    windows = shard_windows(store, np.arange(2), length=1, batch=2, seed=0)
    assert all(sorted(windows[step].tobytes()) == [ord("a"), ord("b")] for step in range(50))


@pytest.mark.parametrize(("chunk_ids", "batch"), [([6], 5), ([6, 7], 64), ([6, 7, 8], 1)])
def test_a_shard_smaller_than_a_batch(store, chunk_ids, batch):
    for order in epochs(store, np.array(chunk_ids), seed=1, n=10, batch=batch):
        assert sorted(order) == chunk_ids


@pytest.mark.parametrize(
    ("documents", "start", "length", "window"),
    [
        (["abcdefgh", "ij", "klmnop"], 2, 4, "cdef"),  # in place
        (["abcdefgh", "ij", "klmnop"], 7, 4, "efgh"),  # back, to end with its document
        (["abcdefgh", "ij", "klmnop"], 3, 8, "abcdefgh"),  # the whole document
        (["abcdefgh", "ij", "klmnop"], 9, 4, "ijkl"),  # a short document runs on
        (["abcdefgh", "ij", "klmnop"], 5, 9, "abcdefghi"),
        (["abcdefgh", "ij", "k"], 9, 4, "hijk"),  # and back at the end of the store
        (["abcdefgh", "ij", "k"], 10, 11, "abcdefghijk"),
    ],
)
def test_where_windows_are_placed(tmp_path, documents, start, length, window):
    store = store_of(tmp_path, documents)
    placed = place(np.array([start]), store, length)
    assert store.windows(placed, length).tobytes() == window.encode()


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8), data=st.data())
def test_every_window_lies_in_its_document_where_it_fits(tmp_path_factory, sizes, data):
    texts = [chr(97 + i) * size for i, size in enumerate(sizes)]
    store = store_of(tmp_path_factory.mktemp("case"), texts)
    length = data.draw(st.integers(1, sum(sizes)))
    ids = data.draw(st.lists(st.integers(0, store.n_chunks - 1), min_size=1, unique=True))
    ds = shard_windows(store, np.array(ids), length=length, batch=len(ids), seed=0)
    long_enough = {ord(text[0]) for text in texts if len(text) >= length}
    visited = sorted(store.chunk(i)[0] for i in ids)  # one epoch is one batch
    for step in range(3):
        batch = ds[step]
        whole = sorted(window[0] for window in batch if len(set(window.tolist())) == 1)
        assert [letter for letter in visited if letter in long_enough] == [
            letter for letter in whole if letter in long_enough
        ]


@pytest.mark.parametrize(
    ("chunk_ids", "change", "message"),
    [
        ([], {}, "non-empty integer array"),
        ([0.0, 1.0], {}, "integer array"),
        ([True, False], {}, "integer array"),
        ([[0, 1]], {}, "flat"),
        ([25], {}, r"outside 0\.\.24"),
        ([-1], {}, r"outside 0\.\.24"),
        ([0], {"length": 201}, "200 bytes, shorter than one window of 201"),
        ([0], {"length": 0}, "length=0"),
        ([0], {"batch": 0}, "batch=0"),
        ([0], {"seed": -1}, "seed=-1"),
        ([0], {"seed": 2**32}, "seed=4294967296"),
    ],
)
def test_what_is_refused(store, chunk_ids, change, message):
    with pytest.raises(SomaError, match=message):
        shard_windows(store, np.array(chunk_ids), **{"length": 6, "batch": 4, "seed": 0} | change)


def test_a_store_of_one_window(tmp_path):
    store = store_of(tmp_path, ["abc", "d"])
    ds = shard_windows(store, np.arange(2), length=4, batch=3, seed=0)
    assert [window.tobytes() for window in ds[0]] == [b"abcd"] * 3


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 500), share=st.floats(0.001, 0.999), seed=st.integers(0, 2**31 - 1))
@pytest.mark.parametrize("length", [1])
def test_a_shard_is_split_into_two_parts_that_are_never_empty(long_store, length, n, share, seed):
    chunks = np.arange(7, 7 + n)
    split = {"validation_share": share, "length": length, "seed": seed}
    train, validation = split_shard(long_store, chunks, **split)
    assert sorted([*train, *validation]) == chunks.tolist()  # windows of a byte leave none out
    assert abs(len(validation) - share * n) <= 1
    assert len(train) > 0 < len(validation)
    np.testing.assert_array_equal(train, split_shard(long_store, chunks, **split)[0])


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    length=st.integers(2, 20),
    share=st.floats(0.05, 0.6),
    seed=st.integers(0, 99),
)
def test_no_training_window_shares_a_byte_with_a_validation_window(
    tmp_path_factory, sizes, length, share, seed
):
    letters = iter(map(chr, range(0x100, 0x800)))  # two bytes each, so that a window tells where
    texts = ["".join(next(letters) for _ in range(size)) for size in sizes]
    store = store_of(tmp_path_factory.mktemp("case"), texts)
    ids = np.arange(store.n_chunks)
    assume(store.n_bytes >= length)
    train, validation = split_shard(store, ids, validation_share=share, length=length, seed=seed)
    held_out = validation_windows(store, validation, length=length, count=200)
    flat = store.bytes_.tobytes()

    def where(window):
        begin = flat.index(window.tobytes())
        return set(range(begin, begin + length))

    held_out_bytes = set().union(*map(where, held_out))
    ds = shard_windows(store, train, length=length, batch=len(train), seed=0)
    met = [window for step in range(20) for window in ds[step] if where(window) & held_out_bytes]
    # None, unless every other chunk lies so near a held-out one that nothing would be left.
    assert not met or len(train) == len(ids) - len(validation)


@pytest.mark.parametrize("n", [0, 1])
def test_a_shard_too_small_to_split_is_refused(store, n):
    with pytest.raises(SomaError, match="fewer experts"):
        split_shard(store, np.arange(n), validation_share=0.01, length=4, seed=0)


def test_validation_windows_tile_their_chunks_and_repeat(tmp_path):
    store = store_of(tmp_path, ["".join(map(chr, range(40, 104)))])  # chunks of 8
    found = validation_windows(store, np.array([2, 0]), length=5, count=5) - 40
    # Windows of 5 bytes predict 4: two in a chunk of 8, then the first again.
    assert found[:, 0].tolist() == [16, 20, 0, 4, 16]
    assert (np.diff(found.astype(int), axis=1) == 1).all()


# Streams


def test_each_stream_reads_its_part_of_the_shard_on_and_on(store):
    shard = np.array([7, 2, 20, 3])  # out of order, with a gap
    text = b"".join(store.chunk(i) for i in sorted(shard))
    ds = streams(store, shard, length=5, batch=2)  # 16 bytes each: 3 windows of 4 + 1
    for step in range(7):
        start = step % 3 * 4
        expected = [text[start : start + 5], text[16 + start : 16 + start + 5]]
        assert [window.tobytes() for window in ds[step]] == expected
        assert ds[step].dtype == np.uint8


def test_streams_shorter_than_a_window_are_refused(store):
    with pytest.raises(SomaError, match=r"2 streams of a shard of 8 bytes have 4 bytes each"):
        streams(store, np.array([3]), length=5, batch=2)
    assert len(streams(store, np.array([3]), length=4, batch=2)[9]) == 2
