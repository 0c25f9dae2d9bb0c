"""Attention of a sequence divided over devices is that on one device.

Values and gradients are computed by NumPy, with devices as a mapped axis.
"""

import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from pallas_fa2 import fallback
from pallas_fa2.distributed import context_parallel
from pallas_fa2.distributed.reach import gather_reach
from tests.support import programs
from tests.support.hopper import A100
from tests.support.sequence_shards import (
    AXIS,
    CASES,
    Devices,
    H,
    K,
    N,
    mesh_of,
    on_devices,
    on_one_device,
)
from tests.support.tiers import slow

QUICK = {
    # (case, strategy, layout): each kind of step at least once
    ("causal", "ring", "zigzag"), ("window of documents", "ring", "contiguous"), ("scores with data", "ring", "contiguous"),
    ("causal documents", "ring", "zigzag"), ("dropout", "ring", "zigzag"), ("bias", "ring", "zigzag"),
    ("scores with data", "all_gather", "zigzag"), ("dropout", "all_gather", "contiguous"),
    ("dropout", "ulysses", "zigzag"), ("bias", "ulysses", "zigzag"), ("causal documents", "ulysses", "zigzag"),
    ("explicit positions", "ring", "contiguous"), ("dense mask and sinks", "ring", "contiguous"),
    ("keys of another sequence", "ring", "contiguous"), ("nothing", "ring", "contiguous"),
}  # fmt: skip
ALL = [
    (case, strategy, layout)
    for case in CASES
    for strategy in ("ring", "all_gather", "ulysses")
    for layout in ("contiguous", "zigzag")
]


