"""Tiles are dealt to CTAs, or claimed while other CTAs claim."""

from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import scheduler
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from tests.contract.rule import assert_as_dense
from tests.support import interpreter
from tests.support.hopper import all_at_once, packed_inputs, planned_for_h200, whole_heads
from tests.support.tiers import slow


def test_tiles_go_to_the_cta_that_is_free_first():
    entries = np.arange(5, dtype=np.int32)[:, None]
    dealt = StaticTileScheduler.deal(entries, [3.0, 1.0, 1.0, 1.0, 1.0], 2)
    assert dealt.table[..., 0].tolist() == [[0, 4, 5, 5], [1, 2, 3, 5]]


def test_tiles_of_one_claim_go_to_one_cta():
    entries = np.arange(6, dtype=np.int32)[:, None]
    dealt = StaticTileScheduler.deal(entries, [1.0, 1.0, 1.0], 2, together=2)
    assert dealt.table[..., 0].tolist() == [[0, 1, 4, 5, 6], [2, 3, 6, 6, 6]]
    assert sorted(dealt.worker_costs) == [1.0, 2.0]


def test_claims_come_before_the_tiles():
    ids = np.arange(4, dtype=np.int32)
    claims = DynamicTileScheduler.build(ids, 10 * ids, num_workers=3)
    rows = 3 * scheduler.CLAIM_SLOTS + 1
    assert (claims.table[:rows] == -1).all() and claims.num_tiles == 4
    assert claims.table[rows:].tolist() == [[0, 0], [1, 10], [2, 20], [3, 30], [4, 0]]


@pytest.mark.parametrize(
    "length, heads, causal, claims",
    [(4096, 16, True, True), (1024, 16, True, False), (4096, 16, False, True),
     (4224, 16, False, False)],
)  # fmt: skip
def test_long_tiles_that_do_not_come_out_even_are_claimed(
    length: int, heads: int, causal: bool, claims: bool
) -> None:
    """4224 tokens are 33 tiles a head, and with four entries 16 for each of 132 CTAs."""
    problem = KernelSpec(
        4, length, length, heads, heads, scale=1.0, causal_offset=0 if causal else None
    )
    chosen = BackwardSchedule.choose(problem, BackwardConfig(128, 128)).tile_scheduler(None)
    assert isinstance(chosen, DynamicTileScheduler) == claims


MASKS = {
    "causal": lambda ids: fa.Causal(),
    "full": lambda ids: None,
    "packed": lambda ids: fa.Causal() & fa.Segments(ids),
}


@pytest.mark.parametrize(
    "kernel, name, head_dim, lengths, heads, ctas",
    [
        ("attention", "packed", 64, (260, 260), 4, 2),
        slow("attention_gradients", "packed", 128, (260, 260), 4, 2),
        ("attention_gradients", "causal", 64, (260, 260), 4, 2),
        slow("attention_gradients", "full", 256, (64, 260), 4, 4),
        ("whole heads", "packed", 64, (140, 140), 10, 2),
    ],
)
def test_ctas_claim_tiles_side_by_side(
    kernel: str, name: str, head_dim: int, lengths: tuple, heads: int, ctas: int
) -> None:
    """Each CTA has more claims than slots; at H = 256 pairs of CTAs share a claim."""
    whole = kernel == "whole heads"
    kernel = "attention_gradients" if whole else kernel
    args = packed_inputs(2, lengths, (heads, heads), head_dim)

    def run(implementation: str) -> Any:
        def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
            return fa.flash_attention(q, k, v, mask=MASKS[name](ids), implementation=implementation)

        def gradients(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
            out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids), q, k, v)
            return out, pull(dout)

        if kernel == "attention":
            return lambda q, k, v, dout, ids: attend(q, k, v, ids)
        return gradients

    claims = mock.patch.object(BackwardSchedule, "uses_dynamic", True)
    with planned_for_h200(cores=ctas), all_at_once(kernel), claims, whole_heads(whole):
        got = interpreter.run(run("hopper"), *args)
    assert_as_dense(got, run("reference"), args, run=interpreter.run)
