"""Compiled programs for several devices: the collectives that they have, the bytes that these move, and their
results."""

import functools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from tests.support import compile_gate, programs
from tests.support.hopper import planned_for_h200
from tests.support.sequence_shards import (
    AXIS,
    CASES,
    Devices,
    H,
    T,
    inputs,
    mesh_of,
)
from tests.support.tiers import slow


def moved(text: str) -> dict[str, list[int]]:
    """Return how many bytes each collective of a StableHLO program has on one device, by its kind."""
    sizes: dict[str, list[int]] = {}
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if kind := re.search(
            r'"stablehlo\.(collective_permute|all_gather|all_to_all|reduce_scatter|all_reduce)"',
            line,
        ):
            # The type of an operation with a region is behind it.
            typed = next(x for x in lines[i:] if ") -> " in x)
            shape, dtype = re.findall(r"tensor<([\dx]+)x(\w+)>", typed.split(" : ")[-1])[0]
            itemsize = {"f32": 4, "bf16": 2, "i32": 4}[dtype]
            sizes.setdefault(kind[1], []).append(
                int(np.prod([*map(int, shape.split("x"))])) * itemsize
            )
    return sizes


def lowered(
    strategy: str, layout: str, n: int, backward: bool, **options: Any
) -> dict[str, list[int]]:
    attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS, strategy=strategy, layout=layout,
                               implementation="blockwise", **options)  # fmt: skip

    def step(q: Any, k: Any, v: Any) -> Any:
        if not backward:
            return attend(q, k, v)
        return jax.vjp(attend, q, k, v)[1](q)

    spec = P(None, AXIS)
    call = jax.shard_map(
        step,
        mesh=mesh_of(**{AXIS: n}),
        in_specs=(spec,) * 3,
        out_specs=(spec,) * 3 if backward else spec,
    )
    x = [jax.ShapeDtypeStruct((1, 8 * n, heads, 16), jnp.bfloat16) for heads in (4, 2, 2)]
    return moved(jax.jit(call).lower(*x).as_text())


# Of a device: q; k or v; dk or dv.
Q_BYTES, KV_BYTES, SUM_BYTES = 8 * 4 * 16 * 2, 8 * 2 * 16 * 2, 8 * 2 * 16 * 4


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_ring_sends_keys_on_and_sums_home(layout: str) -> None:
    """Of n devices each sends n - 1 blocks of K and V, in the backward again, and as many of dK and dV in float32."""
    once = [KV_BYTES] * 2
    assert lowered("ring", layout, 3, backward=False, is_causal=True) == {
        "collective_permute": once * 2
    }
    sizes = lowered("ring", layout, 3, backward=True, is_causal=True)
    assert {kind: sorted(x) for kind, x in sizes.items()} == {
        "collective_permute": once * 4 + [SUM_BYTES] * 4
    }


def test_a_window_sends_one_block() -> None:
    options = {"mask": fa.SlidingWindow(9)}
    assert lowered("ring", "contiguous", 4, False, **options) == {
        "collective_permute": [KV_BYTES] * 2
    }
    sizes = lowered("ring", "contiguous", 4, True, **options)["collective_permute"]
    assert sorted(sizes) == [KV_BYTES] * 4 + [SUM_BYTES] * 2


