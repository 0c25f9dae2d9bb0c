"""Less common transformations of blockwise against the reference: every kind of derivative, several
devices, export, donation, NaN checks, x64. The common ones are in test_autodiff.py."""

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from pallas_fa2 import api
from pallas_fa2.backends.common.primitives import launch
from pallas_fa2.backends.xla import blockwise
from pallas_fa2.device import Device
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.parse_call import parse_call
from tests.fuzz.case import Case
from tests.fuzz.check import check
from tests.fuzz.masks import And, Causal, Dense, Lengths
from tests.fuzz.scores import Bias, SoftCap
from tests.support import compile_gate
from tests.support.hopper import planned_for_h200
from tests.support.tiers import slow, slow_but

B, T, N, K, H = 4, 20, 4, 2, 8

H200 = Device("gpu", "NVIDIA H200", "9.0", 132)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockwise, "block_sizes", lambda spec: (8, 8))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


Q, KEY, V = normal(0, B, T, N, H), normal(1, B, T, K, H), normal(2, B, T, K, H)
# The last batch entry has no key at all.
LENGTHS, SLOPES = jnp.array([20, 11, 3, 0]), jnp.array([0.5, 0.1, 0.0, -0.3])


def loss(implementation: str, q: Any, k: Any, v: Any, lengths: Any, slopes: Any) -> jax.Array:
    out, lse = fa.flash_attention(
        q, k, v, mask=fa.Causal() & fa.Lengths(kv=lengths), score=fa.alibi(slopes),
        return_lse=True, implementation=implementation,
    )  # fmt: skip
    out = out.astype(jnp.float32)
    return jnp.sum(out * jnp.cos(out)) + jnp.sum(jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)))


ARGUMENTS = (Q, KEY, V, LENGTHS, SLOPES)


def gradients(implementation: str) -> Callable:
    """Return a function of the gradients of q, k, v and the slopes."""
    return jax.grad(functools.partial(loss, implementation), (0, 1, 2, 4))


def assert_same(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_close(actual, expected, rtol=5e-5, atol=5e-5)


def of_query(implementation: str) -> Callable:
    """A loss of one query, small enough for whole Jacobians."""

    def fn(q: Any) -> jax.Array:
        return loss(implementation, q, KEY[:1, :, :1], V[:1, :, :1], LENGTHS[1:2], SLOPES[:1])

    return fn


QUERY = Q[:1, :, :1]


def test_jacobian() -> None:
    def rows(implementation: str) -> Any:
        def fn(q: Any) -> Any:
            out = fa.flash_attention(
                q, KEY[:1, :, :1], V[:1, :, :1], mask=fa.Causal(), implementation=implementation
            )
            return out[0, 9:12]

        return jax.jit(jax.jacobian(fn))(QUERY)

    actual = rows("blockwise")
    assert_same(actual, rows("reference"))
    assert not np.any(actual[:, :, :, 0, :9]) and np.any(
        actual[0, :, :, 0, 9]
    )  # a row is its query's


FORWARD: dict[str, Callable] = {
    "jvp": lambda fn: jax.jvp(fn, (QUERY,), (QUERY,))[1],
    "jit of jvp": lambda fn: jax.jit(lambda q: jax.jvp(fn, (q,), (q,))[1])(QUERY),
    "jvp of jit": lambda fn: jax.jvp(jax.jit(fn), (QUERY,), (QUERY,))[1],
    "jacfwd": lambda fn: jnp.sum(jax.jacfwd(fn)(QUERY) * QUERY),
    "linearize": lambda fn: jax.linearize(fn, QUERY)[1](QUERY),
    "jvp of scan": lambda fn: jax.jvp(
        lambda q: jax.lax.scan(lambda c, _: (c, fn(c)), q, None, 2)[1][1], (QUERY,), (QUERY,)
    )[1],
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_is_the_references(name: str) -> None:
    """The directional derivative by reverse mode is the same number; blockwise has none, and says so."""
    expected = jnp.sum(jax.grad(of_query("blockwise"))(QUERY) * QUERY)
    assert_same(FORWARD[name](of_query("reference")), expected)
    with pytest.raises(TypeError, match="forward-mode autodiff") as caught:
        FORWARD[name](of_query("blockwise"))
    # JAX's own error, under `jit`, shows the line of ours that says so
    assert "reference" in "".join(traceback.format_exception(caught.value))


def test_the_hessian_of_the_reference() -> None:
    """Forward over reverse mode against reverse over reverse."""
    actual = jax.jit(jax.hessian(of_query("reference")))(QUERY)
    assert_same(actual, jax.jit(jax.jacrev(jax.grad(of_query("blockwise"))))(QUERY))
    with pytest.raises(
        TypeError, match=r"forward-mode autodiff .* ask for implementation='reference'"
    ):
        jax.hessian(of_query("blockwise"))(QUERY)


def test_second_derivatives() -> None:
    """A gradient penalty: gradients of all arguments of a function of all gradients."""

    def penalty(implementation: str) -> Any:
        def fn(q: Any, k: Any, v: Any, slopes: Any) -> Any:
            results = gradients(implementation)(q, k, v, LENGTHS, slopes)
            return sum(jnp.sum(jnp.sin(x)) for x in results)

        return jax.jit(jax.grad(fn, (0, 1, 2, 3)))(Q, KEY, V, SLOPES)

    for actual, expected in zip(penalty("blockwise"), penalty("reference"), strict=True):
        chex.assert_trees_all_close(actual, expected, rtol=0, atol=5e-5 * np.abs(expected).max())
        assert np.any(actual)


def test_the_hopper_kernels_have_first_derivatives_by_reverse_mode_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "device_of", lambda x: H200)
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)

    def fn(q: Any) -> Any:
        return jnp.sum(fa.flash_attention(q, q, q, implementation="hopper").astype(jnp.float32))

    assert jax.eval_shape(jax.grad(fn), x).shape == x.shape
    with pytest.raises(NotImplementedError, match="again; ask for implementation='blockwise'"):
        jax.eval_shape(jax.grad(lambda q: jnp.sum(jax.grad(fn)(q).astype(jnp.float32))), x)
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jit(lambda q: jax.jvp(fn, (q,), (q,))).trace(x).lower(lowering_platforms=("cuda",))


