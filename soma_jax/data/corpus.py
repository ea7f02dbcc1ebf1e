"""Corpus readers: files of documents in, bytes out, in constant memory.

A corpus is named by a *spec*: a file, a folder (read recursively), a glob, packaged data such as
`embedded:train`, or a tuple of those. What the files hold is told by their names:

    .jsonl .ndjson .json     one JSON object a line, its text in one field     (also .gz, .zst)
    .parquet                 one document a row, its text in one column
    anything else            one document a file, bytes kept as they are       (also .gz, .zst)
"""

import codecs
import contextlib
import glob
import gzip
import io
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soma_jax.errors import SomaError

log = logging.getLogger(__name__)

Spec = str | os.PathLike[str] | tuple[str | os.PathLike[str], ...]

BLOCK_BYTES = 1 << 20  # how much of a plain text file is held at once
PARQUET_ROWS = 64  # rows decoded at once

_HERE = Path(__file__).parent
PACKAGED = {
    "embedded:train": _HERE / "embedded" / "train.jsonl.gz",
    "embedded:valid": _HERE / "embedded" / "valid.jsonl.gz",
    "embedded:test": _HERE / "embedded" / "test.jsonl.gz",
    "wikitext103:test": _HERE / "wikitext" / "wiki.test.raw.gz",
}
_PACKAGED_NAME = {path: name for name, path in PACKAGED.items()}
_PACKAGED_PREFIXES = ("embedded:", "wikitext103:")

# Formats that are certainly not text, by (offset, first bytes). gzip, zstd and parquet are read,
# but only under their own file names, so that one name always means one format.
_NOT_TEXT = {
    "a zip archive": (0, b"PK\x03\x04"),
    "a tar archive": (257, b"ustar"),
    "a 7z archive": (0, b"7z\xbc\xaf\x27\x1c"),
    "an xz file": (0, b"\xfd7zXZ\x00"),
    "a bzip2 file": (4, b"1AY&SY"),
    "a gzip file (name it .gz)": (0, b"\x1f\x8b\x08"),
    "a zstd file (name it .zst)": (0, b"\x28\xb5\x2f\xfd"),
    "a parquet file (name it .parquet)": (0, b"PAR1"),
    "an arrow file": (0, b"ARROW1\x00\x00"),
    "a numpy array": (0, b"\x93NUMPY"),
    "a PNG image": (0, b"\x89PNG\r\n\x1a\n"),
    "a JPEG image": (0, b"\xff\xd8\xff"),
    "a PDF document": (0, b"%PDF-"),
    "an SQLite database": (0, b"SQLite format 3\x00"),
    "an ELF program": (0, b"\x7fELF"),
}


@dataclass(frozen=True)
class Document:
    """One document. `blocks` are its bytes in order, at most about a MiB each; read them once."""

    id: str  # the file, and for files of many documents `:line` or `:row`, counted from 1
    blocks: Iterable[bytes]

    def read(self) -> bytes:
        """The whole document at once."""
        return b"".join(self.blocks)


def list_files(spec: Spec) -> list[Path]:
    """The files behind a spec, sorted, each real file once however many links lead to it.

    Below a folder or a glob, hidden files and folders are skipped (and logged). A link that leads
    nowhere, a pipe or a device is an error rather than a silent gap in the corpus.
    """
    found = sorted({path for part in spec_parts(spec) for path in _find(part)})
    first_name = {path.resolve(): path for path in reversed(found)}
    return sorted(first_name.values())


def spec_parts(spec: Spec) -> tuple[str, ...]:
    """The parts of a spec: itself, or what the tuple holds."""
    parts = (spec,) if isinstance(spec, str | os.PathLike) else spec
    if not parts:
        raise SomaError("No corpus given: name a file, a folder, a glob or embedded:train.")
    return tuple(os.fspath(part) for part in parts)


