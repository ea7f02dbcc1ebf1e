"""Runs an experiment: `python launch/experiment.py --experiment=allocation`.

It writes a table (Markdown and CSV), figures and result.json into its workdir. Stopped at any
moment, the same command goes on. Its settings are configs/experiments/NAME.py; any of them can be
overridden, as in `--config.byte_forwards=2e6`. `--size=paper` is the paper's size.
"""

import importlib
import os
import re
import shlex
import sys
from pathlib import Path

import jax
from absl import flags
from ml_collections import config_flags

from soma_jax import cli, experiments
from soma_jax.workdir import Workdir

CONFIGS = Path(__file__).parent.parent / "configs" / "experiments"


def _config_of(argv: list[str]) -> str:
    """The config file of the experiment that a command line names, and its argument: flags are
    defined before they are parsed, and a config's default must be known then."""
    line = " ".join(argv)
    named = re.findall(r" --?experiment[= ](\w+)", line)
    size = re.findall(r" --?size[= ](\w+)", line)
    return f"{CONFIGS / (named or experiments.NAMES)[-1]}.py:{(size or ['cpu'])[-1]}"


_EXPERIMENT = flags.DEFINE_enum("experiment", None, experiments.NAMES, "which", required=True)
flags.DEFINE_enum("size", "cpu", ["cpu", "paper"], "of the experiment's own config")
_CONFIG = config_flags.DEFINE_config_file(
    "config", _config_of(sys.argv), "the experiment's settings [configs/experiments/NAME.py]"
)
_WORKDIR = flags.DEFINE_string("workdir", None, "where it is kept [runs/experiments/NAME]")
_DEVICES = flags.DEFINE_integer("host_devices", 0, "CPU devices; 0: one for each core", 0)


def main() -> None:
    cli.use_host_devices(_DEVICES.value)
    name = _EXPERIMENT.value
    experiment = importlib.import_module(f"soma_jax.experiments.{name}")
    settings = experiment.resolve(_CONFIG.value)
    path = cli.workdir(_WORKDIR.value, f"runs/experiments/{name}")
    # As anybody would run it: where it was kept here is no part of it.
    line = shlex.join(["python", "launch/experiment.py", *sys.argv[1:]])
    command = re.sub(r" --?workdir[= ]('[^']*'|\S+)", "", line)
    workdir = Workdir(path)
    with workdir.lock():
        # Runs that differ in their random seed alone are one program: it is compiled once.
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            jax.config.update("jax_compilation_cache_dir", str(workdir.path / "compiled"))
        experiment.run(settings, workdir.path, command)


if __name__ == "__main__":
    cli.run(main)
