"""Under `jit`, queries that are divided along their sequence stay where they lie: only keys, values and their gradients
move.

Each case is compiled for some of eight CPU devices and compared with the reference on one device, run by NumPy.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from pallas_fa2.distributed import sharding
from tests.support import compile_gate, programs
from tests.support.hopper import planned_for_h200
from tests.support.sequence_shards import (
    CASES,
    PAIRS,
    WHOLE,
    B,
    H,
    K,
    N,
    T,
    inputs,
    on_one_device,
    random,
    results,
)
from tests.support.tiers import slow


class Layout:
    """A mesh, and the mesh axes over which batch entries, tokens and heads are divided."""

    def __init__(self, batch: Any, tokens: Any, heads: Any, **sizes: int):
        self.batch, self.tokens, self.heads = batch, tokens, heads
        self.sizes = sizes

    def mesh(self, kind: AxisType) -> Mesh:
        sizes = tuple(self.sizes.values())
        devices = jax.devices()[: np.prod(sizes)]
        return jax.make_mesh(sizes, tuple(self.sizes), (kind,) * len(sizes), devices=devices)

    def put(self, kind: AxisType, tree: Any, specs: Any) -> Any:
        mesh = self.mesh(kind)
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
        )

    def of_data(self, how: str, x: np.ndarray) -> P:
        if how == WHOLE:
            return P()
        if how == PAIRS:
            heads = self.heads if x.shape[1] > 1 else None
            return P(self.batch if len(x) > 1 else None, heads, self.tokens)
        return P(self.batch, self.tokens)


LAYOUTS = {
    "sequence": Layout(None, "s", None, s=4),
    "data and sequence": Layout("d", "s", None, d=2, s=4),
    "sequence and heads": Layout(None, "s", "h", s=4, h=2),
    "all": Layout("d", "s", "h", d=2, s=2, h=2),
    "sequence over two axes": Layout(None, ("x", "y"), None, x=2, y=2),
}
QUICK = {
    # each kind of data, each axis, and both kinds of meshes at least once
    ("causal", "all", AxisType.Auto), ("scores with data", "all", AxisType.Auto), ("dropout", "all", AxisType.Auto),
    ("bias", "sequence and heads", AxisType.Auto), ("causal documents", "sequence over two axes", AxisType.Auto),
    ("keys of another sequence", "sequence", AxisType.Auto), ("scores with data", "data and sequence", AxisType.Explicit),
    ("dense mask and sinks", "all", AxisType.Explicit),
}  # fmt: skip
KINDS = AxisType.Auto, AxisType.Explicit
ALL = [(case, "all", AxisType.Auto) for case in CASES]
ALL += [("window of documents", layout, kind) for layout in LAYOUTS for kind in KINDS]
ALL = sorted({*ALL, *QUICK}, key=str)


def moved(program: Any) -> dict[str, list[int]]:
    """Return the bytes of each collective's result on a device, by its kind."""
    sizes: dict[str, list[int]] = {}
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program.as_text()):
        for dtype, shape in re.findall(r"(f32|bf16|s32|pred|u32)\[([\d,]*)\]", shapes):
            size = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1}[dtype]
            elements = int(np.prod([int(n) for n in shape.split(",") if n]))
            sizes.setdefault(kind, []).append(size * elements)
    return sizes


@pytest.mark.parametrize("name, layout, kind", [x if x in QUICK else slow(*x) for x in ALL])
def test_devices_equal_one(name: str, layout: str, kind: AxisType) -> None:
    case, at = CASES[name], LAYOUTS[layout]
    spec = P(at.batch, at.tokens, at.heads)
    rows = P(at.batch, at.heads, at.tokens)
    x = inputs(case)
    x = at.put(kind, x, {y: rows if y == "dlse" else spec for y in x})
    data = {y: z for y, (_, z) in case.data.items()}
    data = at.put(kind, data, {y: at.of_data(*z) for y, z in case.data.items()})
    attend = functools.partial(fa.flash_attention, implementation="blockwise")
    run = jax.jit(lambda x, data: results(attend, case, x, data)).lower(x, data).compile()
    actual = run(x, data)
    assert all(
        y.sharding.is_equivalent_to(NamedSharding(at.mesh(kind), s), y.ndim)
        for y, s in zip(jax.tree.leaves(actual)[:5], (spec, rows, *(spec,) * 3), strict=True)
    )
    for y, z in zip(*map(jax.tree.leaves, (actual, on_one_device(name))), strict=True):
        np.testing.assert_allclose(jax.device_get(y), z, rtol=2e-5, atol=2e-5)
    gathered = moved(run).get("all-gather", [])
    assert sum(gathered) <= 2 * sum(y.nbytes for y in data.values())  # in the backward again


