"""Which expert a text belongs to: features of text, balanced clusters, and the router."""

from soma_jax.routing.router import Router

__all__ = ["Router"]
