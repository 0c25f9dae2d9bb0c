"""Swizzled shared memory in panels of columns, as TMA fills it and WGMMA reads it."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SWIZZLE_ROWS = 8  # rows of a tile
SWIZZLE_BYTES = 128  # bytes, of the widest panel


def panel_width(columns: int, dim: int, dtype: Any, whole: bool = False) -> int:
    """How many columns lie side by side in shared memory, where a row has `columns`, and `dim` in device
    memory: as many as fill whole panels of both, or of shared memory if a row is shorter than a panel.

    Panels of 32 bytes are too narrow for TMA, and odd multiples of 8 from 72 on fill none. Then it is
    the most that shared memory has: of the last panel, columns are missing. Unless those are 128 bytes,
    that is slower yet (`cut_narrow`); and where one warpgroup loads and multiplies (`whole`).
    """
    each = columns // 2 if columns > 128 else columns  # beyond, two CTAs have half of a row each
    size = jnp.dtype(dtype).itemsize
    widths = [n // size for n in (SWIZZLE_BYTES, 64, 32) if each % (n // size) == 0]
    width = next((n for n in widths if dim <= n or dim % n == 0), None)
    if width is None or (width * size == 32 and widths[0] * size == SWIZZLE_BYTES and not whole):
        return widths[0]
    return width


def has_partial_panel(dim: int, width: int) -> bool:
    """Whether a row is no whole panels. One that is shorter than a panel is one."""
    return dim > width and dim % width != 0


def has_narrow_partial_panel(columns: int, dim: int) -> bool:
    """Whether rows of 16-bit numbers would be loaded 8 at a time, by cut panels of less than 128 bytes."""
    width = panel_width(columns, dim, jnp.float16)
    return has_partial_panel(dim, width) and 2 * width < SWIZZLE_BYTES


def tiles(width: int, dtype: Any) -> tuple[Any, ...]:
    """Tiles of 8 rows and a panel's columns, swizzled."""
    return (
        plgpu.TilingTransform((SWIZZLE_ROWS, width)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize),  # pyright: ignore[reportAbstractUsage]
    )


def swizzle_columns(buffer: Any) -> int:
    """How many columns of shared memory lie side by side: a swizzled line."""
    (tiling,) = (x.tiling for x in buffer.transforms if hasattr(x, "tiling"))
    return tiling[-1]


def panels(buffer: Any) -> list[Any]:
    """Its columns, a panel at a time."""
    width = swizzle_columns(buffer)
    return [buffer.at[:, pl.ds(start, width)] for start in range(0, buffer.shape[1], width)]


def as_operand(buffer: Any) -> Any:
    """The type with which inline code takes it as it lies."""
    return plgpu.RefType(tiles(swizzle_columns(buffer), buffer.dtype))
