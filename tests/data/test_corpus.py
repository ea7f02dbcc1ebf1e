"""Corpus readers: what is read, in which order, and what is refused."""

import gzip
import io
import itertools
import json
import logging
import os
import tarfile
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from soma_jax.data import corpus
from soma_jax.data.corpus import list_files, read_documents
from soma_jax.errors import SomaError

TEXTS = ["one\r\ntwo", "\ufeffBOM", "nul \x00 nul", "snow \u2603 \u2028 line", "😀"]


def json_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": t, "n": i}).encode() + b"\n" for i, t in enumerate(texts))


def zstd(data: bytes) -> bytes:
    return zstandard.compress(data)


def parquet(texts: list, **kwargs) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "n": list(range(len(texts)))}), sink, **kwargs)
    return sink.getvalue()


def read(spec, **kwargs) -> list[bytes]:
    return [document.read() for document in read_documents(spec, **kwargs)]


MANY = {
    "a.jsonl": json_lines(TEXTS),
    "a.JSONL": json_lines(TEXTS),
    "a.ndjson": json_lines(TEXTS),
    "a.json": json_lines(TEXTS),
    "bom.jsonl": b"\xef\xbb\xbf" + json_lines(TEXTS),
    "unended.jsonl": json_lines(TEXTS).rstrip(b"\n"),
    "crlf.jsonl": json_lines(TEXTS).replace(b"\n", b"\r\n"),
    "utf8.jsonl": "".join(
        json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in TEXTS
    ).encode(),
    "a.jsonl.gz": gzip.compress(json_lines(TEXTS)),
    "members.jsonl.gz": gzip.compress(json_lines(TEXTS[:2])) + gzip.compress(json_lines(TEXTS[2:])),
    "a.jsonl.zst": zstd(json_lines(TEXTS)),
    "frames.jsonl.zst": zstd(json_lines(TEXTS[:2])) + zstd(json_lines(TEXTS[2:])),
    "a.parquet": parquet(TEXTS),
    "groups.parquet": parquet(TEXTS, row_group_size=2),
    "large.parquet": parquet(pa.array(TEXTS, pa.large_string())),
    "dictionary.parquet": parquet(pa.array(TEXTS).dictionary_encode()),
}


@pytest.mark.parametrize("name", MANY)
def test_files_of_many_documents(tmp_path, name):
    (tmp_path / name).write_bytes(MANY[name])
    documents = list(read_documents(str(tmp_path / name)))
    assert [document.read() for document in documents] == [text.encode() for text in TEXTS]
    assert [document.id for document in documents] == [
        f"{tmp_path / name}:{number}" for number in range(1, len(TEXTS) + 1)
    ]


@pytest.mark.parametrize("name", ["a.txt", "a", "README.md", "a.txt.gz", "a.gz", "a.zst", "b.raw"])
def test_any_other_file_is_one_document_with_its_bytes_kept(tmp_path, name):
    data = b"\xef\xbb\xbfcr\rlf\ncrlf\r\nnul\x00latin \xe9\xff\n\n"
    packed = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix, bytes)(data)
    (tmp_path / name).write_bytes(packed)
    (document,) = read_documents(tmp_path / name)
    assert document.read() == data
    assert document.id == str(tmp_path / name)


@settings(max_examples=50, deadline=None)
@given(data=st.binary(min_size=1), texts=st.lists(st.text(min_size=1), min_size=1))
def test_bytes_survive_reading(tmp_path_factory, data, texts):
    folder = tmp_path_factory.mktemp("corpus")
    data = b"x" + data  # no binary format starts so
    (folder / "a.txt").write_bytes(data)
    (folder / "b.jsonl").write_bytes(json_lines(texts))
    (folder / "c.parquet").write_bytes(parquet(texts))
    assert read(folder) == [data] + 2 * [text.encode() for text in texts]


def test_parquet_bytes_are_kept_even_where_they_are_not_utf8(tmp_path):
    latin = pa.array([b"caf\xe9"]).view(pa.string())
    (tmp_path / "a.parquet").write_bytes(parquet(latin))
    assert read(tmp_path / "a.parquet") == [b"caf\xe9"]


