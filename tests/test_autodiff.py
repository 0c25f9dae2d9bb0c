"""Derivatives and transformations: jit, grad, vmap, remat, scan, sharding; what is saved."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import chex
import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pallas_fa2 as fa
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.backends.sm90 import support
from pallas_fa2.backends.xla import tile
from pallas_fa2.ir.call_spec import CallSpec
from tests.support.hopper import H200
from tests.support.tiers import slow_but

CAUSAL = fa.Causal()
B, T, N, K, H = 2, 40, 4, 2, 16


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def qkv(*lead: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(0, *lead, B, T, N, H), normal(1, *lead, B, T, K, H), normal(2, *lead, B, T, K, H)


def loss(implementation: str, q: Any, k: Any, v: Any, mask: Any = CAUSAL, **options: Any) -> Any:
    out, lse = fa.flash_attention(
        q, k, v, mask=mask, return_lse=True, implementation=implementation, **options
    )
    return jnp.sum(out * jnp.cos(out)) + jnp.sum(jnp.sin(lse))


def gradients(implementation: str, **options: Any) -> Any:
    return jax.grad(functools.partial(loss, implementation, **options), (0, 1, 2))


def assert_same(actual: Any, expected: Any) -> None:
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=2e-5)


def test_jit() -> None:
    assert_same(jax.jit(gradients("blockwise"))(*qkv()), gradients("reference")(*qkv()))


AXES = [a for a in itertools.product((0, None), repeat=3) if any(x == 0 for x in a)]
QUICK = (0, 0, 0), (None, None, 0), (None, 0, None)


@pytest.mark.parametrize("in_axes", slow_but(QUICK.__contains__, AXES), ids=str)
def test_vmap_with_every_choice_of_axes(in_axes: tuple) -> None:
    args = [x if a == 0 else x[0] for x, a in zip(qkv(3), in_axes, strict=True)]
    actual = jax.jit(jax.vmap(gradients("blockwise"), in_axes))(*args)
    full = [x if a == 0 else jnp.stack([x] * 3) for x, a in zip(args, in_axes, strict=True)]
    expected = [gradients("reference")(*(x[i] for x in full)) for i in range(3)]
    assert_same(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


@pytest.mark.parametrize("in_axes", slow_but(QUICK.__contains__, AXES), ids=str)
def test_gradients_of_vmap_with_every_choice_of_axes(
    in_axes: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If v alone is mapped, the gradients of q and k through lse must not be counted once for each entry."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # on several, `custom_vmap` maps all
    scale = 0.3 + 0.01 * AXES.index(in_axes)  # no other test has traced this call on eight devices
    args = [x if a == 0 else x[0] for x, a in zip(qkv(3), in_axes, strict=True)]

    def total(implementation: str) -> Any:
        mapped = jax.vmap(functools.partial(loss, implementation, scale=scale), in_axes)
        return jax.jit(jax.grad(lambda *x: jnp.sum(mapped(*x)), (0, 1, 2)))

    assert_same(total("blockwise")(*args), total("reference")(*args))


def test_gradients_of_vmap_over_dropout_keys() -> None:
    keys = jax.random.split(jax.random.key(5), 3)

    def total(implementation: str) -> Any:
        def one(key: Any, *args: Any) -> Any:
            return loss(implementation, *args, dropout_rate=0.3, dropout_rng=key)

        def loss_fn(*args: Any) -> Any:
            return jnp.sum(jax.vmap(one, (0, None, None, None))(keys, *args))

        return jax.jit(jax.grad(loss_fn, (0, 1, 2)))

    assert_same(total("blockwise")(*qkv()), total("reference")(*qkv()))


def test_vmap_over_a_later_axis_and_over_mask_data() -> None:
    q, k, v = qkv()
    lengths = jnp.array([[10, 40], [40, 3], [0, 7]])

    def one(q: Any, n: Any) -> Any:
        return gradients("blockwise", mask=CAUSAL & fa.Lengths(kv=n))(q, k, v)

    many = jnp.stack([q, 2 * q, 3 * q], 2)
    actual = jax.vmap(one, (2, 0))(many, lengths)
    expected = [
        gradients("reference", mask=CAUSAL & fa.Lengths(kv=lengths[i]))(many[:, :, i], k, v)
        for i in range(3)
    ]
    assert_same(actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


def test_checkpoint() -> None:
    remat = jax.checkpoint(functools.partial(loss, "blockwise"))
    assert_same(jax.jit(jax.grad(remat, (0, 1, 2)))(*qkv()), gradients("reference")(*qkv()))


def test_a_checkpoint_policy_saves_the_forward() -> None:
    shapes = [jax.ShapeDtypeStruct((1, 1536, n, 16), jnp.float32) for n in (2, 1, 1)]

    def loops(fn: Any) -> int:
        return jax.jit(jax.value_and_grad(fn)).lower(*shapes).compile().as_text().count(" while(")

    policies = jax.checkpoint_policies
    attend = functools.partial(loss, "blockwise")
    saved = policies.save_only_these_names("attention_out", "attention_lse")
    once, again = (
        loops(jax.checkpoint(attend, policy=policy)) for policy in (saved, policies.dots_saveable)
    )
    assert once == loops(attend) < again


def test_scan_over_layers() -> None:
    q, k, v = qkv()

    def stack(implementation: str, scales: jax.Array) -> jax.Array:
        def layer(x: Any, scale: Any) -> Any:
            return fa.flash_attention(
                x * scale, k, v, mask=CAUSAL, implementation=implementation
            ), None

        return jnp.sum(jax.lax.scan(layer, q, scales)[0] ** 2)

    scales = jnp.array([1.0, 0.5, 2.0])
    actual = jax.jit(jax.grad(functools.partial(stack, "blockwise")))(scales)
    assert_same(actual, jax.grad(functools.partial(stack, "reference"))(scales))


def test_eval_shape() -> None:
    out, lse = jax.eval_shape(
        functools.partial(fa.flash_attention, return_lse=True), *qkv(), mask=CAUSAL
    )
    assert (out.shape, lse.shape, lse.dtype) == ((B, T, N, H), (B, N, T), jnp.float32)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec(None, None, "x")], ids=str)
def test_sharded_jit(spec: PartitionSpec, axis_type: AxisType) -> None:
    """Batch or heads over two devices; the compiled program moves no array between them."""
    mesh = jax.make_mesh((2,), ("x",), (axis_type,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, spec)
    args = [jax.device_put(x, sharding) for x in qkv()]
    with jax.set_mesh(mesh):
        step = jax.jit(gradients("blockwise"), out_shardings=(sharding,) * 3)
        actual = step(*args)
        hlo = step.lower(*args).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", hlo)
    assert_same(jax.device_get(actual), jax.device_get(gradients("reference")(*qkv())))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_gradient_of_lse(implementation: str) -> None:
    """d lse_i / d q_i is the mean of the keys under the row's probabilities."""
    q, k, v = (x[:, :, :1] for x in qkv())

    def total(q: Any) -> Any:
        return jnp.sum(
            fa.flash_attention(q, k, v, return_lse=True, implementation=implementation)[1]
        )

    s = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(jnp.float32(H))
    expected = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), k) / jnp.sqrt(jnp.float32(H))
    assert_same(jax.grad(total)(q), expected)


