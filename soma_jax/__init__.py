"""soma_jax: byte-level language models trained with forward passes only."""

from __future__ import annotations

import os
import typing

if typing.TYPE_CHECKING:
    from soma_jax.pretrained import Pretrained

__version__ = "0.1.0"


def load(path: str | os.PathLike[str]) -> Pretrained:
    """A trained ensemble by the path of its workdir or released checkpoint, or the name of one that
    is shipped: see soma_jax/pretrained.py."""
    from soma_jax import pretrained  # importing soma_jax alone stays cheap

    return pretrained.load(path)
