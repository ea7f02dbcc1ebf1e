"""What the commands in launch/ share: flags, devices, and how a failure is told."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging

from soma_jax.errors import SomaError
from soma_jax.interrupt import Interrupted
from soma_jax.progress import console


def run(main: Callable[[], None]) -> None:
    """Parses flags and runs a command.

    Exit status: 0 done, 1 an unexpected error (with its traceback), 2 bad input or flags, 128 + n
    stopped by signal n.
    """
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)  # Orbax tells every file it writes at INFO
    try:
        app.run(lambda argv: _checked(main, argv), flags_parser=_parse)
    except SomaError as error:
        fail(error)


def fail(error: SomaError) -> NoReturn:
    """Tells bad input in one line, and exits with status 2."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def _parse(argv: Sequence[str]) -> list[str]:
    """absl's parser, with every complaint about a flag (also ml_collections') as one line."""
    for word in argv[1:]:
        mantissa = re.fullmatch(r"[^=]*=[+-]?([\d.]+)[eE][+-]?\d+", word)
        if mantissa and re.search("[1-9]", mantissa[1]) and float(word.partition("=")[2]) == 0:
            raise SomaError(f"{word}: the number is too small to be told from 0")
    try:
        return flags.FLAGS(argv)
    except (AttributeError, KeyError) as error:  # how ml_collections tells it
        raise SomaError(
            f"the config has no such field: {error}. soma_jax/config.py lists all of them"
        ) from error
    except (flags.Error, SyntaxError, TypeError, ValueError, OSError) as error:
        raise SomaError(f"{str(error).rstrip('.')}. Run with --help for the flags") from error


def _checked(main: Callable[[], None], argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise SomaError(
            f"stray words on the command line: {' '.join(argv[1:])}. Flags are --name=value"
        )
    try:
        main()
    except Interrupted as stop:
        print(f"stopped by {stop}; run the same command again to go on", file=sys.stderr)
        sys.exit(128 + stop.signum)
    except KeyboardInterrupt:  # in a command that has nothing to save
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
            from soma_jax import distributed

            distributed.give_up(error)
        raise


def define_ensemble() -> Callable[[], str]:
    """Defines --workdir and --checkpoint, one of which names the trained ensemble to use.

    Returns:
      What gives its path or name, once flags are parsed.
    """
    names = ("workdir", "checkpoint")
    flags.DEFINE_string("workdir", None, "the run whose ensemble to use")
    flags.DEFINE_string(
        "checkpoint", None, "a shipped checkpoint, or a directory of a released one"
    )
    flags.register_multi_flags_validator(
        names,
        lambda given: sum(value is not None for value in given.values()) == 1,
        "name one trained ensemble, by --workdir or by --checkpoint",
    )
    return lambda: next(v for v in (flags.FLAGS[name].value for name in names) if v is not None)


def workdir(given: str | None, default: str) -> Path:
    """The path that --workdir gives, or the command's own.

    Raises:
      SomaError: an empty one, which is no directory's name.
    """
    if given == "":
        raise SomaError("--workdir is empty; name a directory")
    return Path(default if given is None else given)


def join(cluster: str | None, address: str | None, count: int | None, index: int | None) -> None:
    """Makes this process one of several (`distributed.join`); only the first one talks."""
    from soma_jax import distributed  # it brings JAX

    distributed.join(cluster, address, count, index)
    console.quiet = not distributed.leads()


def use_host_devices(count: int) -> None:
    """Makes `count` CPU devices (0: one for each core this process may use), before JAX starts.

    XLA does not spread the small products of a narrow expert over cores; devices do.

    Raises:
      SomaError: for far more devices than cores: each has threads and buffers of its own, and a
        mistyped number would take the machine down.
    """
    import jax

    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # not on Linux
        cores = os.cpu_count() or 1
    if count > (most := max(8, 4 * cores)):
        raise SomaError(
            f"{count} CPU devices are too many for {cores} cores: host_devices must be at most "
            f"{most}; 0 makes one for each core"
        )
    count = count or cores
    jax.config.update("jax_num_cpu_devices", count)
    if count > 1:
        # Each device has a core to itself. Left on, XLA hands parts of a kernel to a pool of one
        # thread for each core, where a collective may already hold a thread and wait for what is
        # queued behind it: such a run ended with "may be stuck" after a minute.
        flags_before = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_cpu_multi_thread_eigen=false {flags_before}"