def gradients(attend: Callable, *arrays: Any) -> tuple:
    out, pull = jax.vjp(attend, *arrays[:3])
    return out, *pull(arrays[3])


def qkv(dtype: Any = jnp.float32, **lengths: int) -> list[jax.Array]:
    """Return q, k, v and dO."""
    q_len, kv_len = lengths.get("q", T), lengths.get("kv", T)
    sizes = (q_len, N), (kv_len, K), (kv_len, K), (q_len, N)
    return [jnp.asarray(random(i, B, *size, H), dtype) for i, size in enumerate(sizes)]


def test_keys_go_around_in_the_inputs_dtype_and_their_gradients_in_float32() -> None:
    """As inside `shard_map`: of n = 2 devices each sends (n - 1)/n of K and V in the forward and in the backward, and
    as much of dK and dV in float32."""
    at = LAYOUTS["all"]
    spec = P(at.batch, at.tokens, at.heads)
    x = at.put(AxisType.Auto, qkv(jnp.bfloat16), [spec] * 4)
    step = functools.partial(gradients, functools.partial(fa.flash_attention, is_causal=True))
    run = jax.jit(step).lower(*x).compile()
    own = B * T * K * 2 * H // 8  # elements of K and V on a device
    on_cpu = 4  # bytes: XLA's CPU compiler sends bfloat16 as float32 where it computes so
    sizes = {kind: sum(sizes) for kind, sizes in moved(run).items()}
    assert sizes in (
        {"collective-permute": (2 * 2 + 4) * own},
        {"collective-permute": 3 * on_cpu * own},
    )


@pytest.mark.parametrize("kv_len", [T, slow(T + 3)])
def test_keys_that_each_device_has_do_not_move(kv_len: int) -> None:
    """Their gradients are summed over the devices."""
    at = LAYOUTS["sequence"]
    arrays = qkv(kv=kv_len)
    x = at.put(AxisType.Auto, arrays, [P(None, "s"), P(), P(), P(None, "s")])
    options = {"mask": fa.SlidingWindow(9), "dropout_rate": 0.5, "dropout_rng": jax.random.key(1)}
    attend = functools.partial(fa.flash_attention, **options)
    step = functools.partial(gradients, functools.partial(attend, implementation="blockwise"))
    run = jax.jit(step).lower(*x).compile()
    expected = programs.evaluate(
        functools.partial(gradients, functools.partial(attend, implementation="reference")), *arrays
    )
    for y, z in zip(run(*x), expected, strict=True):
        np.testing.assert_allclose(jax.device_get(y), z, rtol=2e-5, atol=2e-5)
    assert moved(run).keys() == {"all-reduce"}


def test_a_sequence_that_devices_cannot_share_alike_is_computed() -> None:
    """Queries that are not divided, on keys that are: these are gathered."""
    at, arrays = LAYOUTS["sequence"], qkv(q=1)
    x = at.put(AxisType.Auto, arrays, [P(), P(None, "s"), P(None, "s"), P()])
    step = functools.partial(
        gradients, functools.partial(fa.flash_attention, align="end", is_causal=True)
    )
    for y, z in zip(jax.jit(step)(*x), step(*arrays), strict=True):
        np.testing.assert_allclose(jax.device_get(y), z, rtol=2e-5, atol=2e-5)


def test_vmap_and_second_derivatives_on_devices() -> None:
    """They are those of the operations that are divided: `custom_partitioning` has neither."""
    at, (q, k, *_) = LAYOUTS["sequence"], qkv()

    def total(q: Any, k: Any) -> Any:
        attend = functools.partial(fa.flash_attention, implementation="blockwise", is_causal=True)
        return jnp.sum(jnp.sin(jax.vmap(attend)(q[:, None], k[:, None], k[:, None])))

    def curvature(q: Any, k: Any) -> Any:
        return jax.grad(lambda k: jnp.sum(jnp.sin(jax.grad(total)(q, k))))(k)

    x = at.put(AxisType.Auto, [q, k], [P(None, "s")] * 2)
    expected = jax.jit(curvature)(q, k)
    np.testing.assert_allclose(
        jax.device_get(jax.jit(curvature)(*x)), expected, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["drop-in", "layer"])
