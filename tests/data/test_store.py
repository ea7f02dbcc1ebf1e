"""The chunk store: what it holds, that it is complete or absent, and when it is refused."""

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from soma_jax.data import corpus
from soma_jax.data import store as store_module
from soma_jax.data.store import build_store, check_sources, open_store
from soma_jax.errors import SomaError


def write_json_lines(path, texts) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture
def corpus_dir(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_json_lines(folder / "a.jsonl", ["abcdefghij", "", "klm"])
    (folder / "b.txt").write_bytes(b"12345\xff\x00")
    return folder


@pytest.fixture
def built(corpus_dir, tmp_path):
    return build_store(corpus_dir, tmp_path / "store", chunk_bytes=4)


# What it holds


def test_what_a_store_holds(built, corpus_dir):
    assert built.bytes_.tobytes() == b"abcdefghijklm12345\xff\x00"
    assert built.offsets.tolist() == [0, 10, 13, 20]
    assert built.chunks.tolist() == [0, 4, 8, 10, 13, 17]
    assert built.chunk_sizes().tolist() == [4, 4, 2, 3, 4, 3]
    assert built.chunk_sizes(np.array([5, 2])).tolist() == [3, 2]
    assert (built.n_documents, built.n_chunks, built.n_bytes) == (3, 6, 20)
    assert [built.document(i) for i in range(3)] == [b"abcdefghij", b"klm", b"12345\xff\x00"]
    assert [built.chunk(i) for i in (0, 2, 5)] == [b"abcd", b"ij", b"5\xff\x00"]
    assert list(built.document_ids()) == [
        f"{corpus_dir}/a.jsonl:1",
        f"{corpus_dir}/a.jsonl:3",
        f"{corpus_dir}/b.txt",
    ]
    windows = built.windows(np.array([3, 0, 17]), 3)
    assert windows.dtype == np.uint8
    assert [window.tobytes() for window in windows] == [b"def", b"abc", b"5\xff\x00"]


def test_the_files_are_plain_arrays(built):
    folder = built.directory
    for name, array in [("offsets.npy", built.offsets), ("chunks.npy", built.chunk_bounds)]:
        on_disk = np.load(folder / name)
        assert on_disk.dtype == np.int64
        np.testing.assert_array_equal(on_disk, array)
    assert (folder / "bytes.bin").read_bytes() == built.bytes_.tobytes()
    assert not built.bytes_.flags.writeable


def test_the_manifest(built, corpus_dir):
    path = corpus_dir / "b.txt"
    assert built.manifest == json.loads((built.directory / "manifest.json").read_text())
    numbers = {"bytes": 20, "documents": 3, "chunks": 6, "chunk_bytes": 4, "skipped_empty": 1}
    assert numbers.items() <= built.manifest.items()
    assert built.manifest["sources"][1] == {
        "path": str(path),
        "size": 7,
        "mtime_ns": path.stat().st_mtime_ns,
        "sha256": hashlib.sha256(b"12345\xff\x00").hexdigest(),
    }


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.text(max_size=12), min_size=1, max_size=8).filter(any),
    chunk_bytes=st.integers(1, 9),
    block_bytes=st.integers(1, 9),
)
@example(texts=["x" * 12, "y" * 12], chunk_bytes=5, block_bytes=4)
def test_chunks_partition_every_document(tmp_path_factory, texts, chunk_bytes, block_bytes):
    folder = tmp_path_factory.mktemp("case")
    documents = [text.encode() for text in texts if text]
    for i, document in enumerate(documents):
        (folder / f"{i}.txt").write_bytes(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK_BYTES", block_bytes)  # chunks do not depend on the blocks
        store = build_store(f"{folder}/*.txt", folder / "store", chunk_bytes=chunk_bytes)
    assert [store.document(i) for i in range(store.n_documents)] == documents
    expected = [d[i : i + chunk_bytes] for d in documents for i in range(0, len(d), chunk_bytes)]
    assert [store.chunk(i) for i in range(store.n_chunks)] == expected
    assert store.chunk_sizes().tolist() == list(map(len, expected))


def test_the_fingerprint_is_of_bytes_and_boundaries(tmp_path):
    def fingerprint(name, texts):
        write_json_lines(tmp_path / f"{name}.jsonl", texts)
        return build_store(tmp_path / f"{name}.jsonl", tmp_path / name).fingerprint

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "1").write_text("ab")
    (tmp_path / "texts" / "2").write_text("c")
    same = build_store(tmp_path / "texts", tmp_path / "other", chunk_bytes=1).fingerprint
    assert fingerprint("a", ["ab", "c"]) == fingerprint("b", ["ab", "", "c"]) == same
    others = [["a", "bc"], ["abc"], ["a", "b", "c"], ["ab", "d"], ["c", "ab"]]
    assert len({same, *(fingerprint(f"c{i}", texts) for i, texts in enumerate(others))}) == 6


