"""Masks: which pairs of tokens attend to each other.

A mask is a pytree. Its arrays are leaves, its code and Python numbers are static, and it holds no
shape, so that one object works for any length. Masks compose with `&`, `|` and `~`.
"""

from pallas_fa2.masks.base import Dense, FunctionMask, Mask, as_mask, mask_fn
from pallas_fa2.masks.documents import Documents, Segments
from pallas_fa2.masks.positional import Causal, Chunked, Lengths, Prefix, SlidingWindow, Window
from pallas_fa2.masks.tree import Tree

__all__ = [
    "Causal", "Chunked", "Dense", "Documents", "FunctionMask", "Lengths", "Mask", "Prefix", "Segments",
    "SlidingWindow", "Tree", "Window", "as_mask", "mask_fn",
]  # fmt: skip
