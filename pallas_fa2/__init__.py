"""Exact attention for JAX on GPUs, written in Pallas. See `flash_attention`."""

import importlib
from types import ModuleType

from pallas_fa2.api import (
    Explanation as Explanation,
    dot_product_attention as dot_product_attention,
    explain as explain,
    flash_attention as flash_attention,
)
from pallas_fa2.masks import (
    Causal as Causal,
    Chunked as Chunked,
    Dense as Dense,
    Lengths as Lengths,
    Mask as Mask,
    Prefix as Prefix,
    Segments as Segments,
    Window as Window,
    mask_fn as mask_fn,
)
from pallas_fa2.scores import (
    Score as Score,
    alibi as alibi,
    bias as bias,
    score_fn as score_fn,
    soft_cap as soft_cap,
)

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`linen` and `nnx`, on first use: the rest does without Flax."""
    if name in ("linen", "nnx"):
        return importlib.import_module(f"pallas_fa2.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
