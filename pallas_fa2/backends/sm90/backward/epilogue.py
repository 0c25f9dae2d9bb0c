"""Stores dK and dV of a tile, line 18, through the buffers of its last Q and dO, one for each consumer warpgroup."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.sm90.backward.config import QUERY_PANEL
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile
from pallas_fa2.backends.sm90.backward.transposed_consumer import TransposedConsumer
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.control_flow import cond, rematerialize


class Gradient(NamedTuple):
    """A gradient of a warpgroup's 64 keys, and the arrays of its terms."""

    targets: list[Ref]
    value: jax.Array  # float32 [64, H]


def scaled(gradient: jax.Array, scale: float) -> jax.Array:
    """Return the gradient times a scale, which often is 1."""
    return gradient if scale == 1.0 else gradient * scale


def store_gradients(consumer: TransposedConsumer, tile: KvTile, *gradients: Gradient) -> None:
    """Store the gradients of a consumer's keys, and release its last Q or dO."""
    memory, warpgroup = consumer.memory, consumer.warpgroup
    batch, head, _ = tile.compute_coordinates()
    last_step = tile.compute_next_step() - 1
    keys = pl.ds(consumer.cta.compute_first_key(tile) + consumer.keys.start, 64)
    pipeline.arrive_and_wait(memory.tile_end)  # nobody reads Q and dO any more
    store = functools.partial(_store_through, last_step, (batch, keys, head), gradients)
    if isinstance(warpgroup, int):
        store(memory.row_pipelines[warpgroup])
    else:
        cond(warpgroup == 0, *(functools.partial(store, x) for x in memory.row_pipelines))
    consumer.release_rows(warpgroup, last_step)


class _Term(NamedTuple):
    """A 16-bit term of a gradient: where it goes, and its columns from one on."""

    target: Ref
    panel: Callable[[int], jax.Array]


def _store_through(
    last_step: Scalar,
    rows: tuple[Scalar, pl.Slice, Scalar],
    gradients: tuple[Gradient, ...],
    pipeline: Pipeline,
) -> None:
    """Store gradients through the buffer of the last step of a pipeline, 64 rows each at a time."""
    batch, keys, head = rows
    buffer, _ = pipeline.buffers_at(last_step)
    tiles = buffer.shape[0] // 64
    terms = [term for gradient in gradients for term in _terms(*gradient)]
    for i, term in enumerate(terms):
        tile = buffer.at[pl.ds(64 * (i % tiles), 64)]
        if i and i % tiles == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        # By panels, as dS: their addresses differ by constants, and hold fewer registers.
        for start in range(0, tile.shape[1], QUERY_PANEL):
            panel = term.panel(start)
            tile.at[:, pl.ds(start, panel.shape[1])][...] = panel
        plgpu.commit_smem()
        HeadRows(term.target, batch, keys, head, in_row_groups=True).store(tile)
        plgpu.commit_smem_to_gmem_group()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _terms(targets: list[Ref], gradient: jax.Array) -> list[_Term]:
    """Return the gradient as rounded to 16 bits, and if there are two targets what is rounded off."""
    dtype = targets[0].dtype

    def rounded(start: int) -> jax.Array:
        return gradient[:, start : start + QUERY_PANEL].astype(dtype)

    def rounded_off(start: int) -> jax.Array:
        # rounded once more: LLVM would keep what was rounded before in registers
        panel = rematerialize(gradient[:, start : start + QUERY_PANEL])
        return (panel - panel.astype(dtype).astype(jnp.float32)).astype(dtype)

    return [_Term(*x) for x in zip(targets, (rounded, rounded_off), strict=False)]