def test_a_window_gathers_the_keys_that_it_reaches() -> None:
    """Four tokens of the device before, of eight, and their ids; their dK and dV come back in float32, and those of own
    keys do not move."""
    options = {"mask": fa.SlidingWindow(5) & fa.Segments(jnp.zeros((1, 8), jnp.int32))}
    with mock.patch("pallas_fa2.distributed.reach.KEYS_OF_A_BLOCK", 4):
        sizes = lowered("all_gather", "contiguous", 4, True, **options)
    assert {kind: sorted(x) for kind, x in sizes.items()} == {
        "collective_permute": [4 * 4] + [KV_BYTES // 2] * 2 + [SUM_BYTES // 2] * 2
    }


def test_gathered_keys_are_not_kept_and_sums_are_scattered_in_float32() -> None:
    assert lowered("all_gather", "zigzag", 2, False, is_causal=True) == {
        "all_gather": [KV_BYTES] * 2
    }
    sizes = lowered("all_gather", "zigzag", 2, True, is_causal=True)
    assert sizes == {"all_gather": [KV_BYTES] * 4, "reduce_scatter": [2 * SUM_BYTES] * 2}


def test_ulysses_exchanges_each_array_once() -> None:
    """Where a key head is on several devices it is sent to each."""
    sizes = lowered("ulysses", "contiguous", 2, False, is_causal=True)
    assert sizes == {"all_to_all": [Q_BYTES, KV_BYTES, KV_BYTES, Q_BYTES]}
    sizes = lowered("ulysses", "contiguous", 4, False, is_causal=True)
    assert sizes["all_to_all"][:3] == [Q_BYTES, 2 * KV_BYTES, 2 * KV_BYTES]


MESHES = {
    # the mesh, the axes of batch entries, tokens and heads, whether types say over which axes arrays vary
    "sequence": ({AXIS: 4}, (None, AXIS, None), True),
    "data and sequence": ({"data": 2, AXIS: 2}, ("data", AXIS, None), False),
    "data, sequence and heads": ({"data": 2, AXIS: 2, "heads": 2}, ("data", AXIS, "heads"), True),
    "sequence over two axes": ({"x": 2, "y": 2}, (None, ("x", "y"), None), True),
}


@pytest.mark.parametrize(
    "mesh",
    ["data, sequence and heads", *map(slow, sorted(MESHES.keys() - {"data, sequence and heads"}))],
)
@pytest.mark.parametrize("strategy", ["ring", slow("all_gather"), slow("ulysses")])
def test_compiled_on_a_mesh(mesh: str, strategy: str) -> None:
    """XLA's collectives are those that `jax.vmap` has; a gradient of shared data is summed over all devices."""
    axes, (batch, tokens, heads), check_vma = MESHES[mesh]
    case = CASES["scores with data"]
    x = {name: y[..., :H] if name in ("v", "dout") else y for name, y in inputs(case).items()}
    x.pop("dlse")
    data = {name: y for name, (_, y) in case.data.items()}
    attend = functools.partial(
        fa.context_parallel_attention, axis_name=tokens, strategy=strategy, layout="zigzag"
    )

    def local(attend: Callable, x: dict, data: dict) -> Any:
        out, pull = jax.vjp(lambda q, k, v, data: attend(q, k, v, implementation="blockwise", **case.options(data)),
                            x["q"], x["k"], x["v"], data)  # fmt: skip
        return out, pull(x["dout"])

    spec = P(batch, tokens, heads)
    specs = dict.fromkeys(x, spec), {"b": P(batch, tokens), "slope": P(heads)}
    on_mesh = jax.shard_map(functools.partial(local, attend), mesh=mesh_of(**axes), in_specs=specs, check_vma=check_vma,
                            out_specs=(spec, (spec, spec, spec, specs[1])))  # fmt: skip
    order, inverse = fa.zigzag(T, int(np.prod([axes[name] for name in jax.tree.leaves(tokens)])))

    def permuted(order: Any, tree: Any) -> Any:
        return jax.tree.map(lambda y: y[:, order] if y.ndim > 1 else y, tree)

    actual = permuted(inverse, jax.jit(on_mesh)(*permuted(order, (x, data))))
    expected = programs.evaluate(functools.partial(local, fa.flash_attention), x, data)
    if not check_vma:  # then a gradient of what devices share is that of each
        actual[1][3].pop("slope"), expected[1][3].pop("slope")
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-5)


