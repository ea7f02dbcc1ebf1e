"""One run by several processes (`jax.distributed`): all take the same steps, the first one writes.

With one process, and that is without being asked, nothing here does anything.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from soma_jax.errors import SomaError

HEARTBEAT_SECONDS = 30  # the others end at most so long after a process gave its last sign of life


def join(cluster: str | None, address: str | None, count: int | None, index: int | None) -> None:
    """Joins the processes of a run, before JAX makes its devices; None everywhere joins none.

    Args:
      cluster: "slurm" or "ompi", whose variables then say what is not given. They are not looked
        at otherwise: an interactive shell on a cluster has them, too.
      address: HOST:PORT of process 0.
      count: of processes.
      index: of this one, from 0.

    Raises:
      SomaError: half of a description, or the processes did not find each other.
    """
    given = [x is not None for x in (address, count, index)]
    if cluster is None and not any(given):
        return
    if cluster is None and not all(given):
        raise SomaError(
            "several processes are one run by --cluster=slurm or --cluster=ompi, or else by all of "
            "--coordinator=HOST:PORT, --processes=COUNT and --process=INDEX"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            cluster_detection_method=cluster or "deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (ValueError, TypeError, RuntimeError) as error:
        raise SomaError(f"the processes of this run did not find each other: {error}") from error


def leads() -> bool:
    """Whether this process writes and talks."""
    return jax.process_index() == 0


@contextmanager
def in_turn() -> Iterator[None]:
    """Process 0 goes through first, the others after it: they find what it has made."""
    if not leads():
        wait()
    yield
    if leads():
        wait()


def wait() -> None:
    """Returns when every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("soma_jax")


def highest(*values: int) -> list[int]:
    """Of each value the highest that any process has."""
    if jax.process_count() == 1:
        return list(values)
    return multihost_utils.process_allgather(np.array(values, np.int32)).max(0).tolist()


def place(tree: Any, shardings: Any) -> Any:
    """Puts arrays that every process has on devices of all of them.

    Args:
      tree: numpy or JAX arrays.
      shardings: of its leaves: a sharding for all, or a tree of them.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def place_one(x: Any, sharding: Sharding) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = place_one(jax.random.key_data(x), sharding)
            return jax.jit(lambda d: jax.random.wrap_key_data(d, impl=jax.random.key_impl(x)))(data)
        # device_put would compare what the processes hold, with a message for each array.
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda x: place_one(x, shardings), tree)
    return jax.tree.map(place_one, tree, shardings)


def fetch(tree: Any) -> Any:
    """Arrays on devices of any process as numpy arrays, in all processes."""

    def whole(x: Any) -> Any:
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(x)

    return jax.tree.map(whole, tree) if jax.process_count() > 1 else jax.device_get(tree)


def give_up(error: Exception) -> NoReturn:
    """Ends a process of several after an error; the others then end, too.

    At once: on the usual way out it would wait for the others, which wait for it.
    """
    index = jax.process_index()
    if isinstance(error, SomaError):
        print(f"error: process {index}: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    if re.search("gloo|nccl", str(error), re.IGNORECASE):
        print(
            f"error: process {index}: the exchange with another process failed: it has ended, and "
            f"is named within {HEARTBEAT_SECONDS} seconds. Run the same command again, with as "
            "many processes as there are: it goes on from the last complete checkpoint",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(2 * HEARTBEAT_SECONDS)  # JAX's coordination service ends this process before
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
