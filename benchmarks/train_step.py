"""Times one whole update: probes, 2 n_pert losses, estimate, delta rule, Adam.

python benchmarks/train_step.py [--experts=1 --width=32 --n_pert=64 --sequences=8 ...] [--json]

Prints byte-forwards per second, the arithmetic rate they amount to, the machine's own float32
matmul peak measured in the same process on the same devices, and their ratio: medians.
"""

import dataclasses
import json
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from threadpoolctl import threadpool_limits
from timing import matmul_peak, median_seconds

from soma_jax import cli, config, ensemble, expert, model, probes, randomness

flags.DEFINE_integer("experts", 1, "experts trained side by side", 1)
flags.DEFINE_integer("width", 32, "d", 1)
flags.DEFINE_integer("n_pert", 64, "directions an update", 1)
flags.DEFINE_integer("sequences", 8, "windows a direction sees", 1)
flags.DEFINE_integer("window", 256, "T, bytes a window predicts", 1)
flags.DEFINE_integer("head_sequences", 8, "windows of the delta rule; 0 freezes E", 0)
flags.DEFINE_enum("probe", "sparse", list(probes.LAWS), "law of a direction")
flags.DEFINE_float("whitening", 0.0, "damping of whitened directions; 0: none", 0.0)
flags.DEFINE_bool("own_batch", False, "each direction has its own windows")
flags.DEFINE_integer("chunk", 0, "directions evaluated at once; 0: what suits", 0)
flags.DEFINE_integer("updates", 7, "timed updates", 1)
flags.DEFINE_integer("host_devices", 0, "CPU devices; 0: one for each core", 0)
flags.DEFINE_bool("json", False, "print one line of JSON")


def main() -> None:
    f = flags.FLAGS
    cli.use_host_devices(f.host_devices)
    fields = ["n_pert", "probe", "sequences", "own_batch", "whitening", "window", "head_sequences"]
    stage = config.stage(
        dataclasses.asdict(config.Stage()) | {name: f[name].value for name in fields}, "flags"
    )
    shape = model.ExpertConfig(width=f.width)
    mesh = ensemble.make_mesh(f.experts, stage)
    compiled = ensemble.Ensemble(mesh, stage, chunk=f.chunk)
    params = model.init(randomness.key(0, "init"), shape)
    states = compiled.place(ensemble.stack([expert.init_state(params, stage)] * f.experts))
    keys = compiled.place(jnp.stack([randomness.key(0, "probes", i) for i in range(f.experts)]))
    rng = np.random.default_rng(0)
    windows = rng.integers(
        0, 256, (f.experts, stage.windows_per_update, stage.window + 1), dtype=np.uint8
    )
    batch = compiled.place_batch(expert.split_batch(windows, stage))

    start = time.perf_counter()
    update = compiled.update.lower(states, batch, keys).compile()
    compile_s = time.perf_counter() - start

    def step():
        nonlocal states
        states, losses = update(states, batch, keys)
        return states, losses

    with threadpool_limits(1, "blas"):  # as training does
        seconds = median_seconds(step, f.updates)
    rate = f.experts * stage.byte_forwards_per_update / seconds
    gflops = rate * shape.operations_per_byte / 1e9
    peak = matmul_peak()
    result = {
        "byte_forwards_per_s": rate,
        "seconds_per_update": seconds,
        "gflops": gflops,
        "peak_gflops": peak,
        "fraction_of_peak": gflops / peak,
        "compile_s": compile_s,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "mesh": dict(mesh.shape),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "settings": {k: f[k].value for k in (
            "experts", "width", "n_pert", "sequences", "window", "head_sequences", "probe",
            "own_batch", "chunk", "whitening",
        )},
    }  # fmt: skip
    if f.json:
        print(json.dumps(result))
        return
    print(f"{rate / 1e6:.3f}M byte-forwards/s ({seconds:.3f} s an update, mesh {result['mesh']})")
    print(f"{gflops:.1f} GFLOP/s of a matmul peak of {peak:.1f}: {gflops / peak:.0%}")
    print(f"compile {compile_s:.1f} s, peak memory {result['peak_rss_bytes'] / 2**20:.0f} MiB")


if __name__ == "__main__":
    cli.run(main)
