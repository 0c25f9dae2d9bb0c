"""Exact attention for JAX on GPUs in Pallas. See `flash_attention`."""

from importlib import import_module as _import_module
from typing import Any as _Any

from pallas_fa2.api import flash_attention
from pallas_fa2.cached_api import CachedOptions, cached_attention
from pallas_fa2.cached_explanation import CachedExplanation
from pallas_fa2.caches import Cache, Packed, Pages
from pallas_fa2.device import Device
from pallas_fa2.distributed.context_parallel import context_parallel_attention
from pallas_fa2.distributed.zigzag import Zigzag, zigzag
from pallas_fa2.drop_in import dot_product_attention
from pallas_fa2.explanation import Explanation, explain
from pallas_fa2.fallback import FallbackWarning
from pallas_fa2.ir.tokens import Context, Token
from pallas_fa2.masks import (
    Causal,
    Chunked,
    Dense,
    Documents,
    Lengths,
    Mask,
    Prefix,
    Segments,
    SlidingWindow,
    Tree,
    Window,
    mask_fn,
)
from pallas_fa2.merging import merge
from pallas_fa2.options import Implementation, Options, Scores
from pallas_fa2.planning.autotune import Tuning, autotune
from pallas_fa2.planning.tuned import load_autotuned, save_autotuned
from pallas_fa2.scores import Score, alibi, bias, score_fn, soft_cap

__version__ = "0.1.0"

__all__ = [
    "Cache", "CachedExplanation", "CachedOptions", "Causal", "Chunked", "Context", "Dense", "Device", "Documents", "Explanation",
    "FallbackWarning", "Implementation", "Lengths", "Mask", "Options", "Packed", "Pages", "Prefix", "Score", "Scores",
    "Segments", "SlidingWindow", "Token", "Tree", "Tuning", "Window", "Zigzag", "alibi", "autotune", "bias",
    "cached_attention", "context_parallel_attention", "dot_product_attention", "explain", "flash_attention",
    "linen",  # pyright: ignore[reportUnsupportedDunderAll]
    "load_autotuned", "mask_fn", "merge",
    "nnx",  # pyright: ignore[reportUnsupportedDunderAll]
    "save_autotuned", "score_fn", "soft_cap", "zigzag",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> _Any:
    """Import `linen` or `nnx` on first use: the rest of the package does not need Flax."""
    if name in ("linen", "nnx"):
        try:
            return _import_module(f"pallas_fa2.flax.{name}")
        except ModuleNotFoundError as error:
            if error.name != "flax":
                raise
            needed = f"pallas_fa2.{name} needs Flax: pip install 'flax>=0.12'"
            raise ImportError(needed, name="flax") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
