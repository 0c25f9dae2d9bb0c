"""Which parameters of a test `make test` takes: the others are marked `slow`, and left to `make test-all`.

What stays is the cheapest that catches a kind of mistake, by planting them: see CONTRIBUTING.md.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """A test's parameters."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def slow_but(quick: Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """Those of one parameter, of which all are slow but those that are `quick`."""
    return [value if quick(value) else slow(value) for value in values]
