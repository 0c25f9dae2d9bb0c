"""Which strategy sums dQ, and that the page on the backward has them all."""

import pathlib
from typing import Any

import numpy as np
import pytest

from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90.backward import dq
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.dq.ordered_schedule import OrderedSchedule, OrderedTile
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.ir.block_classes import EMPTY, FULL

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "design" / "backward.md"
# Two visits of each query block, by 64 tiles.
FEW_VISITS = np.where(np.abs(np.subtract.outer(np.arange(128), 2 * np.arange(64))) < 2, FULL, EMPTY)


def chosen(length: int, dim: int = 128, batch: int = 2, **options: Any) -> dq.DqStrategy:
    classes = options.pop("classes", None)
    mask = "any" if classes is not None else None
    spec = KernelSpec(batch, length, length, 16, 16, 1.0, None, mask=mask, uses_mask_bits=True)
    config = BackwardConfig(dim, dim, **options)
    request = dq.DqRequest(spec, config, classes, visits_empty_blocks=classes is None)
    return dq.choose(request)


@pytest.mark.parametrize(
    "length, options, name",
    [
        (8192, {}, "AtomicDq"),
        (8192, {"dim": 256}, "AtomicDq"),
        (256, {"batch": 64}, "HeadPerCtaDq"),
        (256, {"batch": 64, "dim": 256}, "AtomicDq"),
        (8192, {"classes": FEW_VISITS[None, None]}, "FirstStoreDq"),
        (8192, {"classes": np.full((1, 1, 128, 64), FULL)}, "AtomicDq"),
        (8192, {"deterministic": True, "classes": FEW_VISITS[None, None]}, "OrderedDq"),
        (8192, {"deterministic": True, "dim": 256}, "OrderedDq"),
    ],
)
def test_the_first_strategy_that_suits_is_chosen(length: int, options: Any, name: str) -> None:
    assert type(chosen(length, **options)).__name__ == name


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_strategy_has_its_schedule_and_tiles(deterministic: bool) -> None:
    strategy = chosen(8192, deterministic=deterministic)
    assert type(strategy.schedule) is (OrderedSchedule if deterministic else BackwardSchedule)
    assert (strategy.tile_type is OrderedTile) == deterministic
    assert bool(strategy.barriers) == deterministic


def test_two_ctas_take_their_turns_without_barriers() -> None:
    assert not chosen(8192, dim=256, deterministic=True).barriers


@pytest.mark.parametrize("strategy", dq.STRATEGIES)
def test_each_strategy_is_on_the_page(strategy: type[dq.DqStrategy]) -> None:
    assert f"`{strategy.__name__}`" in PAGE.read_text()
    assert strategy.summary
