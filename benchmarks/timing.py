"""What the benchmarks measure with."""

import statistics
import time

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P


def matmul_peak() -> float:
    """GFLOP/s of float32 products of 1,024 x 1,024 matrices, on all devices at once."""
    n, repeats = 1024, 4
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def products(a):
        return jax.lax.fori_loop(0, repeats, lambda _, b: (a[0] @ b) * (1 / n), a[0])[None]

    run = jax.jit(jax.shard_map(products, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    a = jnp.ones((len(jax.devices()), n, n))
    seconds = median_seconds(lambda: run(a), 15)
    return len(jax.devices()) * repeats * 2 * n**3 / seconds / 1e9


def median_seconds(call, repeats: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)
