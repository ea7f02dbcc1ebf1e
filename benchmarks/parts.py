"""Where the time of a byte-forward goes, part by part, with all cores busy as in an update.

python benchmarks/parts.py [--width=32 --sequences=8 --probe=sparse] [--json]

Prints for each part of the perturbed forward its core-nanoseconds for one byte-forward, its
matrix products' operations and the fraction of the matmul peak that they amount to.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax
from jax.sharding import PartitionSpec as P
from rich.table import Table
from timing import matmul_peak, median_seconds

from soma_jax import cli, expert, model, probes, randomness
from soma_jax.config import Stage
from soma_jax.progress import console

flags.DEFINE_integer("width", 32, "d", 1)
flags.DEFINE_integer("sequences", 8, "windows a direction sees", 1)
flags.DEFINE_enum("probe", "sparse", list(probes.LAWS), "law of a direction")
flags.DEFINE_integer("repeats", 15, "timed runs of each part", 1)
flags.DEFINE_bool("json", False, "print one line of JSON")


def parts(body, head):
    """name -> (function of activations [T, B, d], its operations a byte), one block of the model.

    `body` may be perturbed; a part is what the model does with it, by the model's own functions.
    """
    block, d = body["blocks"][0], body["final_gain"].shape[-1]
    state = lambda x: (jnp.zeros(x.shape[1:]),) * 2  # noqa: E731

    def mlp_products(x):
        hidden = x @ block["mlp_in"]
        return hidden @ block["mlp_out"]

    def loss(x):
        logits = x[..., : head.shape[1]] @ head.T
        return jax.nn.logsumexp(logits, axis=-1) - logits[..., 0]

    def lstm_products(x):
        inputs = x @ block["lstm_input"]
        step = lambda h, i: ((i + h @ block["lstm_recurrent"])[..., :d],) * 2  # noqa: E731
        return lax.scan(step, jnp.zeros(x.shape[1:]), inputs)[1]

    return {
        "LayerNorm": (lambda x: model.layer_norm(x, block["lstm_gain"]), 0),
        "LSTM": (lambda x: model.lstm(block, x, state(x))[0], 16 * d**2),
        "LSTM, its products alone": (lstm_products, 16 * d**2),
        "LSTM, its 5 d tanh alone": (lambda x: jnp.tanh(x[..., None] * jnp.arange(1.0, 6.0)), 0),
        "MLP": (lambda x: model.gelu(x @ block["mlp_in"]) @ block["mlp_out"], 16 * d**2),
        "MLP, its products alone": (mlp_products, 16 * d**2),
        "decoder and loss": (loss, 2 * head.size),
        "decoder, its product alone": (lambda x: x[..., : head.shape[1]] @ head.T, 2 * head.size),
    }


_PER_FORWARD = {"LayerNorm": "2 D + 1", "LSTM": "D", "MLP": "D", "decoder and loss": "1"}


def nanoseconds(name: str, shape: model.ExpertConfig, stage: Stage) -> float:
    """Core-nanoseconds of a part for one byte-forward, on all devices at once."""
    params = model.init(randomness.key(0, "init"), shape)
    chunk, block = expert.chunk_and_block(stage)
    law, devices = probes.LAWS[stage.probe], len(jax.devices())
    repeats = max(1, 2**15 // (2 * chunk * block * stage.sequences))

    def perturbed(j, sign, x):
        z = law(jax.random.key(0), j, params["body"])
        body = jax.tree.map(lambda p, z: p + sign * 1e-3 * z, params["body"], z)
        return parts(body, params["head"])[name][0](x)

    def run(x):  # [1, 2, chunk, 2, T, B, d]: two blocks in turn, which stay in cache
        of_block = jax.vmap(
            lambda j, x: jax.vmap(lambda sign, x: perturbed(j, sign, x))(jnp.array([1.0, -1.0]), x)
        )

        def repeat(i):
            # All of it is computed, and one number of it looked at.
            return lax.optimization_barrier(of_block(jnp.arange(chunk), x[0, i % 2])).ravel()[0]

        return lax.map(repeat, jnp.arange(repeats))[None]

    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    rng = np.random.default_rng(0)
    size = (devices, 2, chunk, 2, block, stage.sequences, shape.width)
    x = jax.device_put(
        rng.normal(size=size).astype(np.float32), jax.sharding.NamedSharding(mesh, P("x"))
    )
    seconds = median_seconds(lambda: run(x), flags.FLAGS.repeats)
    return seconds / (repeats * chunk * 2 * block * stage.sequences) * 1e9


def main() -> None:
    f = flags.FLAGS
    cli.use_host_devices(0)
    shape = model.ExpertConfig(width=f.width)
    stage = Stage(sequences=f.sequences, probe=f.probe)
    params = model.init(randomness.key(0, "init"), shape)
    rows = {}
    for name, (_, operations) in parts(params["body"], params["head"]).items():
        rows[name] = {"ns": nanoseconds(name, shape, stage), "operations": operations}
    peak = matmul_peak() / len(jax.devices())  # of a core, GFLOP/s
    for row in rows.values():
        row["fraction_of_peak"] = row["operations"] / row["ns"] / peak
    if f.json:
        print(json.dumps({"parts": rows, "peak_gflops_of_a_core": peak, "jax": jax.__version__}))
        return
    table = Table(
        title=f"d = {f.width}, {f.probe} directions; a core's matmul peak: {peak:.0f} GFLOP/s"
    )
    for heading in (
        "part",
        "core-ns for a byte",
        "operations",
        "of the peak",
        "times in a forward",
    ):
        table.add_column(heading, justify="left" if heading == "part" else "right")
    for name, row in rows.items():
        share = f"{row['fraction_of_peak']:.0%}" if row["operations"] else ""
        times = _PER_FORWARD.get(name, "")
        table.add_row(name, f"{row['ns']:.0f}", f"{row['operations']:,}", share, times)
    console.print(table)


if __name__ == "__main__":
    cli.run(main)
