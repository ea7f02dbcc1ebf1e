"""Small files that are complete or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from soma_jax.errors import SomaError


@contextmanager
def naming_the_disk(path: Path) -> Iterator[None]:
    """Turns an OSError while writing `path` (a full disk, no permission) into a SomaError."""
    try:
        yield
    except OSError as error:
        raise SomaError(
            f"cannot write {path}: {error.strerror or error}. Make room or choose another "
            "--workdir, then run the same command again: it goes on from what is complete"
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file by way of a temporary one beside it."""
    with naming_the_disk(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)  # half a file only fills a disk that is full
            raise


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SomaError(f"cannot read {path}: {error}") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line (metrics.jsonl, curve.jsonl).

    Raises:
      SomaError: a line that is not one, or a file that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SomaError(f"cannot read {path}: {error}") from error
    result = []
    for number, line in enumerate(lines, 1):
        try:
            result.append(json.loads(line))
        except ValueError as error:
            raise SomaError(
                f"{path}:{number} is not JSON ({error}): remove the line to go on without it"
            ) from error
    return result
