"""The chunk store: a corpus as one flat array of bytes, memory-mapped, with its boundaries.

    bytes.bin       uint8 [bytes]          the documents one after the other, nothing between
    offsets.npy     int64 [documents + 1]  where each document starts; the last entry is `bytes`
    chunks.npy      int64 [chunks + 1]     where each chunk starts; the last entry is `bytes`
    ids.jsonl       one JSON string a line: where each document came from
    manifest.json   sizes, the source files with their SHA-256, and the fingerprint

Chunks are the unit of clustering and of a shard (paper, Section 3: 1,024 bytes). They are cut
inside documents from each document's start, so the last chunk of a document may be short.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from soma_jax.data.corpus import (
    Spec,
    list_files,
    read_documents,
    reading,
    source_name,
    spec_parts,
)
from soma_jax.errors import SomaError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Source:
    """A raw file of the corpus, as it was when the store was built."""

    path: str
    size: int  # bytes
    mtime_ns: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> "Source":
        with reading(path), open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(source_name(path), stat.st_size, stat.st_mtime_ns, sha256)

    def has_stat_of(self, path: Path) -> bool:
        with reading(path):
            stat = path.stat()
        return (self.size, self.mtime_ns) == (stat.st_size, stat.st_mtime_ns)

    def has_bytes_of(self, other: "Source") -> bool:
        return (self.size, self.sha256) == (other.size, other.sha256)


@dataclass(frozen=True, eq=False)
class Store:
    """An open store. The arrays are memory-mapped and read-only; see the module's docstring."""

    directory: Path
    manifest: dict[str, Any]
    bytes_: np.ndarray  # uint8 [bytes]
    offsets: np.ndarray  # int64 [documents + 1]
    chunk_bounds: np.ndarray  # int64 [chunks + 1]: chunk i is bytes_[bounds[i]:bounds[i + 1]]

    @property
    def chunks(self) -> np.ndarray:
        """Where each chunk starts, int64 [chunks]."""
        return self.chunk_bounds[:-1]

    @property
    def n_documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_chunks(self) -> int:
        return len(self.chunk_bounds) - 1

    @property
    def n_bytes(self) -> int:
        return len(self.bytes_)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the bytes and the document boundaries: equal for equal corpora, whatever
        files they came in."""
        return self.manifest["fingerprint"]

    @property
    def sources(self) -> list[Source]:
        return [Source(**source) for source in self.manifest["sources"]]

    def document(self, i: int) -> bytes:
        return self.bytes_[self.offsets[i] : self.offsets[i + 1]].tobytes()

    def documents(self) -> Iterator[np.ndarray]:
        """All documents in order, uint8, memory-mapped."""
        return (self.bytes_[a:b] for a, b in itertools.pairwise(self.offsets))

    def document_ids(self) -> Iterator[str]:
        """Where each document came from, in order."""
        with open(self.directory / "ids.jsonl", encoding="utf-8") as file:
            yield from map(json.loads, file)

    def chunk(self, i: int) -> bytes:
        return self.bytes_[self.chunk_bounds[i] : self.chunk_bounds[i + 1]].tobytes()

    def chunk_sizes(self, ids: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Bytes in each chunk, int64; of all chunks, or of those with the given numbers."""
        return self.chunk_bounds[1:][ids] - self.chunk_bounds[:-1][ids]

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` bytes from each start, uint8 [len(starts), length]."""
        return np.lib.stride_tricks.sliding_window_view(self.bytes_, length)[starts]


def build_store(
    spec: Spec,
    directory: str | os.PathLike[str],
    text_field: str = "text",
    chunk_bytes: int = 1024,
    progress: Callable[[int], object] | None = None,
) -> Store:
    """Reads a corpus into a new store, in constant memory; the store is complete or absent.

    Args:
      spec: the corpus, as in `soma_jax.data.corpus`.
      directory: where the store is to be. It must not exist, or be an empty folder.
      text_field: the JSON field or parquet column that holds the text.
      chunk_bytes: length of a chunk.
      progress: called with the number of document bytes just written.

    Raises:
      SomaError: the corpus cannot be read or changed meanwhile; the directory is taken, lies in
        the corpus, or cannot be written (a full disk).
    """
    directory = Path(directory)
    if chunk_bytes < 1:
        raise SomaError(f"chunk_bytes is {chunk_bytes}; a chunk has at least 1 byte.")
    _refuse_inside_corpus(directory, spec)
    files = list_files(spec)
    try:
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise SomaError(f"{directory}: already exists. Open it, delete it, or name another.")
        with _complete_or_absent(directory) as building:
            _write(building, files, text_field, chunk_bytes, progress)
    except OSError as error:  # reading turns its own into a SomaError, so this one is of writing
        raise SomaError(
            f"{directory}: cannot write the store ({error.strerror or error}). It needs about as "
            "many bytes as the text of the corpus: make room or name another directory."
        ) from error
    return open_store(directory)


def _array(path: Path) -> np.ndarray:
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def open_store(directory: str | os.PathLike[str]) -> Store:
    """Opens a store and checks that it is complete: its files have the sizes they were left with.

    Raises:
      SomaError: it is not a store, is of another format version, or a file is missing or damaged.
    """
    directory = Path(directory)
    rebuild = "Delete the directory and build the store again."
    try:
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format_version"] != FORMAT_VERSION:
            raise SomaError(
                f"{directory}: store format {manifest['format_version']}, but this version of "
                f"soma_jax reads {FORMAT_VERSION}. {rebuild}"
            )
        for name, size in manifest["files"].items():
            if Path(name).name != name:
                raise SomaError(
                    f"{directory}: its manifest names {name}, which is not a file of the store"
                )
            found = (directory / name).stat().st_size
            if found != size:
                raise SomaError(
                    f"{directory / name}: {found:,} bytes where {size:,} were written; "
                    f"truncated or damaged. {rebuild}"
                )
        return Store(
            directory,
            manifest,
            # Plain views: indexing np.memmap itself is several times slower.
            bytes_=np.asarray(np.memmap(directory / "bytes.bin", np.uint8, mode="r")),
            offsets=_array(directory / "offsets.npy"),
            chunk_bounds=_array(directory / "chunks.npy"),
        )
    except FileNotFoundError as error:
        raise SomaError(f"{error.filename}: missing; {directory} is not a whole store.") from error
    except (OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SomaError):
            raise
        raise SomaError(f"{directory}: damaged store ({error!r}). {rebuild}") from error


def check_sources(store: Store, spec: Spec) -> None:
    """Refuses a corpus that is not the one the store was built from.

    Files are compared by path, size and modification time, and by SHA-256 where only the time
    differs or the path is new: a file that was touched or moved has not changed.

    Raises:
      SomaError: naming the files added, removed or changed.
    """
    removed = {source.path: source for source in store.sources}
    added, changed = [], []
    for path in list_files(spec):
        built = removed.pop(source_name(path), None)
        if built is None:
            added.append(path)
        elif not (built.has_stat_of(path) or built.has_bytes_of(Source.of(path))):
            changed.append(source_name(path))
    for path in added.copy():
        if any(path.stat().st_size == source.size for source in removed.values()):
            now = Source.of(path)
            moved = [name for name, source in removed.items() if source.has_bytes_of(now)]
            if moved:
                del removed[moved[0]]
                added.remove(path)
    differences = {
        "added": list(map(source_name, added)),
        "removed": list(removed),
        "changed": changed,
    }
    if any(differences.values()):
        raise SomaError(
            f"The corpus is not the one that {store.directory} was built from: "
            + "; ".join(f"{what}: {_first(names)}" for what, names in differences.items() if names)
            + ". Restore those files, or start a new run with its own store."
        )


def _first(names: list[str], n: int = 5) -> str:
    more = f" and {len(names) - n} more" if len(names) > n else ""
    return ", ".join(names[:n]) + more


def _refuse_inside_corpus(directory: Path, spec: Spec) -> None:
    """A store inside the folder it is built from would be a part of the corpus ever after."""
    for part in spec_parts(spec):
        folder = Path(os.path.expanduser(part))
        if folder.is_dir() and directory.resolve().is_relative_to(folder.resolve()):
            raise SomaError(
                f"{directory}: lies inside the corpus {folder}. Put it elsewhere, or give the "
                f"corpus as a glob, such as {folder}/*.txt."
            )


@contextlib.contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` to build in; takes its place at the end, or goes on an error."""
    parent, prefix = directory.parent, f".{directory.name}.building-"
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.iterdir():
        if path.name.startswith(prefix):  # left by a build that was killed
            shutil.rmtree(path)
    building = parent / f"{prefix}{uuid.uuid4().hex[:8]}"
    building.mkdir()
    try:
        yield building
        for path in (*building.iterdir(), building):
            _fsync(path)
        os.replace(building, directory)
        _fsync(parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _growing_int64(path: Path) -> Iterator[Callable[[np.ndarray | list[int]], object]]:
    """A flat int64 .npy file, written piece by piece with the function given."""
    size = 0

    def append(values: np.ndarray | list[int]) -> None:
        nonlocal size
        values = np.asarray(values, "<i8")
        file.write(values.tobytes())
        size += values.size

    def write_header() -> None:
        # NumPy pads the header so that it keeps its length while the first axis grows.
        file.seek(0)
        npy_format.write_array_header_1_0(
            file, {"descr": "<i8", "fortran_order": False, "shape": (size,)}
        )

    with open(path, "wb") as file:
        write_header()
        yield append
        write_header()


def _write(
    directory: Path,
    files: list[Path],
    text_field: str,
    chunk_bytes: int,
    progress: Callable[[int], object] | None,
) -> None:
    sources = [Source.of(path) for path in files]
    empty: Counter[str] = Counter()
    fingerprint = hashlib.sha256()
    n_documents = n_chunks = position = 0
    with (
        open(directory / "bytes.bin", "wb") as data,
        open(directory / "ids.jsonl", "w", encoding="utf-8") as ids,
        _growing_int64(directory / "offsets.npy") as add_offsets,
        _growing_int64(directory / "chunks.npy") as add_chunks,
    ):
        for document in read_documents(tuple(files), text_field, empty):
            start = position
            add_offsets([start])
            for block in document.blocks:
                data.write(block)
                fingerprint.update(block)
                first = position + (start - position) % chunk_bytes  # the next chunk's start
                position += len(block)
                starts = np.arange(first, position, chunk_bytes)
                add_chunks(starts)
                n_chunks += len(starts)
                if progress:
                    progress(len(block))
            fingerprint.update((position - start).to_bytes(8, "little"))
            ids.write(json.dumps(document.id) + "\n")
            n_documents += 1
        add_offsets([position])
        add_chunks([position])

    for path, source in zip(files, sources, strict=True):
        if not source.has_stat_of(path):
            raise SomaError(f"{path}: changed while it was read. Start again when it is at rest.")
    manifest = {
        "format_version": FORMAT_VERSION,
        "bytes": position,
        "documents": n_documents,
        "chunks": n_chunks,
        "chunk_bytes": chunk_bytes,
        "skipped_empty": empty.total(),
        "text_field": text_field,
        "fingerprint": fingerprint.hexdigest(),
        "files": {path.name: path.stat().st_size for path in sorted(directory.iterdir())},
        "sources": [asdict(source) for source in sources],
    }
    text = json.dumps(manifest, indent=1) + "\n"
    (directory / "manifest.json").write_text(text, encoding="utf-8")
