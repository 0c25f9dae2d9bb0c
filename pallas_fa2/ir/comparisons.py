"""Simplifies comparisons of integers on a tile to the fewest instructions for an element.

`q.index - k.index <= 128` takes a difference for each element, `k.index >= q.index - 128` one for each row.
`abs(q.index - k.index) <= 9` is two of the latter. And `k <= a and k <= b` is `k <= min(a, b)`, one comparison instead
of two.
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
# Up to this, the sum or difference of a value and an index (`TileValue.of_index`) fits int32.
MAX_SUM = 2**30
_PRIMITIVES = {
    "le": lax.le_p, "ge": lax.ge_p, "lt": lax.lt_p, "gt": lax.gt_p, "eq": lax.eq_p, "ne": lax.ne_p,
}  # fmt: skip
_KINDS: dict[str, Literal["low", "high"]] = {"le": "high", "lt": "high", "ge": "low", "gt": "low"}


@dataclasses.dataclass(frozen=True)
class ComparisonSimplifier:
    """Comparisons of int32 values, and their conjunctions and disjunctions, on a tile of this shape."""

    shape: tuple[int, ...]
    ops: TargetOps

    def compare(self, name: str, x: TileValue, y: TileValue) -> TileValue:
        """Compare x with y; `name` is the primitive's, such as "le"."""
        if y.abs_of is not None:
            x, name, y = y, FLIPPED[name], x
        if x.abs_of is not None and name in ("le", "lt") and y.axes in ((), (0,)):
            y = self._clipped(y, x.max_abs)
            lower = self._bind(lax.neg_p, y)._replace(max_abs=y.max_abs)
            return self.and_(
                self.compare(name, x.abs_of, y), self.compare(FLIPPED[name], x.abs_of, lower)
            )
        if not _is_separable(x, y):
            x, name, y = y, FLIPPED[name], x
        if x.affine is not None and _is_separable(x, y):
            x, name, y = self._isolate_column(x, x.affine, name, y)
        if x.axes == (0,) or y.axes == (1,):
            x, name, y = y, FLIPPED[name], x
        is_bound = x.axes == (1,) and y.axes in ((), (0,)) and name in _KINDS
        if is_bound and min(x.max_abs, y.max_abs) < INT32_MAX:
            return self._as_bound(x, name, y)
        return self._compare(x, name, y)

    def and_(self, x: TileValue, y: TileValue) -> TileValue:
        """Return x & y."""
        if (operands := _bounds_and_row_condition(x, y)) is not None:
            (first, *rest), condition = operands
            return self._all([self._select_rows(condition, first, rows=True), *rest])
        if not (x.bounds and y.bounds):
            return self._and(x, y)
        bounds = [*x.bounds]
        for bound in y.bounds:
            same = [i for i, x_bound in enumerate(bounds) if _same_side(bound, x_bound)]
            if same:
                narrower = lax.max_p if bound.kind == "low" else lax.min_p
                bounds[same[0]] = self._merge(narrower, bounds[same[0]], bound)
            else:
                bounds.append(bound)
        if len(bounds) < len(x.bounds) + len(y.bounds):
            return self._all(bounds)
        return self._and(x, y)._replace(bounds=tuple(bounds))

    def or_(self, x: TileValue, y: TileValue) -> TileValue | None:
        """Return x | y if it is one comparison, otherwise None."""
        operands = _bounds_and_row_condition(x, y)
        if operands is not None and len(operands[0]) == 1:
            (bound,), condition = operands
            return self._all([self._select_rows(condition, bound, rows=False)])
        if len(x.bounds) == len(y.bounds) == 1 and _same_side(x.bounds[0], y.bounds[0]):
            wider = lax.min_p if x.bounds[0].kind == "low" else lax.max_p
            return self._all([self._merge(wider, x.bounds[0], y.bounds[0])])
        return None

    def _isolate_column(
        self, x: TileValue, sum: RowPlusColumn, name: str, y: TileValue
    ) -> tuple[TileValue, str, TileValue]:
        """Rewrite a comparison with the term that varies over columns alone on one side."""
        y = self._clipped(y, x.max_abs)
        if y.axes == (1,):
            rest = self._apply(lax.sub_p if sum.sign > 0 else lax.add_p, y, sum.column)
            return rest, FLIPPED[name], sum.row
        if sum.sign > 0:
            return sum.column, name, self._apply(lax.sub_p, y, sum.row)
        return sum.column, FLIPPED[name], self._apply(lax.sub_p, sum.row, y)

    def _as_bound(self, column: TileValue, name: str, bound: TileValue) -> TileValue:
        if bound.max_abs >= INT32_MAX or (bound.max_abs > MAX_SUM > column.max_abs):
            bound = self._clipped(bound, column.max_abs)
        if name == "lt":
            bound = self._apply(lax.sub_p, bound, _ONE)
        if name == "gt":
            bound = self._apply(lax.add_p, bound, _ONE)
        return self._all([ColumnBound(column, _KINDS[name], bound)])

    def _select_rows(self, condition: TileValue, bound: ColumnBound, rows: bool) -> ColumnBound:
        """Keep the bound where the condition is `rows`; elsewhere no column satisfies it (if `rows`) or all do."""
        far = TileValue(np.int32(MAX_SUM if (bound.kind == "low") == rows else -MAX_SUM))
        cases = (far, bound.bound) if rows else (bound.bound, far)
        selected = self._bind(lax.select_n_p, condition, *cases)
        return bound._replace(bound=selected._replace(max_abs=float(MAX_SUM)))

    def _all(self, bounds: Sequence[ColumnBound]) -> TileValue:
        def compare(bound: ColumnBound) -> TileValue:
            return self._compare(bound.column, "ge" if bound.kind == "low" else "le", bound.bound)

        return functools.reduce(self._and, map(compare, bounds))._replace(bounds=tuple(bounds))

    def _merge(self, primitive: Any, x: ColumnBound, y: ColumnBound) -> ColumnBound:
        return x._replace(bound=self._apply(primitive, x.bound, y.bound))

    def _clipped(self, x: TileValue, max_abs: float) -> TileValue:
        """Clip x so that it compares the same with values up to `max_abs`, and their sum fits int32."""
        limit = np.int32(max_abs + 1)
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