def test_another_text_field(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert read(tmp_path / "a.jsonl", text_field="body") == [b"yes"]


def test_blank_lines_are_skipped_and_keep_their_numbers(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n  \n{"text": "b"}\n\n')
    ids = [document.id for document in read_documents(tmp_path / "a.jsonl")]
    assert ids == [f"{tmp_path}/a.jsonl:2", f"{tmp_path}/a.jsonl:4"]


def test_empty_texts_are_skipped_counted_and_reported(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_bytes(json_lines(["", "a", ""]))
    (tmp_path / "b.parquet").write_bytes(parquet(["b", ""]))
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b""))
    skipped: Counter[str] = Counter()
    assert read(tmp_path, skipped=skipped) == [b"a", b"b"]
    assert skipped == {
        f"{tmp_path}/a.jsonl": 2,
        f"{tmp_path}/b.parquet": 1,
        f"{tmp_path}/c.txt": 1,
        f"{tmp_path}/d.txt.gz": 1,
    }
    assert "skipped 5 empty documents" in caplog.text


@pytest.mark.parametrize("spec", corpus.PACKAGED)
def test_packaged_data(spec):
    (path,) = list_files(spec)
    documents = list(read_documents(spec))
    assert documents[0].id.startswith(spec)  # and not where the package happens to be installed
    manifest = json.loads((path.parent / "MANIFEST.json").read_text())
    assert manifest
    if spec == "wikitext103:test":
        assert [len(document.read()) for document in documents] == [1_290_590]
    else:
        assert len(documents) > 50


# Which files


def make_tree(root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


def names_in(root: Path, spec) -> list[str]:
    return [str(path.relative_to(root)) for path in list_files(spec)]


def test_a_folder_is_read_to_its_depth_in_sorted_order(tmp_path):
    make_tree(tmp_path, ["b.txt", "a/z.txt", "a/b/c/d.txt", "c.txt"])
    assert names_in(tmp_path, tmp_path) == ["a/b/c/d.txt", "a/z.txt", "b.txt", "c.txt"]


def test_the_order_of_listing_and_of_the_spec_does_not_matter(tmp_path, monkeypatch):
    make_tree(tmp_path, ["x/1.txt", "x/2.txt", "y/1.txt"])
    for link in "abcdefgh":
        (tmp_path / link).symlink_to("x")
    parts = [f"{tmp_path}/{part}" for part in ("y", "[b-h]", "x/1.txt", "a/*")]
    iterdir = Path.iterdir
    for order in (False, True):
        monkeypatch.setattr(Path, "iterdir", lambda p, r=order: sorted(iterdir(p), reverse=r))
        for spec in [tmp_path, *itertools.permutations(parts)]:
            assert names_in(tmp_path, spec) == ["a/1.txt", "a/2.txt", "y/1.txt"]


def test_hidden_files_are_skipped_and_logged(tmp_path, caplog):
    make_tree(tmp_path, ["a.txt", ".b.txt", ".git/c.txt", "d/.e.txt"])
    with caplog.at_level(logging.INFO):
        assert names_in(tmp_path, tmp_path) == ["a.txt"]
        assert names_in(tmp_path, f"{tmp_path}/**/*.txt") == ["a.txt"]
    for name in (".b.txt", ".git", ".e.txt"):
        assert name in caplog.text
    assert names_in(tmp_path, f"{tmp_path}/.git/*.txt") == [".git/c.txt"]  # asked for


@pytest.mark.parametrize("spec", ["", "/**/*.txt", "/**", "/*"])
def test_link_loops_end_and_each_real_file_is_read_once(tmp_path, spec):
    make_tree(tmp_path, ["a/b/f.txt", "g.txt"])
    for name in ("a/up", "a/up2", "a/b/up", "a/b/up2"):  # many more than 2^40 paths
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "again.txt").symlink_to("g.txt")
    assert sorted(read(f"{tmp_path}{spec}")) == [b"a/b/f.txt", b"g.txt"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt", "b.txt"]),
        ("[b-z]*.txt", ["b.txt"]),
        ("d*", ["d/e.txt"]),  # a folder that matches is read as a folder
        ("**/*.txt", ["a.txt", "b.txt", "d/e.txt"]),
        ("x[1].log", ["x[1].log"]),  # a name that exists is a name
    ],
)
def test_globs(tmp_path, monkeypatch, pattern, expected):
    make_tree(tmp_path, ["a.txt", "b.txt", "d/e.txt", "x[1].log"])
    assert names_in(tmp_path, f"{tmp_path}/{pattern}") == expected
    monkeypatch.chdir(tmp_path)
    assert list(map(str, list_files(pattern))) == expected