def hlo_on_two_gpus(layout: str, mask: fa.Mask, strategy: Any = "ring") -> str:
    """Compile the forward and the backward of 2048 tokens for two H200s."""
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), (AXIS,))
    spec = P(None, AXIS)
    attend = functools.partial(
        fa.context_parallel_attention, axis_name=AXIS, layout=layout, mask=mask, strategy=strategy
    )

    def step(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return pull(out)

    specs = {"in_specs": (spec,) * 3, "out_specs": (spec,) * 3}
    run = jax.shard_map(step, mesh=mesh, **specs, check_vma=False)
    x = [
        jax.ShapeDtypeStruct((1, 2048, heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for heads in (4, 2, 2)
    ]
    with planned_for_h200():
        return compile_gate.hlo_for_h200s(run, *x)


@pytest.mark.slow
def test_on_gpus_keys_arrive_before_kernels_compute() -> None:
    """Both would take the same SMs: a kernel of a step runs neither beside a transfer nor before it."""
    events = ""
    for line in hlo_on_two_gpus("zigzag", fa.Causal()).splitlines():
        if start := re.search(r" collective-permute(-start)?\(", line):
            events += "<" if start[1] else "<>"
        elif " collective-permute-done(" in line:
            events += ">"
        elif re.search(r'op_name="[^"]*/attention(_gradients)?/mpmd_map"', line):
            events += "k"
    # K and V, again in the backward, and the sums that come home
    assert events == "<>kkk<>kkk<>", events


@pytest.mark.slow
def test_a_window_compiles_for_gpus() -> None:
    """Its kernels read no token data: XLA crashed on arrays of size 0."""
    hlo = hlo_on_two_gpus("contiguous", fa.SlidingWindow(300))
    assert len(re.findall(r" collective-permute(?:-start)?\(", hlo)) == 3


@pytest.mark.slow
def test_on_gpus_gradients_in_reach_are_sent_in_16_bits() -> None:
    """They are converted behind the transfer, before they are added; nothing but positions is gathered."""
    hlo = hlo_on_two_gpus("contiguous", fa.SlidingWindow(300), "all_gather")
    sent = " ".join(re.findall(r" = (.*?) collective-permute-done\(", hlo))
    assert re.findall(r"\w+\[[\d,]*\]", sent) == ["bf16[1,384,2,64]"] * 4
    assert not re.search(r" all-gather(?:-start)?\(|reduce-scatter", hlo)


@pytest.mark.gpus
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("name", ["causal", "documents", "window", "dropout"])
def test_two_gpus_equal_one(name: str, strategy: str) -> None:
    length, heads, spec = 1024, (4, 2, 2, 4), P(None, AXIS)
    keys = jax.random.split(jax.random.key(0), 4)
    x = [
        jax.random.normal(key, (2, length, h, 64), jnp.bfloat16)
        for key, h in zip(keys, heads, strict=True)
    ]
    ids = jnp.sort(jax.random.randint(keys[0], (2, length), 0, 5), 1)
    options: dict[str, Callable] = {
        "causal": lambda ids: {"is_causal": True},
        "documents": lambda ids: {"mask": fa.Causal() & fa.Segments(ids)},
        "window": lambda ids: {"mask": fa.SlidingWindow(200) & fa.Segments(ids)},
        "dropout": lambda ids: {"is_causal": True, "dropout_rate": 0.3, "dropout_rng": keys[1]},
    }

    def step(attend: Callable, q: Any, k: Any, v: Any, dout: Any, ids: Any) -> tuple:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, **options[name](ids)), q, k, v)
        return out, *pull(dout)

    devices = Devices(2, "contiguous" if name == "window" else "zigzag")
    attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS, strategy=strategy,
                               layout=devices.layout, implementation="hopper")  # fmt: skip
    run = jax.shard_map(functools.partial(step, attend), mesh=mesh_of(**{AXIS: 2}), in_specs=(spec,) * 5,
                        out_specs=(spec,) * 4, check_vma=False)  # fmt: skip
    order = devices.permutation(length)
    actual = [y[:, np.argsort(order)] for y in jax.jit(run)(*(y[:, order] for y in (*x, ids)))]
    reference = functools.partial(fa.flash_attention, implementation="reference")
    expected = jax.jit(functools.partial(step, reference))(*x, ids)
    for a, b in zip(actual, expected, strict=True):
        a, b = (np.asarray(y, np.float32) for y in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()
