"""What the compiled programs keep in memory beside the kernels' inputs and outputs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common.limits import KERNEL_DIMS
from pallas_fa2.backends.common.primitives import launch
from tests.support import compile_gate
from tests.support.hopper import (
    arrays,
    attend_and_differentiate,
    packed,
    planned_for_h200,
    whole_heads,
)
from tests.support.tiers import slow, slow_but


@pytest.mark.parametrize(
    "head_dim, make",
    [slow(64, lambda _: fa.Causal()), (128, packed), slow(256, lambda _: fa.Causal())],
)
def test_the_backward_takes_memory_for_dq_and_two_numbers_a_row(head_dim: int, make: Any) -> None:
    """In float32: dQ, and of the logsumexp and delta a number each (under documents with their data), as
    `explain` says."""
    batch, length, heads = 2, 4096, 4
    args = arrays(length, length, (head_dim, head_dim), n=heads, k=heads)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def run(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        return attend_and_differentiate(make(ids))(q, k, v, dout)

    with planned_for_h200():
        size = compile_gate.temporary_bytes_for_h200(run, *args, ids)
        said = fa.explain(*args[:3], mask=make(ids)).workspace_bytes
    assert said is not None
    row_bytes = 4 * batch * length * heads
    assert abs(size - said) <= (row_bytes if make is packed else 0) + 2**18
    assert size - row_bytes * head_dim <= (3 if make is packed else 2) * row_bytes + 2**18


@pytest.mark.parametrize("length", [1001, slow(3)])
def test_no_length_is_padded_in_memory(length: int) -> None:
    with planned_for_h200():
        hlo = compile_gate.hlo_for_h200(
            attend_and_differentiate(None), *arrays(length, length, (128, 128))
        )
    assert "mosaic_gpu" in hlo
    assert not re.search(r"bf16\[\d+,(1008|8),\d+,128\]", hlo)


DIMS_OF_CALLS = (
    *((80, 80), (72, 72), (112, 104), (160, 160), (192, 128), (72, 128), (40, 24), (136, 200)),
)


@pytest.mark.parametrize("dims", slow_but(lambda dims: dims == (136, 200), DIMS_OF_CALLS))
def test_no_head_dim_is_padded_in_memory(dims: Any) -> None:
    with planned_for_h200():
        hlo = compile_gate.hlo_for_h200(attend_and_differentiate(None), *arrays(256, 256, dims))
    assert "mosaic_gpu" in hlo
    assert {int(n) for n in re.findall(r"bf16\[\d+,\d+,\d+,(\d+)\]", hlo)} == set(dims)
    assert not re.search(r" bf16\S* (pad|slice)\(", hlo)


def is_sliced_by_xla(dims: tuple[int, int], make: Any) -> bool:
    """Whether a kernel of a scan reads or writes slices of what is stacked."""
    q, k, v, dout = arrays(256, 256, dims)
    stacked = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (q, k, v, dout)]
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def run(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        def layers(*xs: Any) -> Any:
            def layer(carry: None, x: tuple) -> tuple:
                return carry, fa.flash_attention(*x, mask=make(ids), implementation="hopper")

            return jax.lax.scan(layer, None, xs)[1]

        out, pull = jax.vjp(layers, q, k, v)
        return out, pull(dout)

    with planned_for_h200():
        hlo = compile_gate.hlo_for_h200(run, *stacked, ids)
    assert "mosaic_gpu" in hlo
    return '"dynamic_slice_fusion"' in hlo


@pytest.mark.parametrize("dims", slow_but(lambda dims: dims == (128, 128), KERNEL_DIMS))
@pytest.mark.parametrize("make", [slow(lambda _: None), packed], ids=["full", "packed"])
def test_kernels_have_arrays_of_their_own(dims: Any, make: Any) -> None:
    """What they add to, or claim from, would not be what it is before them in a slice."""
    assert not is_sliced_by_xla(dims, make)


@pytest.mark.slow
def test_kernels_in_slices_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.clear_caches()
    with monkeypatch.context() as patched:
        patched.setattr(launch, "isolate_from_fusion", lambda kernel: kernel)
        assert is_sliced_by_xla((64, 64), lambda _: None)
    jax.clear_caches()


@pytest.mark.parametrize("whole", [slow(False), True])
@pytest.mark.parametrize("kv_heads, arrays_each", [slow(2, 1), (1, 2)])
def test_gradients_have_memory_of_their_own(kv_heads: int, arrays_each: int, whole: bool) -> None:
    """Cut or padded afterwards, two results that begin as one empty array would share its memory. (Of whole heads,
    dQ and what is added up begin so as well.)"""
    with planned_for_h200(), whole_heads(whole):
        hlo = compile_gate.hlo_for_h200(
            attend_and_differentiate(fa.Causal()),
            *arrays(63, 200, (64, 64), jnp.bfloat16, 2, kv_heads),
        )
    of_forward, of_dq = 2, 2 if whole else 0
    expected = of_forward + 2 * arrays_each + of_dq
    assert hlo.count('custom_call_target="AllocateBuffer"') == expected


@pytest.mark.slow
def test_no_buffer_of_all_pairs() -> None:
    with planned_for_h200():
        hlo = compile_gate.hlo_for_h200(
            attend_and_differentiate(fa.Causal()), *arrays(1536, 1536, (128, 128))
        )
    assert "mosaic_gpu" in hlo
    assert not re.search(r"1536,1536", hlo)