def _bounds_and_row_condition(
    x: TileValue, y: TileValue
) -> tuple[Sequence[ColumnBound], TileValue] | None:
    """Return the bounds of one operand and the other one, which varies over rows alone, or None.

    The column of the first bound has values well below `MAX_SUM`, as indices have.
    """
    for bounded, condition in ((x, y), (y, x)):
        bounds = bounded.bounds
        if bounds and bounds[0].column.max_abs < MAX_SUM and condition.axes in ((), (0,)):
            return bounds, condition
    return None


def _is_separable(x: TileValue, y: TileValue) -> bool:
    """Return whether x is a sum whose column term alone can be compared, with y and the row term on the other side.

    If x varies over columns alone, y must not.
    """
    return x.affine is not None and len(y.axes) < 2 and (x.axes == (0, 1) or y.axes != (1,))


_ONE = TileValue(np.int32(1), max_abs=1.0)


def _same_side(x: ColumnBound, y: ColumnBound) -> bool:
    return x.column.array is y.column.array and x.kind == y.kind


def with_terms(result: TileValue, name: str, x: TileValue, y: TileValue) -> TileValue:
    """Record the row term and the column term of x + y or x - y (`name` is "add" or "sub") in its result."""
    if (x.axes, y.axes) not in (((0,), (1,)), ((1,), (0,)), ((), (1,)), ((1,), ())):
        return result
    y_sign = -1 if name == "sub" else 1
    if y.axes == (1,):
        return result._replace(affine=RowPlusColumn(x, y, y_sign))
    row = y if y_sign > 0 else TileValue(-y.array, y.axes, max_abs=y.max_abs)
    return result._replace(affine=RowPlusColumn(row, x, 1))
