"""soma_jax: byte-level language models trained with forward passes only."""

__version__ = "0.1.0"