def test_residuals_are_q_k_v_out_and_two_statistics_of_each_row() -> None:
    args = qkv()
    attend = functools.partial(
        fa.flash_attention, mask=CAUSAL, return_lse=True, implementation="blockwise"
    )
    (out, lse), pull = jax.vjp(attend, *args)
    saved = sorted(x.shape for x in jax.tree.leaves(pull))
    assert saved == sorted(x.shape for x in (*args, out, lse, lse))


def test_an_export_for_any_batch_with_batched_masks_and_biases() -> None:
    (batch,) = jax.export.symbolic_shape("batch")

    def step(q: Any, mask: Any, bias: Any) -> Any:
        def loss(q: Any, bias: Any) -> Any:
            return jnp.sum(fa.dot_product_attention(q, q, q, bias, mask) ** 2)

        return jax.grad(loss, (0, 1))(q, bias)

    def shapes(batch: Any) -> list:
        kinds = ((16, 4, 8), jnp.float32), ((1, 1, 16), bool), ((4, 16, 16), jnp.float32)
        return [jax.ShapeDtypeStruct((batch, *shape), dtype) for shape, dtype in kinds]

    exported = jax.export.export(jax.jit(step))(*shapes(batch))
    for count in (1, 3):
        some = [jax.random.normal(jax.random.key(1), x.shape) for x in shapes(count)]
        some[1] = some[1] > -1
        assert_same(exported.call(*some), step(*some))


def test_a_symbolic_length_runs_on_the_reference() -> None:
    b, t = jax.export.symbolic_shape("b,t")
    x = jax.ShapeDtypeStruct((b, t, N, H), jnp.float32)

    def step(q: Any) -> Any:
        return fa.flash_attention(q, q, q, is_causal=True)

    exported = jax.export.export(jax.jit(step))(x)
    for count in (1, 5):
        some = normal(0, 2, count, N, H)
        assert_same(exported.call(some), step(some))
    said = fa.explain(x, x, x)
    assert said.implementation == "reference" and "lengths that are known, and here T is t" in str(
        said
    )


@pytest.mark.parametrize("mask", [None, CAUSAL & fa.Window(5)], ids=str)
def test_an_export_for_any_batch(mask: Any) -> None:
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in qkv()]
    step = jax.jit(gradients("blockwise", mask=mask))
    exported = jax.export.export(step)(*shapes)
    for count in (1, 3):
        some = [jnp.concatenate([x] * count) for x in qkv()]
        assert_same(exported.call(*some), step(*some))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"mask": fa.SlidingWindow(3)}], ids=str)
