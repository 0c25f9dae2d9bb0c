"""Comparisons of integers, with the fewest instructions for an element.

Every element has a difference to compare in `q.index - k.index <= 128`; in `k.index >= q.index - 128` one
number a row is enough. `abs(q.index - k.index) <= 9` is two of these. And `k <= a and k <= b` is
`k <= min(a, b)`, one comparison instead of two.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.ir.tile_values import ColumnBound, RowPlusColumn, TargetOps, TileValue, bind

FLIPPED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq", "ne": "ne"}
INT32_MAX = 2**31 - 1
# A number up to this and an index may be added or subtracted (`Value.of_index`).
MAX_SUM = 2**30
_PRIMITIVES = {
    "le": lax.le_p, "ge": lax.ge_p, "lt": lax.lt_p, "gt": lax.gt_p, "eq": lax.eq_p, "ne": lax.ne_p,
}  # fmt: skip
_KINDS: dict[str, Literal["low", "high"]] = {"le": "high", "lt": "high", "ge": "low", "gt": "low"}


@dataclasses.dataclass(frozen=True)
class ComparisonSimplifier:
    """On a tile."""

    shape: tuple[int, ...]
    ops: TargetOps

    def compare(self, name: str, x: TileValue, y: TileValue) -> TileValue:
        """x `name` y, of int32."""
        if y.abs_of is not None:
            x, name, y = y, FLIPPED[name], x
        if x.abs_of is not None and name in ("le", "lt") and y.axes in ((), (0,)):
            y = self._clipped(y, x.max_abs)
            below = self._bind(lax.neg_p, y)._replace(max_abs=y.max_abs)
            return self.and_(
                self.compare(name, x.abs_of, y), self.compare(FLIPPED[name], x.abs_of, below)
            )
        if not _comes_apart(x, y):
            x, name, y = y, FLIPPED[name], x
        if x.affine is not None and _comes_apart(x, y):
            x, name, y = self._isolate_column(x, x.affine, name, y)
        if x.axes == (0,) or y.axes == (1,):
            x, name, y = y, FLIPPED[name], x
        is_limit = x.axes == (1,) and y.axes in ((), (0,)) and name in _KINDS
        if is_limit and min(x.max_abs, y.max_abs) < INT32_MAX:
            return self._as_bound(x, name, y)
        return self._compare(x, name, y)

    def and_(self, x: TileValue, y: TileValue) -> TileValue:
        """x and y."""
        if (found := _limits_and_truth(x, y)) is not None:
            (first, *rest), truth = found
            return self._all([self._where(truth, first, to_be=True), *rest])
        if not (x.bounds and y.bounds):
            return self._and(x, y)
        limits = [*x.bounds]
        for limit in y.bounds:
            same = [i for i, other in enumerate(limits) if _are_alike(limit, other)]
            if same:
                narrower = lax.max_p if limit.kind == "low" else lax.min_p
                limits[same[0]] = self._merge(narrower, limits[same[0]], limit)
            else:
                limits.append(limit)
        if len(limits) < len(x.bounds) + len(y.bounds):
            return self._all(limits)
        return self._and(x, y)._replace(bounds=tuple(limits))

    def or_(self, x: TileValue, y: TileValue) -> TileValue | None:
        """x or y, if it is one comparison."""
        found = _limits_and_truth(x, y)
        if found is not None and len(found[0]) == 1:
            (limit,), truth = found
            return self._all([self._where(truth, limit, to_be=False)])
        if len(x.bounds) == len(y.bounds) == 1 and _are_alike(x.bounds[0], y.bounds[0]):
            wider = lax.min_p if x.bounds[0].kind == "low" else lax.max_p
            return self._all([self._merge(wider, x.bounds[0], y.bounds[0])])
        return None

    def _isolate_column(
        self, x: TileValue, sum: RowPlusColumn, name: str, y: TileValue
    ) -> tuple[TileValue, str, TileValue]:
        """The same comparison with what varies over columns alone on one side."""
        y = self._clipped(y, x.max_abs)
        if y.axes == (1,):
            rest = self._apply(lax.sub_p if sum.sign > 0 else lax.add_p, y, sum.column)
            return rest, FLIPPED[name], sum.row
        if sum.sign > 0:
            return sum.column, name, self._apply(lax.sub_p, y, sum.row)
        return sum.column, FLIPPED[name], self._apply(lax.sub_p, sum.row, y)

    def _as_bound(self, column: TileValue, name: str, number: TileValue) -> TileValue:
        if number.max_abs >= INT32_MAX or (number.max_abs > MAX_SUM > column.max_abs):
            number = self._clipped(number, column.max_abs)
        if name == "lt":
            number = self._apply(lax.sub_p, number, _ONE)
        if name == "gt":
            number = self._apply(lax.add_p, number, _ONE)
        return self._all([ColumnBound(column, _KINDS[name], number)])

    def _where(self, truth: TileValue, limit: ColumnBound, to_be: bool) -> ColumnBound:
        """The limit of rows of which the truth is `to_be`; if True, no column of others is within, else all."""
        far = TileValue(np.int32(MAX_SUM if (limit.kind == "low") == to_be else -MAX_SUM))
        cases = (far, limit.bound) if to_be else (limit.bound, far)
        number = self._bind(lax.select_n_p, truth, *cases)
        return limit._replace(bound=number._replace(max_abs=float(MAX_SUM)))

    def _all(self, limits: Sequence[ColumnBound]) -> TileValue:
        def compare(limit: ColumnBound) -> TileValue:
            return self._compare(limit.column, "ge" if limit.kind == "low" else "le", limit.bound)

        found = functools.reduce(self._and, map(compare, limits))
        return found._replace(bounds=tuple(limits))

    def _merge(self, primitive: Any, x: ColumnBound, y: ColumnBound) -> ColumnBound:
        return x._replace(bound=self._apply(primitive, x.bound, y.bound))

    def _clipped(self, x: TileValue, most: float) -> TileValue:
        """What compares alike with numbers of size `most`, and may be added to them."""
        limit = np.int32(most + 1)
        if x.max_abs <= limit:
            return x
        xp = np if isinstance(x.array, np.ndarray) else jnp
        return TileValue(xp.clip(x.array, -limit, limit), x.axes, max_abs=float(limit))

    def _apply(self, primitive: Any, x: TileValue, y: TileValue) -> TileValue:
        return self._bind(primitive, x, y)._replace(max_abs=x.max_abs + y.max_abs)

    def _compare(self, x: TileValue, name: str, y: TileValue) -> TileValue:
        return self._bind(_PRIMITIVES[name], x, y)

    def _and(self, x: TileValue, y: TileValue) -> TileValue:
        return self._bind(lax.and_p, x, y)

    def _bind(self, primitive: Any, *values: TileValue) -> TileValue:
        return bind(primitive, values, self.shape, self.ops)


def _limits_and_truth(x: TileValue, y: TileValue) -> tuple[Sequence[ColumnBound], TileValue] | None:
    """The limits of one, of which the first is of numbers that never come near `SAFE`, as indices; and the
    other, if it is a truth of each row."""
    for one, other in ((x, y), (y, x)):
        if one.bounds and one.bounds[0].column.max_abs < MAX_SUM and other.axes in ((), (0,)):
            return one.bounds, other
    return None


def _comes_apart(x: TileValue, y: TileValue) -> bool:
    """Whether x is a sum, and compares with y as its number of columns with one of rows. Where it varies
    over columns alone, that is for a y that does not."""
    return x.affine is not None and len(y.axes) < 2 and (x.axes == (0, 1) or y.axes != (1,))


_ONE = TileValue(np.int32(1), max_abs=1.0)


def _are_alike(x: ColumnBound, y: ColumnBound) -> bool:
    return x.column.array is y.column.array and x.kind == y.kind


def with_sum(found: TileValue, name: str, x: TileValue, y: TileValue) -> TileValue:
    """The sum or difference, with the numbers that it consists of."""
    if (x.axes, y.axes) not in (((0,), (1,)), ((1,), (0,)), ((), (1,)), ((1,), ())):
        return found
    sign_of_y = -1 if name == "sub" else 1
    if y.axes == (1,):
        return found._replace(affine=RowPlusColumn(x, y, sign_of_y))
    row = y if sign_of_y > 0 else TileValue(-y.array, y.axes, max_abs=y.max_abs)
    return found._replace(affine=RowPlusColumn(row, x, 1))
