"""A released checkpoint: a small directory that needs nothing else, and that other programs read.

config.json              the resolved config of the run; `model` is the expert's shape
experts/NNN.safetensors  an expert's float32 parameters by their names in model.py, such as
                         body.blocks.0.mlp_in
router/                  the router, without what only clustering needs
release.json             updates, losses, the SHA-256 of every other file
README.md                the model card
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from soma_jax import model
from soma_jax.config import Config
from soma_jax.errors import SomaError
from soma_jax.files import naming_the_disk, read_json, write_bytes, write_json, write_text
from soma_jax.routing.router import Router

SHIPPED = Path(__file__).parent / "checkpoints"  # those that come with the package
_FORMAT = "soma_jax release 1"
_ABOUT = "release.json"


def shipped() -> list[str]:
    """Names of the checkpoints that come with the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{_ABOUT}"))


def is_release(directory: Path) -> bool:
    return (directory / _ABOUT).exists()


def write(
    directory: Path,
    config: Config,
    experts: Sequence[model.Params],
    router: Router,
    about: dict[str, Any],
    card: str,
) -> None:
    """Writes a released checkpoint: the whole directory, or none.

    Args:
      directory: must not exist.
      config: of the run.
      experts: parameters of the N experts.
      router: of the run.
      about: facts for release.json; `updates` and `screened` are needed to load it.
      card: Markdown.

    Raises:
      SomaError: there is something already, or the disk is full.
    """
    if directory.exists():
        raise SomaError(f"{directory} is there already: choose another --to, or delete it")
    partial = directory.with_name(f".{directory.name}.tmp")
    with naming_the_disk(directory):
        shutil.rmtree(partial, ignore_errors=True)  # of a command that was stopped
        for index, expert in enumerate(experts):
            tensors = {name: np.asarray(leaf) for name, leaf in _named(expert)}
            write_bytes(partial / _expert(index), save(tensors))
        router.compact().save(partial / "router")
        write_json(partial / "config.json", dataclasses.asdict(config))
        write_text(partial / "README.md", card)
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        digests = {str(path.relative_to(partial)): _sha256(path.read_bytes()) for path in files}
        write_json(partial / _ABOUT, {"format": _FORMAT, **about, "sha256": digests})
        partial.rename(directory)


def about(directory: Path) -> dict[str, Any]:
    """What release.json says.

    Raises:
      SomaError: it cannot be read, or is of another format.
    """
    found = read_json(directory / _ABOUT)
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise SomaError(f"{directory / _ABOUT} does not describe a '{_FORMAT}'")
    return found


def read_expert(directory: Path, index: int, config: Config) -> model.Params:
    """The parameters of an expert.

    Raises:
      SomaError: they are missing, damaged, or of another shape than the config's.
    """
    path = directory / _expert(index)
    try:
        content = path.read_bytes()
        if _sha256(content) != about(directory)["sha256"][_expert(index)]:
            raise SomaError(f"{path} is damaged: its SHA-256 is not the one in {_ABOUT}")
        tensors = load(content)
    except (OSError, KeyError, SafetensorError) as error:
        raise SomaError(f"cannot read {path}: {error}") from error
    like = jax.eval_shape(lambda: model.init(jax.random.key(0), config.expert_shape))
    shapes = {name: leaf.shape for name, leaf in _named(like)}
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise SomaError(f"{path} holds another model than {directory / 'config.json'} describes")
    return jax.tree.unflatten(jax.tree.structure(like), [tensors[name] for name in shapes])


def _named(params: model.Params) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]


def _expert(index: int) -> str:
    return f"experts/{index:03d}.safetensors"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