def test_an_export_for_any_length_that_is_aligned_at_the_end(options: dict) -> None:
    (length,) = jax.export.symbolic_shape("length", constraints=["length >= 4"])

    def attend(q: Any, k: Any) -> Any:
        return fa.flash_attention(q, k, k, align="end", implementation="reference", **options)

    x = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))
    q, k = (jax.ShapeDtypeStruct((1, n, 2, 8), jnp.float32) for n in (4, length))
    assert "depends on the lengths" in str(fa.explain(q, k, k, align="end", **options))
    exported = jax.export.export(jax.jit(attend))(q, k)
    assert_same(exported.call(x[:, -4:], x), attend(x[:, -4:], x))


def test_sm90_does_not_support_a_symbolic_batch() -> None:
    spec = CallSpec(1, 64, 64, 2, 2, 64, 64, jnp.dtype("bfloat16"), 1.0)
    (batch,) = jax.export.symbolic_shape("batch")
    assert support.unsupported_reason(spec, H200) is None
    spec = dataclasses.replace(spec, batch=batch)
    assert "and here the batch is batch" in str(support.unsupported_reason(spec, H200))


@pytest.mark.parametrize("mask", [None, CAUSAL, CAUSAL & fa.Window(100)], ids=str)
def test_no_buffer_has_all_pairs(mask: Any) -> None:
    shapes = [jax.ShapeDtypeStruct((1, 1536, n, 16), jnp.float32) for n in (2, 1, 1)]
    step = jax.jit(jax.value_and_grad(functools.partial(loss, "blockwise", mask=mask), (0, 1, 2)))
    hlo = step.lower(*shapes).compile().as_text()
    assert not re.search(r"1536,1536", hlo)
    dense = jax.jit(functools.partial(loss, "reference", mask=mask)).lower(*shapes).compile()
    assert re.search(r"1536,1536", dense.as_text())  # the search would have found one


def test_a_new_lambda_does_not_recompile() -> None:
    from pallas_fa2.autodiff import attention

    q, k, v = qkv()

    def call(data: Any) -> Any:
        mask = fa.mask_fn(lambda q, k: (q.index >= k.index) & (k.tag >= 0))(tokens={"tag": data})
        return fa.flash_attention(q, k, v, mask=mask, score=fa.score_fn(lambda s, q, k: s * 0.5))

    call(jnp.zeros((T,), jnp.int32))
    before = attention._cache_size()
    for i in range(3):
        call(jnp.full((T,), i, jnp.int32))
    assert attention._cache_size() == before


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_gradients_of_score_data(implementation: str) -> None:
    q, k, v = qkv()
    bias, slopes, cap = normal(3, 1, N, T, T), normal(4, N) ** 2, jnp.float32(3.0)

    @fa.score_fn
    def capped(s: Any, q: Any, k: Any, c: Any) -> Any:
        return c.cap * jnp.tanh(s / c.cap)

    def ours(bias: Any, slopes: Any, cap: Any) -> Any:
        score = (fa.bias(bias), fa.alibi(slopes), capped(params={"cap": cap}))
        return loss(implementation, q, k, v, score=score)

    def dense(bias: Any, slopes: Any, cap: Any) -> Any:
        keys, values = jnp.repeat(k, N // K, 2), jnp.repeat(v, N // K, 2)
        s = jnp.einsum("btnh,bsnh->bnts", q, keys) / jnp.sqrt(jnp.float32(H)) + bias
        i = jnp.arange(T)
        distance = jnp.abs(i[:, None] - i[None]).astype(jnp.float32)
        s = s - slopes[None, :, None, None] * distance[None, None]
        s = cap * jnp.tanh(s / cap)
        s = jnp.where((i[:, None] >= i[None])[None, None], s, -jnp.inf)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), values)
        return jnp.sum(out * jnp.cos(out)) + jnp.sum(jnp.sin(jax.nn.logsumexp(s, -1)))

    args = (bias, slopes, cap)
    actual = jax.jit(jax.grad(ours, (0, 1, 2)))(*args)
    chex.assert_trees_all_close(actual, jax.grad(dense, (0, 1, 2))(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_backward_receives_which_gradients_are_needed(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blockwise, asked = BACKENDS["blockwise"], []

    def backward(*args: Any, **sums: Any) -> Any:
        asked.append(args[-1])
        return blockwise.backward(*args, **sums)

    monkeypatch.setitem(BACKENDS, "blockwise", dataclasses.replace(blockwise, backward=backward))

    def ours(q: Any, slopes: Any, bias: Any) -> Any:
        _, k, v = qkv()
        return loss("blockwise", q, k, v, score=(fa.alibi(slopes), fa.bias(bias)))

    args = qkv()[0], normal(4, N), normal(3, 1, 1, T, T)
    for wanted, expected in (
        ((0,), (False, False)),
        ((0, 1), (True, False)),
        ((2,), (False, True)),
    ):
        gradient = jax.grad(ours, wanted)
        (jax.jit(gradient) if compiled else gradient)(*args)
        assert asked == [expected]
        asked.clear()
        jax.clear_caches()


def test_row_sums_follow_from_the_logsumexp():
    """`blockwise` forms them of the lse of another backend's forward; an empty row has a total of 0."""
    sums = tile.sums_from_lse(jnp.array([2.5, -jnp.inf, -3.0]))
    assert sums.maximum.tolist() == [2.5, 0, -3] and sums.total.tolist() == [1, 0, 1]
