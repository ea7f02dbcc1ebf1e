"""Tests run on the CPU, split into four devices so that placement can be tested anywhere."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["MPLBACKEND"] = "Agg"

import jax

jax.config.update("jax_num_cpu_devices", 4)