@pytest.mark.parametrize("name, strategy, layout", [x if x in QUICK else slow(*x) for x in ALL])
def test_devices_equal_one(name: str, strategy: str, layout: str) -> None:
    devices = Devices(4, layout)
    actual = on_devices(name, devices, strategy, "blockwise")
    for x, y in zip(*map(jax.tree.leaves, (actual, on_one_device(name))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "name, reach",
    [("sliding window", (4, 0)), ("window of documents", (10, 4)), ("window with data", (4, 0))],
)
def test_gathered_keys_are_those_that_a_mask_reaches(
    name: str, reach: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of up to three devices before, of the third a part, and of the one behind; the ends of the sequence meet."""
    monkeypatch.setattr("pallas_fa2.distributed.reach.KEYS_OF_A_BLOCK", 2)
    with mock.patch.object(context_parallel, "gather_reach", wraps=gather_reach) as gathered:
        actual = on_devices(name, Devices(8, "contiguous"), "all_gather", "blockwise")
    assert {call.args[3] for call in gathered.call_args_list} == {reach}
    for x, y in zip(*map(jax.tree.leaves, (actual, on_one_device(name))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["scores with data", slow("dense mask and sinks"), slow("causal")])
def test_jax_differentiates_the_reference(name: str) -> None:
    actual = on_devices(name, Devices(2, "zigzag"), "ring", "reference")
    for x, y in zip(*map(jax.tree.leaves, (actual, on_one_device(name))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


ERRORS = {
    "axis": ({"axis_name": "x"}, "axis_name must be an axis over which jax.shard_map divides"),
    "strategy": ({"strategy": "all"}, "strategy must be one of 'ring', 'all_gather', 'ulysses', but it is 'all'"),
    "layout": ({"layout": "striped"}, "layout must be one of 'contiguous', 'zigzag', but it is 'striped'"),
    "odd": ({"layout": "zigzag"}, "layout 'zigzag' needs an even number of tokens on each device, but T/n is 3"),
    "heads": ({"strategy": "ulysses"}, r"'ulysses' divides heads over the 3 devices.* N \(= 4\)"),
    "pairs": (
        {"mask": np.ones((1, 1, 3, 3), bool)}, r"mask must have shape .* T = 3, S = 9, but it has shape \(1, 1, 3, 3\)"
    ),
}  # fmt: skip


def test_a_wrong_axis_is_an_error_that_names_those_that_there_are() -> None:
    spec, x = P(None, AXIS), jnp.zeros((1, 4, K, H))
    attend = functools.partial(fa.context_parallel_attention, axis_name="tokens")
    run = jax.shard_map(attend, mesh=mesh_of(**{AXIS: 1}), in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(ValueError, match=f"but it is 'tokens', .*; those here are '{AXIS}'"):
        jax.jit(run)(x, x, x)
    with pytest.raises(ValueError, match=r"call it inside jax\.shard_map"):
        attend(x, x, x)


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument_and_the_remedy(name: str) -> None:
    options, message = ERRORS[name]
    attend = functools.partial(fa.context_parallel_attention, **{"axis_name": AXIS, **options})
    q, kv = jnp.zeros((3, 1, 3, N, H)), jnp.zeros((3, 1, 3, K, H))
    with pytest.raises(ValueError, match=message):
        jax.vmap(attend, axis_name=AXIS)(q, kv, kv)


def test_the_ring_outside_of_jit_is_an_error_that_names_jit() -> None:
    """JAX runs no `custom_vjp` with symbolic zeros in a `shard_map` that is not compiled."""
    spec, x = P(None, AXIS), jnp.zeros((1, 4, K, H))
    attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS)
    run = jax.shard_map(attend, mesh=mesh_of(**{AXIS: 1}), in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(NotImplementedError, match=r"strategy 'ring' .*jax\.jit\(jax\.shard_map"):
        run(x, x, x)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_forward_mode_names_the_implementation_that_has_it(strategy: str) -> None:
    x = jnp.ones((2, 1, 4, 2, H))
    attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS, strategy=strategy)

    def tangent(implementation: str | None) -> Any:
        local = functools.partial(attend, implementation=implementation)
        return jax.vmap(lambda x: jax.jvp(local, (x,) * 3, (x,) * 3)[1], axis_name=AXIS)(x)

    assert jax.eval_shape(lambda: tangent("reference")).shape == x.shape
    for implementation, who in (("blockwise", "'blockwise' has"), (None, "implementations have")):
        with pytest.raises(TypeError, match=f"{who} no forward-mode .*implementation='reference'"):
            tangent(implementation)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_an_empty_batch_has_empty_results_and_gradients(strategy: str) -> None:
    spec = P(None, AXIS)

    def local(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        def attend(*args: Any) -> Any:
            return fa.context_parallel_attention(
                *args[:3], axis_name=AXIS, strategy=strategy, is_causal=True, sinks=args[3], return_lse=True
            )  # fmt: skip

        results, pull = jax.vjp(attend, q, k, v, sinks)
        return results, pull(results)

    arrays = [jnp.zeros((0, 8, heads, dim)) for heads, dim in ((N, H), (K, H), (K, H + 2))]
    results = (spec, P(None, None, AXIS)), (spec, spec, spec, P())
    run = jax.shard_map(
        local, mesh=mesh_of(**{AXIS: 2}), in_specs=(*(spec,) * 3, P()), out_specs=results
    )
    (out, lse), gradients = jax.eval_shape(run, *arrays, jnp.zeros(N))
    assert (out.shape, lse.shape) == ((0, 8, N, H + 2), (0, N, 8))
    assert [dx.shape for dx in gradients] == [*(x.shape for x in arrays), (N,)]


def test_sums_of_many_blocks_are_in_float32() -> None:
    """A key whose gradient is the sum of those of 8 devices is rounded to bfloat16 once for each, not with each sum."""
    n, tokens = 8, 1
    x = jnp.ones((n, 1, tokens, 1, 8), jnp.bfloat16)
    # dV is the sum of 1/8 dO of all queries: 1 + 7/256 is no sum of bfloat16, which has 1/128 there.
    dout = jnp.full_like(x, 1 / 32).at[0].set(8)
    for strategy in ("ring", "all_gather"):
        attend = functools.partial(
            fa.context_parallel_attention,
            axis_name=AXIS,
            strategy=strategy,
            implementation="blockwise",
        )
        local = lambda x, dout: jax.vjp(lambda v: attend(x, x, v), x)[1](dout)[0]  # noqa: B023
        dv = programs.evaluate(jax.vmap(local, axis_name=AXIS), x, dout)
        np.testing.assert_array_equal(
            np.asarray(dv, np.float32), np.asarray(jnp.bfloat16(1 + 7 / 256), np.float32)
        )


def test_arguments_that_flash_attention_has_not_are_named() -> None:
    x = jnp.zeros((1, 4, 1, 8))
    with pytest.raises(TypeError, match="context_parallel_attention has no argument 'causal'"):
        fa.context_parallel_attention(x, x, x, axis_name="sequence", causal=True)  # pyright: ignore
    for names in ((), ("a", "a")):
        with pytest.raises(ValueError, match="axis_name must be one axis or a tuple of different"):
            fa.context_parallel_attention(x, x, x, axis_name=names)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_gradients_without_a_fused_kernel_are_an_error_if_one_is_asked_for(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_warned", set())
    monkeypatch.setattr(context_parallel, "device_of", lambda array: A100)
    x = jax.ShapeDtypeStruct((2, 1, 16, 2, 192), jnp.float32)

    def trace(implementation: Any, differentiate: Any = jax.grad) -> None:
        options = {"axis_name": AXIS, "strategy": strategy, "implementation": implementation}
        attend = functools.partial(fa.context_parallel_attention, is_causal=True, **options)
        run = differentiate(lambda x: jnp.sum(attend(x, x, x) ** 2))
        jax.eval_shape(jax.vmap(run, axis_name=AXIS), x)

    trace("fused", lambda run: run)
    with pytest.raises(ValueError, match="'fused' does not support the gradients of this call"):
        trace("fused")
    with pytest.warns(fa.FallbackWarning, match="which run on blockwise, slower"):
        trace(None)