def read_documents(
    spec: Spec, text_field: str = "text", skipped: Counter[str] | None = None
) -> Iterator[Document]:
    """Streams the documents of a corpus, file after file in the order of `list_files`.

    Memory holds one JSON line, PARQUET_ROWS rows or BLOCK_BYTES of a plain file at a time.

    Args:
      spec: the corpus.
      text_field: the field of a JSON object, or the parquet column, that holds the text.
      skipped: if given, counts per file the empty documents, which are not yielded.

    Raises:
      SomaError: a file is missing, unreadable, damaged or not text; a line or row does not hold a
        text; or there is no document in the whole corpus.
    """
    files = list_files(spec)
    n_documents = n_empty = 0
    for path in files:
        for document in _read_file(path, text_field):
            if document is None:
                n_empty += 1
                if skipped is not None:
                    skipped[source_name(path)] += 1
            else:
                n_documents += 1
                yield document
    what = ", ".join(spec_parts(spec))
    if not n_documents:
        raise SomaError(f"{what}: no documents ({len(files)} files, {n_empty} empty texts).")
    if n_empty:
        log.warning("%s: skipped %d empty documents", what, n_empty)


def source_name(path: Path) -> str:
    """How a file is named in document ids and manifests: packaged data by its spec, not its place
    on this machine; other files by their path as given."""
    return _PACKAGED_NAME.get(path, str(path))


@contextlib.contextmanager
def reading(path: Path, *damage: type[Exception]) -> Iterator[None]:
    """Turns what goes wrong while a file is read into a SomaError that names the file.

    `damage` lists exceptions, besides the usual ones, that mean that the file is damaged.
    """
    failures: tuple[type[Exception], ...] = (
        OSError,
        EOFError,
        zlib.error,
        UnicodeEncodeError,
        *damage,
    )
    try:
        yield
    except SomaError:
        raise
    except PermissionError as error:
        raise SomaError(f"{path}: no permission to read it; change its mode.") from error
    except failures as error:
        raise SomaError(
            f"{path}: cannot be read ({error}). It may be truncated or damaged: fetch it again."
        ) from error


def _find(part: str) -> list[Path]:
    """The files behind one part of a spec, in any order, possibly more than once."""
    if part.startswith(_PACKAGED_PREFIXES):
        if part not in PACKAGED:
            raise SomaError(f"{part}: no such packaged data; there are {', '.join(PACKAGED)}.")
        return [PACKAGED[part]]
    if not part:
        raise SomaError("The corpus has an empty name: name a file, a folder or a glob.")

    path = Path(os.path.expanduser(part))
    with reading(path):
        if os.path.lexists(path):
            starts = [path]
        elif glob.has_magic(part):
            starts = _match(path)
        else:
            raise SomaError(f"{path}: no such file or folder.")
        seen: set[Path] = set()
        files = [file for start in starts for file in _walk(start, seen)]
    if not files:
        raise SomaError(f"{path}: {'an empty folder' if path.is_dir() else 'matches nothing'}.")
    return files


def _match(pattern: Path) -> list[Path]:
    """What a glob matches, hidden names only where the pattern spells them out."""
    # Path.glob, not glob.glob: the latter follows links below `**`, so two links that lead back up
    # make it visit exponentially many paths.
    anchor = Path(pattern.anchor)
    try:
        matches = sorted(anchor.glob(str(pattern.relative_to(anchor))))
    except ValueError as error:
        raise SomaError(f"{pattern}: not a glob that can be used ({error}).") from error
    visible = []
    for path in matches:
        if any(name.startswith(".") and name not in pattern.parts for name in path.parts):
            log.info("skipped %s: hidden", path)
        else:
            visible.append(path)
    return visible


def _walk(start: Path, seen: set[Path]) -> Iterator[Path]:
    """The files at or below a path; `seen` holds real folders, so that links cannot loop."""
    stack = [start]
    while stack:
        path = stack.pop()
        if path.is_file():
            yield path
        elif not path.is_dir():
            raise SomaError(
                f"{path}: neither a file nor a folder (a broken link, a pipe or a device?). "
                "Remove it from the corpus, or name the files to read."
            )
        elif (real := path.resolve()) not in seen:
            seen.add(real)
            for child in sorted(path.iterdir(), reverse=True):
                if child.name.startswith("."):
                    log.info("skipped %s: hidden", child)
                else:
                    stack.append(child)


