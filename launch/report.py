"""Gathers what launch/experiment.py has left into one page: `python launch/report.py`.

It writes WORKDIR/report.md and WORKDIR/report.html, which is one file with its figures in it. With
--into=docs/results it also writes docs/results.md, beside a directory with the results and figures
it shows, which are kept there together.
"""

from pathlib import Path

from absl import flags

from soma_jax import cli
from soma_jax.progress import console
from soma_jax.report import gathered

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "where the experiments lie, each in a directory of its name [runs/experiments]"
)
_INTO = flags.DEFINE_string("into", None, "a directory to copy results to; the page is INTO.md")


def main() -> None:
    into = Path(_INTO.value) if _INTO.value else None
    for page in gathered.write(cli.workdir(_WORKDIR.value, "runs/experiments"), into):
        console.print(str(page))


if __name__ == "__main__":
    cli.run(main)
