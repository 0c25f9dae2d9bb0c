"""Batch entries and heads on many devices under `jit`: nothing of what a kernel reads is gathered."""

import itertools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from pallas_fa2.distributed import sharding
from pallas_fa2.distributed.sharding import Axes, sharded
from tests.support import compile_gate, interpreter
from tests.support.hopper import planned_for_h200
from tests.support.tiers import slow, slow_but

BATCH, LENGTH, DIM = 4, 8, 16


def kernel(q: jax.Array, k: jax.Array, bias: jax.Array) -> tuple:
    """A stand-in for an attention kernel with a result of each kind."""
    q = q.reshape(*q.shape[:2], k.shape[2], -1, DIM)
    constant = jnp.asarray(np.arange(LENGTH, dtype=np.float32))[None, None, None, None]
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * constant
    dk = jnp.einsum("bkgts,btkgh->bskh", scores, q)
    scores = scores.reshape(len(q), -1, LENGTH, LENGTH) + bias
    return scores, dk, scores.sum((0, 1)), {"bias": scores.sum(0)}


AXES = Axes(("b.n.", "b.k.", "bn.."), ("bn..", "b.k.", "..", {"bias": "n.."}))


def inputs(q_heads: int, kv_heads: int, batch: int = BATCH) -> list[jax.Array]:
    shapes = (batch, LENGTH, q_heads, DIM), (batch, LENGTH, kv_heads, DIM), (1, q_heads, 1, 1)
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def mesh_of(devices: Any, kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    """Twice as many along "x" as along "y"."""
    devices = np.array(devices)
    return jax.sharding.Mesh(devices.reshape(-1, 2), ("x", "y"), axis_types=(kind,) * 2)


LAYOUTS = {
    # of q and k: specs, heads, what is left on a device of q's batch entries and heads
    "entries": (P("x"), P("x"), (4, 2), (1, 4)),
    "heads": (P(None, None, "y"), P(None, None, "y"), (4, 2), (4, 2)),
    "both": (P("x", None, "y"), P("x", None, "y"), (4, 2), (1, 2)),
    "of one key head": (P("x", None, "y"), P("x"), (4, 1), (1, 2)),
    "as many heads": (P("x", None, "y"), P("x", None, "y"), (4, 4), (1, 2)),
    "entries over two axes": (P(("y", "x")), P(("y", "x")), (2, 2), (1, 2)),
    "groups would be cut": (P(None, None, "x"), P(), (4, 2), (4, 4)),
    "nothing": (P(), P(), (4, 2), (4, 4)),
    "of queries": (P(None, "x"), P(), (4, 2), (4, 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_device_computes_its_shard(layout: str) -> None:
    q_spec, k_spec, heads, left = LAYOUTS[layout]
    batch = 8 if "two axes" in layout else BATCH
    args, mesh, calls = inputs(*heads, batch), mesh_of(jax.devices()[:8]), []

    def looked_at(q: jax.Array, *rest: jax.Array) -> tuple:
        calls.append((q.shape[0], q.shape[2]))
        return kernel(q, *rest)

    specs = q_spec, k_spec, P()
    shards = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]
    actual = jax.jit(sharded(looked_at, AXES))(*shards)
    chex.assert_trees_all_close(jax.device_get(actual), kernel(*args), rtol=1e-4, atol=1e-2)
    assert calls[-1] == left
    if left != (batch, heads[0]):
        assert actual[1].sharding.is_equivalent_to(shards[1].sharding, 4)


@pytest.mark.parametrize("set_it", [True, False], ids=["set", "of the arrays"])
def test_a_mesh_of_explicit_axes(set_it: bool) -> None:
    mesh = mesh_of(jax.devices()[:8], AxisType.Explicit)
    args, spec = inputs(4, 2), P("x", None, "y")
    shards = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(args, (spec, spec, P()), strict=True)
    ]
    out = P("x", "y"), spec, P(), {"bias": P("y")}
    with jax.set_mesh(mesh) if set_it else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        partitioned = jax.jit(jax.sharding.auto_axes(sharded(kernel, AXES), out_sharding=out))
        text, actual = partitioned.lower(*shards).compile().as_text(), partitioned(*shards)
    chex.assert_trees_all_close(jax.device_get(actual), kernel(*args), rtol=1e-4, atol=1e-2)
    assert "all-gather" not in text


def test_inside_shard_map_a_kernel_is_called_as_it_is() -> None:
    mesh, args = mesh_of(jax.devices()[:8]), inputs(4, 2)

    def local(*args: jax.Array) -> jax.Array:
        return sharded(kernel, AXES)(*args)[0]

    specs = (P("x", None, "y"), P("x", None, "y"), P(None, "y"))
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("x", "y"))
    np.testing.assert_allclose(jax.jit(step)(*args), kernel(*args)[0], rtol=1e-5, atol=1e-5)
    assert "custom_partitioning" not in str(jax.make_jaxpr(step)(*args))
    assert "custom_partitioning" in str(jax.make_jaxpr(local)(*args))


def in_parts(_: Callable, axes: Axes, kernel: Callable) -> Callable:
    """Run a kernel on the shards of a 2 x 2 mesh (batch entries and heads) one after another."""
    part_of = jax.jit(kernel)  # all are of one shape, and compiled once

    def call(*args: Any) -> Any:
        letters = jax.tree.leaves(jax.tree.broadcast(axes.arguments, args))
        arrays, tree = jax.tree.flatten(args)
        sizes: dict[str, int] = {}
        for names, x in zip(letters, arrays, strict=True):
            for name, size in zip(names, x.shape, strict=True):
                sizes[name] = max(size, sizes.get(name, 1))

        def slice_shard(names: str, x: jax.Array, at: dict[str, int]) -> jax.Array:
            for axis, (name, size) in enumerate(zip(names, x.shape, strict=True)):
                if name != "." and size == sizes[name] > 1:
                    half = size // 2
                    x = jax.lax.slice_in_dim(x, at[name] * half, (at[name] + 1) * half, axis=axis)
            return x

        partitioned = {}
        for entries, heads in itertools.product(range(2), repeat=2):
            at = {"b": entries, "n": heads, "k": heads}
            part = [slice_shard(names, x, at) for names, x in zip(letters, arrays, strict=True)]
            partitioned[entries, heads], result = jax.tree.flatten(part_of(*tree.unflatten(part)))
        joined = [
            join(names, *([partitioned[b, h][i] for h in range(2)] for b in range(2)))
            for i, names in enumerate(jax.tree.leaves(axes.results))
        ]
        return result.unflatten(joined)

    def join(names: str, *parts: list[jax.Array]) -> jax.Array:
        axis = next((i for i, name in enumerate(names) if name in "nk"), None)
        rows = [sum(x) if axis is None else jnp.concatenate(x, axis) for x in parts]
        return jnp.concatenate(rows, names.index("b"))

    return call


B, T, N, K, H = 2, 70, 4, 2, 64
CALLS: dict[str, Callable] = {
    "causal": lambda ids, slopes, key: {"mask": fa.Causal()},
    "packed with slopes": lambda ids, slopes, key: {
        "mask": fa.Causal() & fa.Segments(ids),
        "score": fa.alibi(slopes),
    },
    "lengths": lambda ids, slopes, key: {"mask": fa.Lengths(kv=30 + 20 * ids[:, -1])},
    "array": lambda ids, slopes, key: {
        "mask": fa.Dense(jax.random.bernoulli(key, 0.5, (B, N, T, T)))
    },
    "dropout": lambda ids, slopes, key: {"dropout_rate": 0.5, "dropout_rng": key},
}


def arguments() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, dout = (
        jax.random.normal(key, (B, T, n, H), jnp.bfloat16)
        for key, n in zip(keys, (N, K, K, N), strict=False)
    )
    ids = jnp.sort(jax.random.randint(keys[4], (B, T), 0, 3), 1)
    return [q, k, v, dout, ids, jnp.arange(1.0, N + 1) / 8]


def attend(name: str, implementation: str) -> Callable:
    def run(q: Any, k: Any, v: Any, dout: Any, ids: Any, slopes: Any) -> tuple:
        def attend(q: Any, k: Any, v: Any, slopes: Any) -> Any:
            options = CALLS[name](ids, slopes, jax.random.key(3))
            return fa.flash_attention(q, k, v, implementation=implementation, **options)

        out, pull = jax.vjp(attend, q, k, v, slopes)
        return out, *pull(dout)

    return run


@pytest.mark.parametrize("name", slow_but(("causal", "array").__contains__, CALLS))
def test_kernels_of_shards_equal_the_whole_kernel(name: str) -> None:
    """The declared axes are those of the arguments: otherwise a shard would read data of another one."""
    args = arguments()
    with planned_for_h200(2), mock.patch.object(sharding, "sharded", in_parts):
        actual = interpreter.run(attend(name, "hopper"), *args, detect_races=False)
    expected = interpreter.run(attend(name, "reference"), *args)
    for x, y in zip(actual, expected, strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()


@pytest.mark.parametrize("name", [slow("packed with slopes"), "dropout"])
def test_no_array_is_gathered_on_four_gpus(name: str) -> None:
    """Two entries and two heads on each; of slopes that all entries share, two numbers are summed."""
    mesh = mesh_of(compile_gate.h200s(4))
    by_head, by_entry = P("x", None, "y"), P("x")
    specs = by_head, by_head, by_head, by_head, by_entry, P("y")
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(arguments(), specs, strict=True)
    ]
    with planned_for_h200():
        hlo = compile_gate.hlo_for_h200s(attend(name, "hopper"), *args)
    moved = re.findall(r"= .* (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\((.*?)\)", hlo)
    assert [kind for kind, _ in moved] == (["all-reduce"] if "slopes" in name else [])
    kernels = re.findall(r"= (.*?) custom-call\(.*mosaic_gpu", hlo)
    assert any(f"bf16[1,{T},2,{H}]" in shapes for shapes in kernels)
    assert not any(f"[2,{T},4,{H}]" in shapes for shapes in kernels)


PLACED = {  # q, k, v and dout, ids, slopes
    "entries": (P("x"), P("x"), P()),
    "heads": (P(None, None, "x"), P(), P("x")),
}


@pytest.mark.gpus
@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("name", CALLS)
def test_two_gpus_equal_one(name: str, placed: str) -> None:
    """Each forms its entries or heads as a GPU with all of them would, to the bit; gradients are summed in any
    order there as well."""
    mesh, args = jax.make_mesh((2,), ("x",), (AxisType.Auto,)), arguments()
    heads, ids, slopes = (NamedSharding(mesh, spec) for spec in PLACED[placed])
    shards = [
        jax.device_put(x, at)
        for x, at in zip(args, (heads, heads, heads, heads, ids, slopes), strict=True)
    ]
    run = jax.jit(attend(name, "hopper")).lower(*shards).compile()
    assert "all-gather" not in (run.as_text() or "")
    actual, alone = run(*shards), jax.jit(attend(name, "hopper"))(*args)
    assert actual[0].sharding.is_equivalent_to(heads, 4)
    np.testing.assert_array_equal(*(np.asarray(x[0], np.float32) for x in (actual, alone)))
    expected = jax.jit(attend(name, "reference"))(*args)
    for x, y in zip(actual, expected, strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        assert np.abs(x - y).max() <= 0.02 * np.abs(y).max()