def test_home_is_expanded(tmp_path, monkeypatch):
    make_tree(tmp_path, ["a.txt"])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/a.txt") == [b"a.txt"]


# What is refused


def test_no_such_corpus(tmp_path):
    (tmp_path / "folder").mkdir()
    cases: list[tuple[corpus.Spec, str]] = [
        (f"{tmp_path}/none.txt", "none.txt: no such file"),
        (f"{tmp_path}/*.txt", r"\*.txt: matches nothing"),
        (f"{tmp_path}/**x", "not a glob"),
        (f"{tmp_path}/folder", "folder: an empty folder"),
        ("embedded:tests", "embedded:tests: no such packaged data; there are embedded:train"),
        ("", "empty name"),
        ((), "No corpus given"),
    ]
    for spec, message in cases:
        with pytest.raises(SomaError, match=message):
            list(read_documents(spec))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_no_documents(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(SomaError, match="no documents"):
        list(read_documents(tmp_path))


@pytest.mark.parametrize("what", ["broken link", "link to itself", "pipe"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, what):
    make_tree(tmp_path, ["a.txt"])
    if what == "pipe":
        os.mkfifo(tmp_path / "odd")
    else:
        (tmp_path / "odd").symlink_to("odd" if what == "link to itself" else "gone")
    for spec in (tmp_path, tmp_path / "odd", f"{tmp_path}/*"):
        with pytest.raises(SomaError, match="odd: neither a file nor a folder"):
            list_files(spec)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_no_permission(tmp_path, monkeypatch, name):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(corpus, "open", refuse, raising=False)
    monkeypatch.setattr(corpus.gzip, "open", refuse)
    with pytest.raises(SomaError, match=f"{name}: no permission"):
        list(read_documents(tmp_path / name))


def test_no_permission_for_a_folder(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(SomaError, match="no permission"):
        list_files(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "not JSON"),
        (b"plain text", "not JSON"),
        (b'{"text": "caf\xe9"}', "not JSON in UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "not JSON"),
        (b'{"text": ' + b"1" * 5_000 + b"}", "not JSON"),
        ('{"text": "a"}\n'.encode("utf-16-be")[:-1], "not JSON in UTF-8"),
        (b'["a"]', "a JSON list, not an object"),
        (b'"a"', "a JSON str, not an object"),
        (b'{"body": "a", "id": 1}', r"no field 'text'; the fields are \['body', 'id'\]"),
        (b'{"text": null}', "field 'text' is null, not a string"),
        (b'{"text": 3}', "field 'text' is 3, not a string"),
        (b'{"text": ["a"]}', "not a string"),
        (rb'{"text": "a\ud800b"}', r"lone surrogate \\ud800"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(SomaError, match=f"a.jsonl:3: .*{message}"):
        list(read_documents(tmp_path / "a.jsonl"))


def test_surrogate_pairs_are_a_character(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rb'{"text": "\ud83d\ude00"}')
    assert read(tmp_path / "a.jsonl") == ["😀".encode()]


def test_bad_parquet(tmp_path):
    cases: list[tuple[list, str, str]] = [
        (["a"], "body", r"no column 'body'; the columns are \['text', 'n'\]"),
        (["a"], "n", "column 'n' holds int64, not strings"),
        ([["a"]], "text", "column 'text' holds list.*, not strings"),
        (["a"] * 100 + [None], "text", "row 101: 'text' is null"),
    ]
    for texts, text_field, message in cases:
        (tmp_path / "a.parquet").write_bytes(parquet(texts))
        with pytest.raises(SomaError, match=f"a.parquet: {message}"):
            list(read_documents(tmp_path / "a.parquet", text_field))


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.txt.gz", "a.txt.zst"]
)
def test_a_file_truncated_anywhere_is_refused(tmp_path, name):
    texts = [f"{i * 7919:x}" for i in range(20)]
    pack = {".gz": gzip.compress, ".zst": zstd}.get(Path(name).suffix)
    whole = pack(json_lines(texts)) if pack else parquet(texts)
    for size in range(len(whole)):
        (tmp_path / name).write_bytes(whole[:size])
        with pytest.raises(SomaError, match=f"{name}: cannot be read .*truncated"):
            list(read_documents(tmp_path / name))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.parquet"])
def test_a_damaged_file_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"this is not what the name says")
    with pytest.raises(SomaError, match=f"{name}: cannot be read .*damaged"):
        list(read_documents(tmp_path / name))


def test_a_flipped_byte_in_a_gz_is_refused_or_does_no_harm(tmp_path):
    whole = gzip.compress(json_lines(TEXTS))
    n_refused = 0
    for i in range(len(whole)):
        (tmp_path / "a.jsonl.gz").write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        try:
            assert read(tmp_path / "a.jsonl.gz") == [text.encode() for text in TEXTS]
        except SomaError:
            n_refused += 1
    assert n_refused > len(whole) - 10  # the header holds a time and the like


def test_a_flipped_byte_in_a_parquet_page_with_a_checksum_is_refused(tmp_path):
    whole = parquet(["soma"], write_page_checksum=True, compression="none", use_dictionary=False)
    (tmp_path / "a.parquet").write_bytes(whole.replace(b"soma", b"sofa"))
    with pytest.raises(SomaError, match=r"a.parquet: cannot be read"):
        list(read_documents(tmp_path / "a.parquet"))


def binary_files() -> dict[str, bytes]:
    archive, tar = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", "a")
    with tarfile.open(fileobj=tar, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))
    return {
        "a.zip": archive.getvalue(),
        "a.tar": tar.getvalue(),
        "a.tar.gz": gzip.compress(tar.getvalue()),
        "a.tar.zst": zstd(tar.getvalue()),
        "a.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "a.pdf": b"%PDF-1.7\n",
        "gzip without its name.txt": gzip.compress(b"a"),
        "zstd without its name.jsonl": zstd(b"a"),
        "parquet without its name": parquet(["a"]),
    }


@pytest.mark.parametrize(("name", "data"), binary_files().items())
def test_binary_formats_are_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SomaError, match="not text"):
        list(read_documents(tmp_path / name))


# Memory


def create(path: Path):
    if path.suffix == ".gz":
        return gzip.open(path, "wb", 1)
    return zstandard.open(path, "wb") if path.suffix == ".zst" else open(path, "wb")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl.gz", "a.jsonl.zst"])
def test_reading_64_mb_takes_a_few(tmp_path, name):
    line = b"x" * 65_500
    unit = json.dumps({"text": line.decode()}).encode() + b"\n" if "json" in name else line
    with create(tmp_path / name) as file:
        for _ in range(1024):
            file.write(unit)

    tracemalloc.start()
    try:
        total = sum(len(b) for d in read_documents(tmp_path / name) for b in d.blocks)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == 1024 * len(line)
    assert peak < 8e6


def test_reading_a_parquet_row_group_of_64_mb_takes_a_few(tmp_path):
    texts = [f"{i:06d}" * 1_000 for i in range(10_000)]
    pq.write_table(
        pa.table({"text": texts}), tmp_path / "a.parquet", use_dictionary=False, compression="none"
    )
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1
    before, peak = pa.total_allocated_bytes(), 0
    for document in read_documents(tmp_path / "a.parquet"):
        assert document.read()
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 0 < peak < 16e6


def test_documents_nobody_reads_hold_nothing_open(tmp_path):
    make_tree(tmp_path, [f"{i}.txt" for i in range(50)])
    open_files = len(os.listdir("/dev/fd"))
    documents = list(read_documents(tmp_path))
    assert len(os.listdir("/dev/fd")) == open_files
    assert documents[7].read() == b"15.txt"
