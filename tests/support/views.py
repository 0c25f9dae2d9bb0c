"""Where an operand lies: the reference that an equation is given, with the transforms that follow it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.state import types as state

from tests.support import shared

Place = tuple[shared.Key, interpret_utils.Access]


class View:
    """view(reference, numbers in its transforms) -> the array and what of it is meant

    A reference of an equation is always to arrays of one shape, so that the numbers say the rest.
    """

    def __init__(self, aval: Any, tree: Any = None):
        self.leaves = 0 if tree is None else tree.num_leaves
        self._aval, self._tree = aval, tree
        self._known: dict[tuple[int, ...], tuple[int | None, interpret_utils.Access]] = {}

    def __call__(self, ref: np.ndarray, numbers: Sequence) -> Place:
        numbers = tuple(map(int, numbers))
        if (known := self._known.get(numbers)) is not None:
            member, access = known
            return _key(ref, member), access
        member, transforms = self._resolve(numbers)
        key = _key(ref, member)
        access = shared.the_memory().access(key, transforms)
        self._known[numbers] = member, access
        return key, access

    def _resolve(self, numbers: tuple[int, ...]) -> tuple[int | None, tuple]:
        """Of a union, the number of the member that is meant."""
        transforms = () if self._tree is None else jax.tree.unflatten(self._tree, numbers)
        member = None
        if isinstance(self._aval, jaxpr_interpret.mosaic_gpu_core.AbstractRefUnion):
            members = range(len(jaxpr_interpret.union_members(self._aval)))
            member, transforms = jaxpr_interpret.resolve_ref(self._aval, members, transforms)
        transforms = gpu_callbacks._remove_noop_transforms(tuple(transforms))
        gpu_callbacks._validate_transforms(transforms)
        return member, transforms


def _key(ref: np.ndarray, member: int | None) -> shared.Key:
    return shared.Key.from_array(ref if member is None else ref[member])


class BarrierView(View):
    """view(reference to barriers, numbers) -> the one that is meant"""

    def __call__(self, ref: np.ndarray, numbers: Sequence) -> shared.Key:
        numbers = tuple(map(int, numbers))
        if numbers not in self._known:
            places = np.arange(ref[..., 0].size, dtype=np.int32).reshape(ref.shape[:-1])
            alike = np.broadcast_to(places[..., None], ref.shape)
            found = jaxpr_interpret._get_barrier_allocation_key_from_inval(
                alike, self._tree, numbers
            )
            self._known[numbers] = np.unravel_index(found[0], places.shape)
        return shared.Key.from_array(ref[self._known[numbers]])


def located(*views: View | None) -> Callable[[Sequence], list]:
    """values -> where each of the first lies that has a view, the others as they are; numbers of all transforms
    follow."""
    leaves = (0 if view is None else view.leaves for view in views)
    ends = np.cumsum([len(views), *leaves]).tolist()

    def locate(values: Sequence) -> list:
        return [
            value if view is None else view(value, values[start:end])
            for view, value, start, end in zip(views, values, ends, ends[1:], strict=False)
        ]

    return locate


def operands(eqn: Any) -> Callable[[Sequence], list]:
    """Of inline code."""
    trees = eqn.params["pytree_ref_transforms"].children()
    return located(
        *(
            View(variable.aval, tree) if isinstance(variable.aval, state.AbstractRef) else None
            for variable, tree in zip(eqn.invars, trees, strict=False)
        )
    )
