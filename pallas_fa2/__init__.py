"""Exact attention for JAX on GPUs, written in Pallas. See `flash_attention`."""

import importlib
from types import ModuleType

from pallas_fa2.api import (
    Explanation as Explanation,
)
from pallas_fa2.api import (
    dot_product_attention as dot_product_attention,
)
from pallas_fa2.api import (
    explain as explain,
)
from pallas_fa2.api import (
    flash_attention as flash_attention,
)
from pallas_fa2.masks import (
    Causal as Causal,
)
from pallas_fa2.masks import (
    Chunked as Chunked,
)
from pallas_fa2.masks import (
    Dense as Dense,
)
from pallas_fa2.masks import (
    Documents as Documents,
)
from pallas_fa2.masks import (
    Lengths as Lengths,
)
from pallas_fa2.masks import (
    Mask as Mask,
)
from pallas_fa2.masks import (
    Prefix as Prefix,
)
from pallas_fa2.masks import (
    Segments as Segments,
)
from pallas_fa2.masks import (
    Window as Window,
)
from pallas_fa2.masks import (
    mask_fn as mask_fn,
)
from pallas_fa2.scores import (
    Score as Score,
)
from pallas_fa2.scores import (
    alibi as alibi,
)
from pallas_fa2.scores import (
    bias as bias,
)
from pallas_fa2.scores import (
    score_fn as score_fn,
)
from pallas_fa2.scores import (
    soft_cap as soft_cap,
)
from pallas_fa2.tuning import (
    autotune as autotune,
)

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`linen` and `nnx`, on first use: the rest does without Flax."""
    if name in ("linen", "nnx"):
        return importlib.import_module(f"pallas_fa2.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
