"""The steps of a ring: which calls each device has, of which queries and keys, and with which masks."""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.distributed import context_parallel
from pallas_fa2.distributed.ring import Ring
from pallas_fa2.distributed.ring_schedule import BlockCall
from tests.support.sequence_shards import (
    AXIS,
    H,
    K,
    N,
)


def ring_of(
    n: int, layout: str, tokens: int = 4, kv_tokens: int | None = None, **options: Any
) -> Ring:
    """Return the steps that are planned for devices with so many tokens."""
    planned: list[Ring] = []

    def plan_only(ring: Ring, q: Any, k: Any, v: Any, operands: Any) -> tuple:
        planned.append(ring)
        return q, jnp.zeros((1, N, tokens))

    def local(q: jax.Array, kv: jax.Array) -> jax.Array:
        made = {
            name: make() if name == "mask" and callable(make) else make
            for name, make in options.items()
        }
        return fa.context_parallel_attention(
            q, kv, kv, axis_name=AXIS, layout=layout, implementation="blockwise", **made
        )

    shapes = [
        jax.ShapeDtypeStruct((n, 1, t, h, H), jnp.float32)
        for t, h in ((tokens, N), (kv_tokens or tokens, K))
    ]
    with mock.patch.object(context_parallel, "ring_attention", plan_only):
        jax.eval_shape(jax.vmap(local, axis_name=AXIS), *shapes)
    return planned[0]


def ids_of(tokens: int) -> Any:
    return fa.Segments(jnp.zeros((1, tokens), jnp.int32))


def described(ring: Ring) -> list[tuple[int, list[tuple]]]:
    """Return each step's shift and calls: (where it runs, queries, keys, mask, first tokens of both)."""

    def describe(call: BlockCall) -> tuple:
        spec = call.spec
        mask = "data" if spec.has_explicit_positions else spec.causal or str(spec.mask)
        return call.runs, spec.q_len, spec.kv_len, mask, call.q_start, call.k_start

    return [(step.shift, list(map(describe, step.calls))) for step in ring.steps]


ALWAYS = "always"
FAR = ("unwrapped", 4, 4, "None", (0, 0), (0, 0))


def test_causal_zigzag_has_equal_work_and_no_positions_as_data() -> None:
    """After its own step a device has two calls of half its queries on half of the keys, without a mask."""
    halves = [  # wherever the step wraps around, the upper queries on all keys; elsewhere all queries on the lower keys
        (ALWAYS, 2, 2, "None", (0, 2), (0, 0)),
        (ALWAYS, 2, 2, "None", (2, 2), (0, 2)),
    ]
    own = (0, [(ALWAYS, 4, 4, "start", (0, 0), (0, 0))])
    assert described(ring_of(4, "zigzag", is_causal=True)) == [
        own,
        *((i, halves) for i in (1, 2, 3)),
    ]


def test_causal_contiguous_steps_run_on_the_devices_behind() -> None:
    own = (0, [(ALWAYS, 4, 4, "start", (0, 0), (0, 0))])
    assert described(ring_of(3, "contiguous", is_causal=True)) == [own, (1, [FAR]), (2, [FAR])]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_without_a_mask_a_step_is_one_call(layout: str) -> None:
    one = [(ALWAYS, 4, 4, "None", (0, 0), (0, 0))]
    assert described(ring_of(3, layout)) == [(i, one) for i in range(3)]


@pytest.mark.parametrize(
    "mask, shifts",
    [
        (fa.SlidingWindow(2), [0, 1]),
        (fa.SlidingWindow(5), [0, 1]),
        (fa.SlidingWindow(6), [0, 1, 2]),  # query 4 i attends to key 4 i - 5
        (fa.Window(1, 1), [0, 1, 7]),
        (fa.Window(0, 5), [0, 6, 7]),
        (fa.Causal() & fa.Window(0, 5), [0]),
        (fa.SlidingWindow(2) & fa.Prefix(jnp.int32(7)), [0, 1]),
        (~fa.Window(3), list(range(1, 8))),
        (fa.mask_fn(lambda q, k: q.index - k.index > 99), []),
    ],
)
def test_a_window_moves_keys_to_the_devices_that_it_reaches(mask: fa.Mask, shifts: list) -> None:
    assert [step.shift for step in ring_of(8, "contiguous", mask=mask).steps] == shifts


def test_documents_are_evaluated_without_positions() -> None:
    mask = lambda: fa.Causal() & ids_of(4)
    (_, own), *others = described(ring_of(3, "zigzag", mask=mask))
    assert [(call[3], call[1:3]) for call in own] == [
        ("(Causal() & Segments(ids=int32[1,4]))", (4, 4))
    ]
    assert all(call[0] == ALWAYS and call[1:3] == (2, 2) for _, calls in others for call in calls)
    assert {call[3] for _, calls in others for call in calls} == {"Segments(ids=int32[1,4])"}


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
        {"mask": fa.Prefix(3) | fa.Causal()},
        {"is_causal": True, "kv_tokens": 6},
    ],
)
def test_positions_are_data_where_code_reads_more_than_known_distances(options: dict) -> None:
    for layout in ("contiguous", "zigzag"):
        calls = [call for _, step in described(ring_of(3, layout, **options)) for call in step]
        assert {"data"} <= {call[3] for call in calls[1:]} <= {"data", "None", "end"}


def test_equal_steps_are_one_loop() -> None:
    """The length of a program does not depend on the number of devices."""

    def count(jaxpr: Any) -> int:
        inner = (
            getattr(p, "jaxpr", p)
            for e in jaxpr.eqns
            for v in e.params.values()
            for p in jax.tree.leaves(v)
        )
        return len(jaxpr.eqns) + sum(count(p) for p in inner if hasattr(p, "eqns"))

    def length(n: int) -> int:
        x = jax.ShapeDtypeStruct((n, 1, 4, K, H), jnp.float32)
        attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS, layout="zigzag",
                                   is_causal=True, implementation="blockwise")  # fmt: skip
        return count(jax.make_jaxpr(jax.vmap(attend, axis_name=AXIS))(x, x, x).jaxpr)

    assert length(5) == length(9)
