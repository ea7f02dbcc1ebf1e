"""Tests run on the CPU, split into four devices so that placement can be tested anywhere."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "Agg"

import jax

jax.config.update("jax_num_cpu_devices", 4)
# Many tests, and the processes they start, compile the same small programs.
_CACHE = tempfile.TemporaryDirectory(prefix="soma_jax_cache", ignore_cleanup_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
for option, value in (
    ("jax_persistent_cache_min_compile_time_secs", 0),
    ("jax_persistent_cache_min_entry_size_bytes", -1),
):
    jax.config.update(option, value)
    os.environ[option.upper()] = str(value)
