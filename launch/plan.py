"""Says which (N, n_pert, B) to train for a deadline and a budget, from runs that were made:

python launch/plan.py --runs='runs/experiments/scaling/runs/*/*' --seconds=3600 --devices=2

Each run is a finished workdir of launch/main.py; those that differ in their random seed alone are
taken together. Their update times and validation curves are extrapolated (soma_jax/planning.py): a
prediction beyond what was measured is marked.
"""

import glob
import math
from pathlib import Path

from absl import flags
from rich.table import Table

from soma_jax import cli, planning
from soma_jax.errors import SomaError
from soma_jax.progress import console

_RUNS = flags.DEFINE_string("runs", None, "a glob of workdirs", required=True)
_DEVICES = flags.DEFINE_integer("devices", 1, "D, each for one expert at a time", lower_bound=1)
_LIMITS = {
    "seconds": flags.DEFINE_float("seconds", None, "the deadline: wall-clock seconds of training"),
    "operations": flags.DEFINE_float("operations", None, "the budget in arithmetic operations"),
    "device_seconds": flags.DEFINE_float("device_seconds", None, "the budget in device-seconds"),
}


def main() -> None:
    limits = _limits()
    paths = sorted(filter(Path.is_dir, map(Path, glob.glob(_RUNS.value))))
    if not paths:
        raise SomaError(f"--runs={_RUNS.value}: no such directory; train with launch/main.py first")
    settings = planning.by_setting([planning.read(path) for path in paths])
    laws = [planning.fit(s.updates, s.losses, s.name) for s in settings]
    options = [planning.option(*pair, limits) for pair in zip(settings, laws, strict=True)]
    best = planning.chosen(options)
    table = Table()
    for i, column in enumerate(planning.HEADER):
        table.add_column(column, justify="right" if i else "left")
    for option in options:
        table.add_row(*planning.cells(option), style="bold" if option is best else None)
    console.print(table)
    for words in (planning.verdict(options), *planning.caveats(settings)):
        console.print(words)


def _limits() -> planning.Limits:
    given = {name: flag.value for name, flag in _LIMITS.items() if flag.value is not None}
    if not given:
        raise SomaError("no limit: give --seconds, --operations or --device_seconds")
    for name, value in given.items():
        if not 0 < value < math.inf:
            raise SomaError(f"--{name} must be a positive number, not {value:g}")
    return planning.Limits(_DEVICES.value, **given)


if __name__ == "__main__":
    cli.run(main)
