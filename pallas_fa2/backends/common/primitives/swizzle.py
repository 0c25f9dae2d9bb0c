"""Swizzled shared memory in panels of columns, as TMA or cp.async fills it, and WGMMA or ldmatrix reads it."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_fa2.backends.common.primitives.types import Ref, Scratch

SWIZZLE_ROWS = 8  # of a swizzle atom
SWIZZLE_BYTES = 128  # of a row of the widest panel


def panel_width(columns: int, dim: int, dtype: DTypeLike, whole: bool = False) -> int:
    """Return how many columns a panel has in shared memory, where a row has `columns`, and `dim` in device
    memory: as many as fill whole panels of both, or of shared memory if a row is shorter than a panel.

    Panels of 32 bytes are too narrow for TMA, and odd multiples of 8 from 72 on fill none. Then it is
    the most that shared memory has: of the last panel, columns are missing. Unless those are 128 bytes,
    that is slower yet (`has_narrow_partial_panel`); and where one warpgroup loads and multiplies (`whole`).
    """
    row = columns // 2 if columns > 128 else columns  # beyond, two CTAs have half of a row each
    size = jnp.dtype(dtype).itemsize
    widths = [n // size for n in (SWIZZLE_BYTES, 64, 32) if row % (n // size) == 0]
    width = next((n for n in widths if dim <= n or dim % n == 0), None)
    if width is None or (width * size == 32 and widths[0] * size == SWIZZLE_BYTES and not whole):
        return widths[0]
    return width


def has_partial_panel(dim: int, width: int) -> bool:
    """Return whether a row of `dim` columns ends within a panel. One that is shorter than a panel is one."""
    return dim > width and dim % width != 0


def has_narrow_partial_panel(columns: int, dim: int) -> bool:
    """Return whether rows of 16-bit elements would be loaded 8 at a time, by partial panels of less than 128 bytes."""
    width = panel_width(columns, dim, jnp.float16)
    return has_partial_panel(dim, width) and 2 * width < SWIZZLE_BYTES


def tiles(width: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """Return the transforms of memory in tiles of 8 rows and a panel's columns, swizzled."""
    return (
        plgpu.TilingTransform((SWIZZLE_ROWS, width)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize),  # pyright: ignore[reportAbstractUsage]
    )


def swizzle_columns(buffer: Ref) -> int:
    """Return how many columns a panel of a buffer has: a swizzled line."""
    (tiling,) = (x.tiling for x in buffer.transforms if hasattr(x, "tiling"))
    return tiling[-1]


def panels(buffer: Ref) -> list[Ref]:
    """Return views of a buffer's panels."""
    width = swizzle_columns(buffer)
    return [buffer.at[:, pl.ds(start, width)] for start in range(0, buffer.shape[1], width)]


def as_operand(buffer: Ref) -> plgpu.RefType:
    """Return the type of an operand of inline code that takes a buffer as its tiles."""
    return plgpu.RefType(tiles(swizzle_columns(buffer), buffer.dtype))


def swizzled_smem(*shape: int, dtype: DTypeLike, panel: int | None = None) -> Scratch:
    """Allocate shared memory for operands of products, in panels of so many columns, the widest if None. The
    operands of a product have the same."""
    width = panel or panel_width(shape[-1], shape[-1], dtype)
    assert width is not None, shape
    return plgpu.SMEM(shape, dtype, transforms=tiles(width, dtype))
