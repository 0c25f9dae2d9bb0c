"""Numbers of 8 bits as float16, in which float8_e4m3fn and int8 are exact."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_fa2.backends.common.inline import asm_words
from pallas_fa2.backends.common.primitives.types import MlirValue

IN_ORDER = 0, 1, 2, 3


def widen(dtype: DTypeLike) -> Callable[..., list[MlirValue]]:
    """Return what emits the two pairs of float16 of a word of four numbers, in an order of these."""
    return {"float8_e4m3fn": _widen_float8, "int8": _widen_int8}[jnp.dtype(dtype).name]


def _widen_float8(word: MlirValue, order: tuple[int, ...] = IN_ORDER) -> list[MlirValue]:
    selector = "".join(map(str, reversed(order)))
    permute = "" if order == IN_ORDER else f"prmt.b32 w, w, 0, 0x{selector};"
    code = (
        f"{{ .reg .b32 w; .reg .b16 a, b; mov.b32 w, $2; {permute} mov.b32 {{a, b}}, w; "
        "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
    )
    return asm_words(2, code, "r", word)


def _widen_int8(word: MlirValue, order: tuple[int, ...] = IN_ORDER) -> list[MlirValue]:
    """With 0x64 before a byte u, it is 1024 + u, and u is the integer plus 128."""
    a, b, c, d = order
    code = (
        "{ .reg .b32 w, k; xor.b32 w, $2, 0x80808080; "
        f"prmt.b32 $0, w, 0x64646464, 0x4{b}4{a}; prmt.b32 $1, w, 0x64646464, 0x4{d}4{c}; "
        "mov.b32 k, 0x64806480; sub.rn.f16x2 $0, $0, k; sub.rn.f16x2 $1, $1, k; }"
    )
    return asm_words(2, code, "r", word)
