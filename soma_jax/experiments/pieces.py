"""What an interrupted experiment goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from soma_jax.errors import SomaError
from soma_jax.files import read_json, write_json


def adopt(directory: Path, settings: Any) -> None:
    """Makes a directory that of the pieces of these settings, before the first of them.

    Raises:
      SomaError: it holds pieces of other settings.
    """
    path, mine = directory / "settings.json", json.loads(json.dumps(settings))
    if path.exists() and read_json(path) != mine:
        raise SomaError(f"{directory} was made with other settings; choose another --workdir")
    write_json(path, mine)