def test_callers_of_flash_attention_divide_queries_too(name: str) -> None:
    at = LAYOUTS["data and sequence"]
    lengths = jnp.asarray([T - 5, T], jnp.int32)
    if name == "drop-in":
        q, k, v, _ = qkv()
        args = [q, k, v, random(4, 1, N, T, T), lengths]
        specs = [P("d", "s")] * 3 + [P(None, None, "s"), P("d")]

        def call(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> Any:
            return fa.dot_product_attention(q, k, v, bias, key_value_seq_lengths=lengths)
    else:
        layer = fa.linen.MultiHeadAttention(num_heads=N, num_kv_heads=K, causal=True)
        x = jnp.asarray(random(0, B, T, 16))
        params = layer.init(jax.random.key(0), x)
        args, specs = [params, x], [jax.tree.map(lambda _: P(), params), P("d", "s")]
        call = layer.apply

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.sin(call(*args)))

    step = jax.jit(jax.value_and_grad(loss))
    x = at.put(AxisType.Auto, args, specs)
    run = step.lower(*x).compile()
    for y, z in zip(*map(jax.tree.leaves, (run(*x), step(*args))), strict=True):
        np.testing.assert_allclose(jax.device_get(y), z, rtol=2e-4, atol=2e-4)
    assert "all-gather" not in moved(run)


@pytest.mark.slow
def test_on_gpus_the_program_is_that_of_shard_map() -> None:
    """Kernels and transfers follow each other as in the ring inside `shard_map`."""
    mesh, spec = Mesh(np.array(compile_gate.h200s(2)), ("s",)), P(None, "s")

    def events(step: Callable) -> list[str]:
        x = [
            jax.ShapeDtypeStruct((1, 2048, n, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for n in (4, 2, 2, 4)
        ]
        with planned_for_h200():
            hlo = compile_gate.hlo_for_h200s(step, *x)
        return re.findall(
            r" (collective-permute-start|collective-permute-done|all-\w+|custom-call)\(.*", hlo
        )

    by_jit = functools.partial(gradients, functools.partial(fa.flash_attention, is_causal=True))
    ring = functools.partial(fa.context_parallel_attention, axis_name="s", is_causal=True)
    by_shard_map = jax.shard_map(
        functools.partial(gradients, ring),
        mesh=mesh,
        in_specs=(spec,) * 4,
        out_specs=(spec,) * 4,
        check_vma=False,
    )
    assert events(by_jit) == events(by_shard_map)


@pytest.mark.parametrize("name", ["tokens", "keys", "one query", "heads"])
def test_what_devices_do_not_divide_is_gathered(name: str) -> None:
    """A slice is divided over as many devices as what it was taken from, the last of which has less."""
    calls: dict[str, tuple[Any, Callable]] = {
        "tokens": (P(None, "x"), lambda x: [x[:, :-1]] * 3),
        "keys": (P(None, "x"), lambda x: [x, x[:, :-1], x[:, :-1]]),
        "one query": (P(None, "x"), lambda x: [x[:, -1:], x, x]),
        "heads": (P(None, None, "x"), lambda x: [x[:, :, :-1]] * 3),
    }
    spec, slices = calls[name]
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    x = random(0, 1, 8, 2, 4)
    run = functools.partial(fa.flash_attention, is_causal=True, align="end")
    out = jax.jit(lambda x: run(*slices(x)))(jax.device_put(x, NamedSharding(mesh, spec)))
    expected = programs.evaluate(lambda x: run(*slices(x), implementation="reference"), x)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_xla_finds_the_source_lines_of_a_partition(capfd: pytest.CaptureFixture) -> None:
    """It did not end on this program: it followed a cycle of stack frames that another module numbered."""
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    divided = NamedSharding(mesh, P(None, "x"))
    q, k, v = (jax.device_put(random(i, 2, 16, n, 8), divided) for i, n in enumerate((4, 2, 2)))
    slopes = jnp.ones(4)

    def loss(*args: Any) -> Any:
        *qkv, slopes = args
        out = fa.flash_attention(*qkv, is_causal=True, score=fa.alibi(slopes))
        return jnp.sin(out).sum()

    limit = getattr(jax.config, sharding.LOCATIONS)
    jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v, slopes).compile()
    assert getattr(jax.config, sharding.LOCATIONS) == limit != 0
    assert "stack_frame" not in capfd.readouterr().err
