"""Benchmarks are scripts, not modules of a package: how tests get at them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from absl import flags

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """A benchmark as a module; `F`, where it has one, holds its own flags at their defaults.

    Its flags are taken back from absl's: another script may define the same.
    """
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    own = flags.FlagValues()
    for flag in flags.FLAGS.get_flags_for_module(name):
        own[flag.name] = flag
        delattr(flags.FLAGS, flag.name)
    own.mark_as_parsed()
    if hasattr(module, "F"):
        module.F = own
    return module
