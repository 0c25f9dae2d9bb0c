"""The two products of a block of keys: Algorithm 1, lines 8 and 10."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_fa2.backends.common.primitives import layouts, thread_values
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.backends.sm80.forward.softmax import Softmax
from pallas_fa2.backends.sm80.primitives import mma

Terms = list[jax.Array]  # of a left operand


def out_panels(config: ForwardConfig) -> list[Any]:
    """Return the columns of O that are computed at once."""
    return layouts.slices(config.value_dim, config.out_panel)


def zero_out(config: ForwardConfig) -> list[jax.Array]:
    """Return O of 64 rows before the first block of keys."""
    return [thread_values.zero_accumulator((64, x.size)) for x in out_panels(config)]


def multiply_queries(
    config: ForwardConfig, query_fragments: Callable[[int, Any], list[Terms]], k: Any
) -> list[jax.Array]:
    """Return Q K^T of each tile of rows, `[64, block_kv]`, not scaled.

    `query_fragments(i, columns)` returns the terms of each tile in the i-th panel of columns.
    """
    terms = config.terms
    sums = mma.zero_sums(terms, config.row_tiles, (64, config.block_kv))
    for i, columns in enumerate(mma.panel_slices(k, terms)):
        lefts = query_fragments(i, columns)
        slices = mma.term_slices(k, columns, terms)
        rights = [mma.load_right(k.at[:, x], transposed=True) for x in slices]
        sums = mma.add_products(sums, lefts, rights)
    return mma.total(sums)


def add_values(
    config: ForwardConfig, updates: list[tuple[Terms, Softmax]], v: Any
) -> list[Softmax]:
    """Return the states with P V added to O of each tile of rows, which share the fragments of V."""
    terms, panels = config.terms, []
    for i, columns in enumerate(out_panels(config)):
        # Tensor cores round sums toward zero (M. Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021). A
        # split P V is added to O by other units, which round to nearest.
        outs = [state.out[i] for _, state in updates]
        sums = [outs]
        if config.is_split:
            sums = mma.zero_sums(terms, len(updates), (64, columns.size))
        slices = mma.term_slices(v, columns, terms)
        for start in range(0, config.block_kv, mma.K_STEP):
            rows = pl.ds(start, mma.K_STEP)
            rights = [mma.load_right(v.at[rows, x]) for x in slices]
            lefts = [[x[:, start : start + mma.K_STEP] for x in p] for p, _ in updates]
            sums = mma.add_products(sums, lefts, rights)
        products = mma.total(sums)
        if config.is_split:
            products = [out + pv for out, pv in zip(outs, products, strict=True)]
        panels.append(products)
    outs = zip(*panels, strict=True)
    return [s._replace(out=list(out)) for (_, s), out in zip(updates, outs, strict=True)]