def eight_devices(kind: AxisType) -> jax.sharding.Mesh:
    """Batch entries over four devices, heads over two."""
    return jax.make_mesh((4, 2), ("b", "h"), (kind,) * 2, devices=jax.devices()[:8])


BY_HEAD = P("b", None, "h")
SPECS = (BY_HEAD, BY_HEAD, BY_HEAD, P("b"), P("h"))
OF_GRADIENTS = (*SPECS[:3], P("h"))


def put(mesh: jax.sharding.Mesh, specs: Any, args: Any = ARGUMENTS) -> list:
    return [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)]


@pytest.mark.parametrize("implementation", [slow("reference"), "blockwise"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shard_map_over_batch_and_heads(kind: AxisType, implementation: str) -> None:
    """Inside each device has a call of its own; slopes are shared by the batch, and their
    gradients summed over it."""
    mesh = eight_devices(kind)
    with jax.set_mesh(mesh):
        step = jax.shard_map(gradients(implementation), in_specs=SPECS, out_specs=OF_GRADIENTS)
        actual = jax.jit(step)(*put(mesh, SPECS))
    assert_same(jax.device_get(actual), jax.device_get(gradients("reference")(*ARGUMENTS)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_gradients_through_shard_map(kind: AxisType) -> None:
    mesh = eight_devices(kind)

    def total(*args: Any) -> jax.Array:
        def local(*args: Any) -> jax.Array:
            return jax.lax.psum(loss("blockwise", *args), ("b", "h"))

        return jax.shard_map(local, in_specs=SPECS, out_specs=P())(*args)

    with jax.set_mesh(mesh):
        actual = jax.jit(jax.grad(total, (0, 1, 2, 4)))(*put(mesh, SPECS))
    assert_same(jax.device_get(actual), jax.device_get(gradients("reference")(*ARGUMENTS)))


def test_each_device_of_a_shard_map_numbers_its_heads_for_dropout_from_0() -> None:
    """Devices number heads and batch entries from 0: two devices with the same numbers drop the same."""
    mesh = jax.make_mesh((2,), ("h",), (AxisType.Auto,), devices=jax.devices()[:2])
    same = jnp.concatenate([Q[:, :, :2]] * 2, 2)

    def drop(x: jax.Array) -> jax.Array:
        return fa.flash_attention(x, x, x, dropout_rate=0.5, dropout_rng=jax.random.key(0))

    spec = P(None, None, "h")
    actual = jax.device_get(
        jax.jit(jax.shard_map(drop, mesh=mesh, in_specs=spec, out_specs=spec))(same)
    )
    np.testing.assert_array_equal(actual[:, :, :2], actual[:, :, 2:])
    assert np.any(jax.device_get(jax.jit(drop)(same))[:, :, 2:] != actual[:, :, 2:])


CALLS: dict[str, Callable] = {
    "full": lambda ids, slopes: {},
    "packed": lambda ids, slopes: {"mask": fa.Causal() & fa.Segments(ids)},
    "window": lambda ids, slopes: {"mask": fa.Causal() & fa.Window(30)},
    "lengths": lambda ids, slopes: {"mask": fa.Lengths(kv=ids[:, 0])},
    "capped": lambda ids, slopes: {"mask": fa.Causal(), "score": fa.soft_cap(5.0)},
    "alibi": lambda ids, slopes: {"mask": fa.Segments(ids), "score": fa.alibi(slopes)},
    # The order of tiles depends on the mask's data, and kernels write claims into it.
    "deterministic": lambda ids, slopes: {
        "mask": fa.Segments(ids),
        "deterministic_gradients": True,
    },
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", slow_but(("packed", "alibi", "deterministic").__contains__, CALLS))
def test_hopper_is_traced_in_shard_map(
    name: str, kind: AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results vary over the mesh as its inputs do: else gradients would be summed over it."""
    monkeypatch.setattr(api, "device_of", lambda x: H200)
    result_axes = []

    def local(q: Any, k: Any, v: Any, ids: Any, slopes: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, slopes: Any) -> Any:
            options = CALLS[name](ids, slopes) | {"implementation": "hopper"}
            return fa.flash_attention(q, k, v, return_lse=True, **options)

        results, pull = jax.vjp(attend, q, k, v, slopes)
        results = (*results, *pull(results))
        result_axes.extend(jax.typeof(y).manual_axis_type.varying for y in results)
        return results

    mesh = eight_devices(kind)
    specs = (BY_HEAD, BY_HEAD, BY_HEAD, P("b"), P("h"))
    length = 1024 if name == "deterministic" else 128
    shapes = [(B, length, N, 64)] * 3 + [(B, length), (N,)]
    dtypes = [jnp.bfloat16] * 3 + [jnp.int32, jnp.float32]
    args = put(mesh, specs, map(jnp.zeros, shapes, dtypes))
    out = (BY_HEAD, P("b", "h"), BY_HEAD, BY_HEAD, BY_HEAD, P("h"))
    with jax.set_mesh(mesh):
        jax.make_jaxpr(jax.shard_map(local, in_specs=specs, out_specs=out))(*args)
    assert result_axes == [{"b", "h"}] * 5 + [{"h"}]


def test_a_kernel_writes_to_the_values_of_arrays_that_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    def store(*refs: Any) -> None:
        refs[-1][0] = 99

    monkeypatch.setattr(launch, "build_kernel", lambda *args: store)

    def run(x: Any) -> Any:
        result = launch.run_in_place("name", lambda *args: None, (), (), x, {}, 1)
        return match_varying_axes(result, x)

    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.arange(4)), [99, 1, 99, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["shard_map", "jit"])
def test_batch_entries_over_all_gpus(how: str) -> None:
    """As many as the machine has: the kernels' gradients are those of one device, of the slopes their
    sum."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("b",), (AxisType.Auto,), devices=devices)
    specs = (P("b"),) * 4 + (P(),)
    sizes = [(2 * len(devices), 300, heads, 64) for heads in (N, K, K)]
    q, k, v = (normal(i, *size).astype(jnp.bfloat16) for i, size in enumerate(sizes))
    args = q, k, v, jnp.arange(sizes[0][0]) * 60, SLOPES
    step = gradients("hopper")
    with jax.set_mesh(mesh):
        if how == "shard_map":
            step = jax.shard_map(step, in_specs=specs, out_specs=(*specs[:3], P()))
        actual = jax.device_get(jax.jit(step)(*put(mesh, specs, args)))
    alone = jax.device_get(jax.jit(gradients("hopper"))(*args))
    expected = jax.device_get(jax.jit(gradients("reference"))(*args))
    for x, y, z in zip(actual, alone, expected, strict=True):
        x, y, z = (np.asarray(a, np.float32) for a in (x, y, z))
        assert np.abs(x - y).max() <= 0.01 * np.abs(y).max()
        assert np.abs(x - z).max() <= 0.03 * np.abs(z).max()


@pytest.mark.parametrize("set_it", [True, slow(False)], ids=["set", "of the arrays"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_mesh_of_eight_devices(kind: AxisType, set_it: bool) -> None:
    """Gradients lie as their arguments do; values and mask data are sharded with the batch."""
    mesh = eight_devices(kind)
    out = tuple(NamedSharding(mesh, s) for s in OF_GRADIENTS)
    with jax.set_mesh(mesh) if set_it else contextlib.nullcontext():
        actual = jax.jit(gradients("blockwise"), out_shardings=out)(*put(mesh, SPECS))
    for x, sharding in zip(actual, out, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    assert_same(jax.device_get(actual), jax.device_get(gradients("reference")(*ARGUMENTS)))


@pytest.mark.parametrize("by_heads", [True, slow(False)])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sinks_on_a_mesh(kind: AxisType, by_heads: bool) -> None:
    def total(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
        out, lse = fa.flash_attention(
            q, k, v, sinks=sinks, return_lse=True, implementation="blockwise"
        )
        return jnp.sum(out * jnp.cos(out)) + jnp.sum(jnp.sin(lse))

    step, args = jax.jit(jax.grad(total, (0, 1, 2, 3))), (*ARGUMENTS[:3], SLOPES)
    mesh = eight_devices(kind)
    specs = (*SPECS[:3], P("h") if by_heads else P())
    with jax.set_mesh(mesh):
        actual = step(*put(mesh, specs, args))
    assert_same(jax.device_get(actual), jax.device_get(step(*args)))


@pytest.mark.parametrize("implementation", [slow("reference"), "blockwise"])
def test_export_and_back(implementation: str) -> None:
    step = jax.jit(gradients(implementation))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARGUMENTS]
    blob = jax.export.export(step)(*shapes).serialize()
    assert_same(jax.export.deserialize(blob).call(*ARGUMENTS), gradients("reference")(*ARGUMENTS))


def test_an_exported_call_is_differentiable() -> None:
    exported = jax.export.export(jax.jit(of_query("blockwise")))(QUERY)
    back = jax.export.deserialize(exported.serialize(vjp_order=1))
    assert_same(jax.grad(back.call)(QUERY), jax.grad(of_query("reference"))(QUERY))


def test_donated_buffers() -> None:
    step = jax.jit(gradients("blockwise"), donate_argnums=(0, 1, 2))
    donated = [jnp.array(x) for x in ARGUMENTS[:3]]
    actual = step(*donated, LENGTHS, SLOPES)
    assert all(x.is_deleted() for x in donated)
    assert_same(actual, gradients("reference")(*ARGUMENTS))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("compiled", [True, False])
def test_no_intermediate_value_is_nan(implementation: str, compiled: bool) -> None:
    """Rows without a key among them; jax_debug_nans looks at the result of every primitive."""
    step = gradients(implementation)
    with jax.debug_nans(True):
        jax.block_until_ready((jax.jit(step) if compiled else step)(*ARGUMENTS))
        with pytest.raises(FloatingPointError):
            jax.jit(jnp.log)(-1.0)


DOUBLE = Case(
    batch=(2,), q_len=33, kv_len=20, kv_heads=2, group=2, dtype="float64", blocks=(16, 8)
)  # fmt: skip


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_x64(implementation: str) -> None:
    mask = And(And(Causal(), Lengths()), Dense("bts", 0.7))
    case = dataclasses.replace(
        DOUBLE, mask=mask, scores=(Bias("nts"), SoftCap()), dropout=0.2, positions="Q"
    )
    check(case, implementation)


def test_a_function_traced_with_x64_is_traced_again_without() -> None:
    """Its constants have other dtypes."""

    def mask(q: Any, k: Any) -> Any:
        return jnp.where(q.index > 3, 1.5, 0.0) * k.index.astype(float) < 5.0

    def call() -> Any:
        return fa.flash_attention(Q, KEY, V, mask=mask, implementation="blockwise")

    expected = call()
    with jax.enable_x64(True):
        assert_same(call(), expected)
    assert_same(call(), expected)
    for enabled in (True, False, True):
        with jax.enable_x64(enabled):
            code = parse_call(Q, KEY, V, mask=mask)[0].mask
            assert code is not None and ("f64" in str(code.jaxpr)) == enabled


def test_hopper_kernels_take_python_numbers_under_x64() -> None:
    """The kernels compile; the interpreter has no 64-bit integers."""

    def mask(q: Any, k: Any) -> Any:
        return (q.index // 8 == k.index // 8) | (q.index % 3 < k.index % 2)

    options: dict = {"mask": fa.Chunked(16) | mask, "score": lambda s, q, k: 2**0.5 * s}

    def attend(q: Any, k: Any) -> Any:
        return fa.flash_attention(q, k, k, implementation="hopper", **options)

    x = jax.ShapeDtypeStruct((1, 90, 2, 64), jnp.bfloat16)
    with jax.enable_x64(True), planned_for_h200():
        reports = compile_gate.compile_for_h200(attend, x, x)
    assert "attention" in [report.name for report in reports]


def test_int64_data_under_x64() -> None:
    with jax.enable_x64(True):
        lengths = jnp.array([20, 11, 3, 0], jnp.int64)
        actual = gradients("blockwise")(Q, KEY, V, lengths, SLOPES)
        positions = jnp.arange(T) + 5
        out = fa.flash_attention(
            Q, KEY, V, mask=fa.Causal(), q_positions=positions, kv_positions=positions
        )
    assert_same(actual, gradients("reference")(*ARGUMENTS))
    assert_same(out, fa.flash_attention(Q, KEY, V, mask=fa.Causal()))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_shard_map_over_some_axes_of_a_mesh(
    inside: bool, kind: AxisType, implementation: str
) -> None:
    """The others are left to the partitioner, or are explicit (as `jax.make_mesh` makes them)."""
    mesh = jax.make_mesh((2, 2), ("d", "m"), (kind,) * 2, devices=jax.devices()[:4])
    options = {"mask": fa.Causal() & fa.Window(5), "implementation": implementation}

    def loss(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        out = fa.flash_attention(q, k, v, score=fa.bias(bias), **options)
        return jnp.sum(jnp.sin(out))

    arrays = [normal(seed, 4, 16, 4, 8) for seed in range(3)]
    bias = normal(3, 4, 1, 16, 16)  # of each batch entry
    every = tuple(range(4))
    expected = jax.grad(loss, every)(*arrays, bias)
    sharding = jax.sharding.NamedSharding(mesh, P("d", None, "m"))
    args = [jax.device_put(x, sharding) for x in arrays]
    args.append(jax.device_put(bias, jax.sharding.NamedSharding(mesh, P("d"))))

    def mapped(fn: Callable, out: Any) -> Callable:
        return jax.shard_map(fn, in_specs=(P("d"),) * 4, out_specs=out, axis_names={"d"}, mesh=mesh)

    def total(*args: Any) -> jax.Array:
        return jnp.sum(mapped(lambda *x: loss(*x)[None], P("d"))(*args))

    gradient = mapped(jax.grad(loss, every), (P("d"),) * 4) if inside else jax.grad(total, every)
    with jax.set_mesh(mesh):
        actual = jax.jit(gradient)(*args)
    assert_same(actual, expected)


def test_the_reference_is_not_recomputed_where_all_axes_are_manual() -> None:
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Auto,), devices=jax.devices()[:2])

    def loss(x: Any) -> jax.Array:
        return jnp.sum(fa.flash_attention(x, x, x, implementation="reference"))[None]

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(mapped(x))))(jnp.ones((2, 4, 1, 8))))
    assert "exp" in text and "checkpoint" not in text and "remat" not in text
