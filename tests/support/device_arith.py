"""MLIR's `arith` for code that all threads of a warpgroup run together here: values are NumPy arrays of them."""

import types
from typing import Any

import numpy as np
import pytest

THREAD = np.arange(128)

_PREDICATES = {
    "eq": np.equal,
    "ne": np.not_equal,
    "sge": np.greater_equal,
    "sgt": np.greater,
    "sle": np.less_equal,
    "slt": np.less,
    "ult": lambda x, y: x.view(np.uint32) < y,
}

# A right shift is that of its operand's dtype, signed or not.
ARITH = types.SimpleNamespace(
    addi=np.add,
    subi=np.subtract,
    muli=np.multiply,
    andi=np.bitwise_and,
    ori=np.bitwise_or,
    xori=np.bitwise_xor,
    shli=np.left_shift,
    shrsi=np.right_shift,
    shrui=np.right_shift,
    maxsi=np.maximum,
    maxui=np.maximum,  # of what is not negative
    minui=np.minimum,
    mulf=np.multiply,
    bitcast=lambda kind, value: value.view(kind),
    select=np.where,
    extui=lambda _, value: value,  # of what is not negative
    cmpi=lambda predicate, x, y: predicate(x, y),
    CmpIPredicate=types.SimpleNamespace(**_PREDICATES),
    constant=lambda _, value: value,
)


def emit_in_numpy(
    monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType, **fakes: Any
) -> None:
    """Have functions of modules compute in NumPy, for all threads, what they emit; with `fakes` for more of their
    names."""
    common = {
        "arith": ARITH,
        "i32": lambda value: value,
        "sum_i32": lambda *terms: sum(terms),
        "thread_field": lambda first, n, by: ((THREAD >> first) & ((1 << n) - 1)) * by,
    }
    for module in modules:
        for name, fake in (common | fakes).items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
