"""Makes a checkpoint to share of a finished run:

python launch/export.py --workdir=runs/soma_n4 --to=exported/soma-n4

A directory of the experts as safetensors, config.json, the router and a model card
(soma_jax/release.py). launch/generate.py and launch/evaluate.py take it as --checkpoint;
examples/torch_reader.py reads it without JAX.
"""

import dataclasses
import runpy
import shlex
from pathlib import Path
from typing import Any

from absl import flags
from flax.traverse_util import flatten_dict

from soma_jax import cli
from soma_jax.config import Config, resolve
from soma_jax.workdir import Workdir

_WORKDIR = flags.DEFINE_string("workdir", None, "the finished run", required=True)
_TO = flags.DEFINE_string(
    "to", None, "a new directory; its name is the checkpoint's", required=True
)
_DATA = flags.DEFINE_string(
    "data", None, "what it was trained on, and its licence [packaged texts]"
)
_LICENCE = flags.DEFINE_string("licence", "Apache-2.0", "of the weights")

ROOT = Path(__file__).parents[1]


def main() -> None:
    cli.use_host_devices(0)
    from soma_jax import export  # after the devices are set: it brings JAX programs

    command = _command(Workdir(Path(_WORKDIR.value)).read_config())
    directory = Path(_TO.value).absolute()
    export.export(Path(_WORKDIR.value), directory, command, _DATA.value, _LICENCE.value)
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    print(f"{directory}: {size / 1e6:.2f} MB; README.md is its model card")


def _command(config: Config) -> str:
    """The shortest command line that gives this config."""
    files = [*(ROOT / "configs").glob("*.py"), *(ROOT / "configs" / "paper").glob("*.py")]
    lines: list[list[str]] = []
    for file in sorted(files):
        given = _fields(resolve(runpy.run_path(str(file))["get_config"]()))
        flags_ = [f"--{k}={v}" for k, v in _fields(config).items() if v != given[k]]
        lines.append(["python", "launch/main.py", f"--config={file.relative_to(ROOT)}", *flags_])
    shortest = min(lines, key=len)
    return shlex.join(shortest)


def _fields(config: Config) -> dict[str, Any]:
    fields = flatten_dict({"config": dataclasses.asdict(config)}, sep=".")
    return {name: v for name, v in fields.items() if not name.startswith("config.run.")}


if __name__ == "__main__":
    cli.run(main)