def test_progress_counts_every_byte(corpus_dir, tmp_path):
    steps: list[int] = []
    store = build_store(corpus_dir, tmp_path / "store", progress=steps.append)
    assert sum(steps) == store.n_bytes


def test_building_from_64_mb_takes_a_few(tmp_path):
    with open(tmp_path / "a.txt", "wb") as file:
        for _ in range(1024):
            file.write(b"x" * 65_536)
    tracemalloc.start()
    try:
        store = build_store(tmp_path / "a.txt", tmp_path / "store", chunk_bytes=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert store.n_chunks == 2**20  # their starts alone are 8 MB
    assert peak < 8e6


# Complete or absent


def test_an_error_in_the_middle_leaves_nothing(corpus_dir, tmp_path):
    with open(corpus_dir / "a.jsonl", "a") as file:
        file.write("{bad\n")
    with pytest.raises(SomaError, match=r"a.jsonl:4"):
        build_store(corpus_dir, tmp_path / "store")
    assert os.listdir(tmp_path) == ["corpus"]


def test_an_interrupt_leaves_nothing(corpus_dir, tmp_path):
    def interrupt(n_bytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(corpus_dir, tmp_path / "store", progress=interrupt)
    assert os.listdir(tmp_path) == ["corpus"]


def test_what_a_killed_build_left_is_no_store_and_goes_with_the_next(corpus_dir, tmp_path):
    script = (
        "import os, sys; from soma_jax.data.store import build_store; "
        "build_store(sys.argv[1], sys.argv[2], progress=lambda n_bytes: os._exit(9))"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(corpus.__file__)))
    command = [sys.executable, "-c", script, str(corpus_dir), str(tmp_path / "store")]
    assert subprocess.run(command, env=os.environ | {"PYTHONPATH": root}).returncode == 9
    assert len(os.listdir(tmp_path)) == 2
    with pytest.raises(SomaError, match="missing"):
        open_store(tmp_path / "store")
    build_store(corpus_dir, tmp_path / "store")
    assert sorted(os.listdir(tmp_path)) == ["corpus", "store"]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 3_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    try:
        with pytest.raises(SomaError, match=r"store: cannot write the store .*make room"):
            build_store(tmp_path / "a.txt", tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_file_that_changes_while_it_is_read_is_refused(corpus_dir, tmp_path):
    def change(n_bytes):
        (corpus_dir / "b.txt").write_bytes(b"something else")

    with pytest.raises(SomaError, match=r"b.txt: changed while it was read"):
        build_store(corpus_dir, tmp_path / "store", progress=change)
    assert os.listdir(tmp_path) == ["corpus"]


def test_a_store_is_never_overwritten(built, corpus_dir, tmp_path):
    (tmp_path / "file").write_text("precious")
    for taken in (built.directory, tmp_path / "file"):
        with pytest.raises(SomaError, match="already exists"):
            build_store("embedded:valid", taken)
    assert (tmp_path / "file").read_text() == "precious"
    assert open_store(built.directory).fingerprint == built.fingerprint
    (tmp_path / "empty").mkdir()
    assert build_store(corpus_dir, tmp_path / "empty").fingerprint == built.fingerprint


def test_a_store_inside_its_corpus_is_refused(corpus_dir):
    with pytest.raises(SomaError, match="inside the corpus"):
        build_store(corpus_dir, corpus_dir / "runs" / "store")
    assert build_store(f"{corpus_dir}/*.txt", corpus_dir / "runs" / "store").n_documents == 1


def test_a_chunk_has_a_byte(corpus_dir, tmp_path):
    with pytest.raises(SomaError, match="chunk_bytes is 0"):
        build_store(corpus_dir, tmp_path / "store", chunk_bytes=0)


# Opening


@pytest.mark.parametrize(
    "name", ["bytes.bin", "offsets.npy", "chunks.npy", "ids.jsonl", "manifest.json"]
)
def test_an_incomplete_store_is_refused(built, name):
    path = built.directory / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(SomaError, match=rf"{built.directory}.*damaged"):
        open_store(built.directory)
    path.unlink()
    with pytest.raises(SomaError, match=rf"{name}: missing"):
        open_store(built.directory)


def test_another_format_is_refused(built):
    manifest = built.manifest | {"format_version": 99}
    (built.directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SomaError, match="store format 99"):
        open_store(built.directory)


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"format_version": 1}'])
def test_a_manifest_of_something_else_is_refused(built, text):
    (built.directory / "manifest.json").write_text(text)
    with pytest.raises(SomaError, match="damaged store"):
        open_store(built.directory)


def test_what_is_no_store_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(SomaError, match=r"manifest.json: missing"):
            open_store(path)


# The corpus behind it


def test_an_unchanged_corpus_is_accepted_without_reading_it(built, corpus_dir, monkeypatch):
    monkeypatch.setattr(store_module.Source, "of", None)
    check_sources(built, corpus_dir)
    check_sources(built, (str(corpus_dir / "b.txt"), f"{corpus_dir}/*.jsonl"))


def test_touching_or_moving_is_no_change(built, corpus_dir, monkeypatch):
    os.utime(corpus_dir / "b.txt", ns=(1, 1))
    check_sources(built, corpus_dir)
    (corpus_dir / "b.txt").rename(corpus_dir / "c.txt")
    check_sources(built, corpus_dir)
    shutil.copytree(corpus_dir, corpus_dir.parent / "copy")
    check_sources(built, corpus_dir.parent / "copy")
    monkeypatch.chdir(corpus_dir.parent)
    check_sources(built, "corpus")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: (c / "c.txt").write_text("new"), r"added: \S+/c.txt\."),
        (lambda c: (c / "b.txt").unlink(), r"removed: \S+/b.txt\."),
        (lambda c: (c / "b.txt").write_bytes(b"1234567"), r"changed: \S+/b.txt\."),
        (lambda c: (c / "b.txt").write_bytes(b"12345678"), r"changed: \S+/b.txt\."),
        (
            lambda c: (c / "b.txt").rename(c / "c.txt").write_bytes(b"1234567"),
            r"added: \S+/c.txt; removed: \S+/b.txt\.",
        ),
        (
            lambda c: [(c / f"n{i}.txt").write_text("new") for i in range(9)],
            r"added: (\S+/n\d.txt,? ){5}and 4 more\.",
        ),
    ],
)
def test_a_changed_corpus_is_refused(built, corpus_dir, change, message):
    change(corpus_dir)
    with pytest.raises(SomaError, match=message):
        check_sources(built, corpus_dir)


def test_a_second_copy_of_a_file_is_an_addition(built, corpus_dir):
    shutil.copy(corpus_dir / "b.txt", corpus_dir / "c.txt")
    with pytest.raises(SomaError, match=r"added: \S+/c.txt\."):
        check_sources(built, corpus_dir)


def test_packaged_data_is_the_same_wherever_it_is_installed(tmp_path):
    store = build_store("embedded:valid", tmp_path / "store")
    assert [source.path for source in store.sources] == ["embedded:valid"]
    check_sources(store, "embedded:valid")
    with pytest.raises(SomaError, match=r"added: embedded:test; removed: embedded:valid"):
        check_sources(store, "embedded:test")