def _read_file(path: Path, text_field: str) -> Iterator[Document | None]:
    """The documents of one file in order; None stands for an empty one."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".parquet"]:
        return _read_parquet(path, text_field)
    if suffixes[-1:] in ([".gz"], [".zst"]):
        suffixes.pop()
    if suffixes[-1:] in ([".jsonl"], [".ndjson"], [".json"]):
        return _read_json_lines(path, text_field)
    return _read_text(path)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    """The decompressed bytes of a file as a buffered stream; refuses what is certainly no text."""
    with reading(path), _decompressed(path) as raw, io.BufferedReader(raw, BLOCK_BYTES) as stream:
        head = stream.peek(512)
        for what, (offset, magic) in _NOT_TEXT.items():
            if head[offset : offset + len(magic)] == magic:
                raise SomaError(f"{path}: {what}, not text; convert it or leave it out.")
        yield stream


def _decompressed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in (".gz", ".zst"):
        return open(path, "rb", buffering=0)
    if path.stat().st_size == 0:
        raise EOFError("an empty compressed file")  # the libraries would read it as no bytes
    if suffix == ".gz":
        return gzip.open(path)
    # pyarrow, not zstandard: the latter's stream reader ends without an error where a truncated
    # file ends, and by default after the first of several frames.
    import pyarrow as pa

    return pa.input_stream(str(path), compression="zstd")


def _read_text(path: Path) -> Iterator[Document | None]:
    # The file is opened again when the blocks are asked for, so a document that nobody reads
    # holds no file open and costs no memory.
    if next(_text_blocks(path), None) is None:
        yield None
    else:
        yield Document(source_name(path), _text_blocks(path))


def _text_blocks(path: Path) -> Iterator[bytes]:
    with _open(path) as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block


def _read_json_lines(path: Path, text_field: str) -> Iterator[Document | None]:
    with _open(path) as stream:
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)  # before the JSON, so not in any text
            if line.strip():
                text = _json_text(line, text_field, f"{path}:{number}")
                yield Document(f"{source_name(path)}:{number}", (text,)) if text else None


def _json_text(line: bytes, text_field: str, where: str) -> bytes:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SomaError(
            f"{where}: not JSON in UTF-8 ({error}). Each line is to hold one JSON object."
        ) from error
    if not isinstance(row, dict):
        raise SomaError(
            f"{where}: a JSON {type(row).__name__}, not an object. Each line is to hold one object."
        )
    if text_field not in row:
        raise SomaError(f"{where}: no field {text_field!r}; the fields are {list(row)}.")
    text = row[text_field]
    if not isinstance(text, str):
        raise SomaError(f"{where}: field {text_field!r} is {json.dumps(text):.40}, not a string.")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SomaError(
            f"{where}: field {text_field!r} holds the lone surrogate "
            f"\\u{ord(text[error.start]):04x}, which has no UTF-8 bytes. Replace it in the file."
        ) from error


def _read_parquet(path: Path, text_field: str) -> Iterator[Document | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # With a buffer size, column chunks are read piece by piece and not whole.
    with (
        reading(path, pa.ArrowException),
        pq.ParquetFile(
            str(path),
            pre_buffer=False,
            buffer_size=BLOCK_BYTES,
            page_checksum_verification=True,
        ) as file,
    ):
        columns = file.schema_arrow
        if text_field not in columns.names:
            raise SomaError(f"{path}: no column {text_field!r}; the columns are {columns.names}.")
        kind = columns.field(text_field).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise SomaError(f"{path}: column {text_field!r} holds {kind}, not strings.")
        number = 0
        for batch in file.iter_batches(PARQUET_ROWS, columns=[text_field]):
            texts = batch.column(0).cast(pa.large_string()).cast(pa.large_binary())
            for text in texts.to_pylist():
                number += 1
                if text is None:
                    raise SomaError(f"{path}: row {number}: {text_field!r} is null, not a string.")
                yield Document(f"{source_name(path)}:{number}", (text,)) if text else None
