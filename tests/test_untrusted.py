"""A workdir from a stranger: its files are arrays and JSON, and cannot run code or leave it."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from soma_jax.data.store import build_store, open_store
from soma_jax.errors import SomaError
from soma_jax.routing.router import Router

ROOT = Path(__file__).parents[1]


class Bomb:
    def __reduce__(self):
        return exec, ("raise KeyboardInterrupt('code of the file was run')",)


BOMB = np.array([Bomb()], object)


@pytest.mark.parametrize("name", ["offsets.npy", "chunks.npy"])
def test_a_store_runs_no_code(tmp_path, name):
    build_store("embedded:valid", tmp_path / "store")
    np.save(tmp_path / "store" / name, BOMB, allow_pickle=True)
    manifest = tmp_path / "store" / "manifest.json"
    about = json.loads(manifest.read_text())
    about["files"][name] = (tmp_path / "store" / name).stat().st_size
    manifest.write_text(json.dumps(about))
    with pytest.raises(SomaError):
        open_store(tmp_path / "store")


def test_a_manifest_s_files_are_those_of_the_store(tmp_path):
    build_store("embedded:valid", tmp_path / "store")
    (tmp_path / "secret").write_text("12345")
    manifest = tmp_path / "store" / "manifest.json"
    about = json.loads(manifest.read_text())
    for name in ("../secret", str(tmp_path / "secret")):
        manifest.write_text(json.dumps(about | {"files": about["files"] | {name: 5}}))
        with pytest.raises(SomaError, match="is not a file of the store"):
            open_store(tmp_path / "store")


def test_a_router_runs_no_code(tmp_path):
    np.savez(tmp_path / "router.npz", allow_pickle=True, terms=BOMB)
    content = (tmp_path / "router.npz").read_bytes()
    about = {"format": "soma_jax router 1", "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "router.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="allow_pickle"):
        Router.load(tmp_path)


def test_nothing_here_unpickles():
    for path in [*ROOT.glob("soma_jax/**/*.py"), *ROOT.glob("launch/*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(
            r"\b(import pickle|cloudpickle|allow_pickle=True|eval\(|exec\()", text
        ), path
        for line in text.splitlines():
            assert "np.load(" not in line or "allow_pickle=False" in line, f"{path}: {line}"
