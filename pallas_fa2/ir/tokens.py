"""Token and Context, the arguments of mask and score functions."""

from collections.abc import Mapping
from typing import Any

Arrays = Mapping[str, Any]


class TokenMisuse(TypeError):
    """A token is used as if it were its position."""


class Token:
    """A token in a mask or score function: `index`, `length` and the declared fields.

    `index` is its int32 position in the sequence, `length` the number of tokens on its side, a Python integer.
    """

    def __init__(self, side: str, index: Any, length: int, fields: Arrays):
        self.index = index
        self.length = length
        self._side = side
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            known = ", ".join(["index", "length", *self._fields])
            raise AttributeError(
                f"{self._side}.{name}: no such token data (it has {known}); declare it with "
                f"tokens={{'{name}': array}} where the mask or score is made"
            )
        return self._fields[name]

    def _is_no_number(self, *_: Any) -> Any:
        raise TokenMisuse(
            f"{self._side} is a token, which has no value of its own; write {self._side}.index for its "
            "position, as in q.index >= k.index"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _is_no_number  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = (
        _is_no_number
    )
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _is_no_number
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _is_no_number
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __abs__ = __neg__ = __pos__ = (
        _is_no_number
    )
    __int__ = __float__ = __index__ = __len__ = __iter__ = __array__ = _is_no_number
    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Context:
    """The data of a mask or score that does not belong to one token: heads, entries, params and pairs."""

    def __init__(self, fields: Arrays):
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            known = ", ".join(self._fields) or "nothing"
            raise AttributeError(
                f"c.{name}: no such data (there is {known}); declare it with heads=, params= or "
                "pairs= where the mask or score is made"
            )
        return self._fields[name]
