"""What JAX's primitives compute, in NumPy: by name, a maker of functions of arrays from an equation's parameters.

Results have the dtype that JAX gives them, and each operation rounds to it. Sums and products of 16 bits are formed in
float32, as XLA and a GPU do. Division by zero, shifts by too much and conversions of what an integer cannot hold are
those of XLA. `tests/test_arithmetic.py` compares with it.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind in "fV"  # NumPy does not know what bfloat16 is


def _is_small_float(dtype: np.dtype) -> bool:
    return _is_float(dtype) and dtype.itemsize < 4


def _divide(x: Any, y: Any) -> Any:
    if _is_float(x.dtype):
        return np.divide(x, y)
    if x.ndim == y.ndim == 0 and y > 0:  # as places in memory are
        quotient = abs(int(x)) // int(y)
        return x.dtype.type(-quotient if x < 0 else quotient)
    found = (x - np.fmod(x, y)) // y
    return np.where(y == 0, np.invert(x.dtype.type(0)), found)


def _remainder(x: Any, y: Any) -> Any:
    if _is_float(x.dtype):
        return np.fmod(x, y)
    if x.ndim == y.ndim == 0 and y > 0:
        rest = abs(int(x)) % int(y)
        return x.dtype.type(-rest if x < 0 else rest)
    return np.where(y == 0, x, np.fmod(x, y))


def _integer_power(y: int, **_: Any) -> Function:
    def power(x: Any) -> Any:
        found = functools.reduce(np.multiply, [x] * abs(y)) if y else np.ones_like(x)
        return np.divide(x.dtype.type(1), found) if y < 0 else found

    return power


def _shift_right_logical(x: Any, y: Any) -> Any:
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return (x.view(unsigned) >> y.view(unsigned)).view(x.dtype)


def _convert(new_dtype: Any, **_: Any) -> Function:
    def convert(x: Any) -> Any:
        if new_dtype.kind in "iu" and _is_float(x.dtype):
            limits = np.iinfo(new_dtype)
            x = np.clip(
                np.nan_to_num(np.float64(x), nan=0.0, posinf=2.0**64), limits.min, limits.max
            )
        return x.astype(new_dtype)

    new_dtype = np.dtype(new_dtype)
    return convert


def _bitcast(new_dtype: Any, **_: Any) -> Function:
    def bitcast(x: Any) -> Any:
        if x.dtype.itemsize != new_dtype.itemsize:
            raise NotImplementedError(f"{x.dtype} as {new_dtype}")
        return x.view(new_dtype)

    new_dtype = np.dtype(new_dtype)
    return bitcast


def _select(**_: Any) -> Function:
    def select(which: Any, *cases: Any) -> Any:
        if which.ndim == 0:
            return cases[int(which)]
        if which.dtype == bool:
            return np.where(which, cases[1], cases[0])
        return np.choose(which, cases)

    return select


def _broadcast(shape: Any, broadcast_dimensions: Any, **_: Any) -> Function:
    def broadcast(x: Any, *dynamic: Any) -> Any:
        if x.ndim == 0:
            return np.full(shape, x)
        ones = [1] * len(shape)
        for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
            ones[axis] = size
        return np.broadcast_to(x.reshape(ones), shape)

    return broadcast


def _iota(dtype: Any, shape: Any, dimension: int, **_: Any) -> Function:
    places = [size if axis == dimension else 1 for axis, size in enumerate(shape)]
    numbers = np.arange(shape[dimension], dtype=dtype).reshape(places)
    return lambda: np.broadcast_to(numbers, shape)


def _slice(start_indices: Any, limit_indices: Any, strides: Any) -> Function:
    strides = strides or [1] * len(start_indices)
    window = tuple(map(slice, start_indices, limit_indices, strides))
    return lambda x: x[window]


def _window(x: Any, sizes: Any, starts: Any) -> tuple[slice, ...]:
    """Moved inside, as XLA does."""
    clipped = [
        min(max(int(start), 0), n - size)
        for start, n, size in zip(starts, x.shape, sizes, strict=True)
    ]
    return tuple(slice(start, start + size) for start, size in zip(clipped, sizes, strict=True))


def _dynamic_slice(slice_sizes: Any, **_: Any) -> Function:
    return lambda x, *starts: x[_window(x, slice_sizes, starts)]


def _dynamic_update_slice(**_: Any) -> Function:
    def update(x: Any, value: Any, *starts: Any) -> Any:
        x = x.copy()
        x[_window(x, value.shape, starts)] = value
        return x

    return update


def _pad(padding_config: Any) -> Function:
    def pad(x: Any, value: Any) -> Any:
        if any(inner or min(low, high) < 0 for low, high, inner in padding_config):
            raise NotImplementedError(f"padding {padding_config}")
        shape = [n + low + high for n, (low, high, _) in zip(x.shape, padding_config, strict=True)]
        found = np.full(shape, value, x.dtype)
        where = zip(x.shape, padding_config, strict=True)
        found[tuple(slice(low, low + n) for n, (low, *_) in where)] = x
        return found

    return pad


def _reduction(reduce: Function, wide: bool = False) -> Function:
    def make(axes: Any, **_: Any) -> Function:
        def of(x: Any) -> Any:
            widened = np.float32(x) if wide and _is_small_float(x.dtype) else x
            return reduce(widened, axis=tuple(axes)).astype(x.dtype)

        return of

    return make


def _position(find: Function) -> Function:
    def make(axes: Any, index_dtype: Any, **_: Any) -> Function:
        return lambda x: find(x, axis=axes[0]).astype(index_dtype)

    return make


def _running(accumulate: Function) -> Function:
    def make(axis: int, reverse: bool) -> Function:
        def of(x: Any) -> Any:
            found = accumulate(np.flip(x, axis) if reverse else x, axis=axis, dtype=x.dtype)
            return np.flip(found, axis) if reverse else found

        return of

    return make


def _product(dimension_numbers: Any, preferred_element_type: Any, **_: Any) -> Function:
    (left, right), (left_batch, right_batch) = dimension_numbers

    def product(x: Any, y: Any) -> Any:
        dtype = np.dtype(preferred_element_type or x.dtype)
        if _is_small_float(x.dtype):
            x, y = np.float32(x), np.float32(y)

        def as_matrices(z: Any, batch: Any, summed: Any, rows_first: bool) -> tuple:
            kept = [axis for axis in range(z.ndim) if axis not in (*batch, *summed)]
            order = (*batch, *kept, *summed) if rows_first else (*batch, *summed, *kept)
            sizes = [int(np.prod([z.shape[a] for a in axes])) for axes in (batch, kept, summed)]
            outer, rows, inner = sizes
            shape = (outer, rows, inner) if rows_first else (outer, inner, rows)
            return z.transpose(order).reshape(shape), [z.shape[axis] for axis in kept]

        (a, rows), (b, columns) = (
            as_matrices(x, left_batch, left, True),
            as_matrices(y, right_batch, right, False),
        )
        batch = [x.shape[axis] for axis in left_batch]
        return np.matmul(a, b).reshape((*batch, *rows, *columns)).astype(dtype)

    return product


def _round(rounding_method: Any) -> Function:
    if rounding_method.name == "TO_NEAREST_EVEN":
        return np.rint
    return lambda x: np.trunc(x + np.copysign(x.dtype.type(0.5), x))


def _plain(function: Function) -> Function:
    return lambda **_: function


# Those of which nothing but the arrays matters.
PLAIN: dict[str, Function] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "ceil": np.ceil,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "cos": np.cos,
    "div": _divide,
    "eq": np.equal,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "logistic": lambda x: np.divide(x.dtype.type(1), 1 + np.exp(-x)),
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "rem": _remainder,
    "rsqrt": lambda x: np.divide(x.dtype.type(1), np.sqrt(x)),
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "shift_right_logical": _shift_right_logical,
    "sign": np.sign,
    "sin": np.sin,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tanh": np.tanh,
    "xor": np.bitwise_xor,
}

FUNCTIONS: dict[str, Function] = {
    **{name: _plain(function) for name, function in PLAIN.items()},
    "argmax": _position(np.argmax),
    "argmin": _position(np.argmin),
    "bitcast_convert_type": _bitcast,
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda dimension: lambda *arrays: np.concatenate(arrays, dimension),
    "convert_element_type": _convert,
    "cumsum": _running(np.cumsum),
    "dot_general": _product,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "integer_pow": _integer_power,
    "iota": _iota,
    "pad": _pad,
    "reduce_and": _reduction(np.logical_and.reduce),
    "reduce_max": _reduction(np.max),
    "reduce_min": _reduction(np.min),
    "reduce_or": _reduction(np.logical_or.reduce),
    "reduce_prod": _reduction(np.prod, wide=True),
    "reduce_sum": _reduction(np.sum, wide=True),
    "reshape": lambda new_sizes, **_: lambda x, *dynamic: x.reshape(new_sizes),
    "rev": lambda dimensions: lambda x: np.flip(x, dimensions),
    "round": _round,
    "select_n": _select,
    "slice": _slice,
    "squeeze": lambda dimensions: lambda x: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda permutation: lambda x: x.transpose(permutation),
}
