"""The mma.sync kernels as a backend: lengths, shards and values that are not finite are dealt with outside of them."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import LOG2E, round_up
from pallas_fa2.backends.common.aux_gradients import aux_gradients
from pallas_fa2.backends.common.aux_grads import AuxGrads, pairwise_from_fragments
from pallas_fa2.backends.common.batching import batched
from pallas_fa2.backends.common.causal_trim import causal_trim
from pallas_fa2.backends.common.compiled_mods import CompiledMods, RuntimeAux
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.flash_forward import FlashForward
from pallas_fa2.backends.common.second_order import forbid_second_order
from pallas_fa2.backends.common.split_float32 import split_for_gradients
from pallas_fa2.backends.protocol import Backend, Configuration, KernelDescription
from pallas_fa2.backends.sm80 import configs, first_use, support
from pallas_fa2.backends.sm80.backward.config import BackwardConfig
from pallas_fa2.backends.sm80.backward.dq_kernel import query_gradients
from pallas_fa2.backends.sm80.backward.kernel import gradients
from pallas_fa2.backends.sm80.backward.memory import Inputs
from pallas_fa2.backends.sm80.backward.schedule import block_mask_by_keys
from pallas_fa2.backends.sm80.decode.cached_forward import CACHED_FORWARD
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.backends.sm80.forward.kernel import attention
from pallas_fa2.backends.sm80.tile_list import TileList
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.call_spec import CallSpec, Operands, split_floats

log = logging.getLogger("pallas_fa2")


def forward(
    spec: CallSpec,
    config: ForwardConfig | DecodeConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: Operands,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [B, T, N, Hv]` and natural `lse [B, N, T]`."""
    if isinstance(config, DecodeConfig):
        return FLASH_FORWARD.forward(spec, config, q, k, v, operands)
    trim = causal_trim(spec)
    mods = CompiledMods.compile(spec, trim, trim.operands(operands), *config.tile)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, runtime: RuntimeAux) -> tuple:
        kernel_spec = mods.make_kernel_spec(q.shape[0], q.shape[2], k.shape[2])
        plan = mods.plan_mask(kernel_spec, runtime, config.tile, q_axis=0)
        if kernel_spec.guards_nonfinite and not config.is_split:  # the split does so itself
            k, v = _sanitize_keys(k, v)
        tiles = TileList.build(plan.block_mask, plan.kernel_spec, config.num_ctas)
        return attention(plan.kernel_spec, config, q, k, v, tiles, plan.aux, plan.mask_bits)

    axes = mods.sharded_axes(("b.n.", "b.k.", "b.k."), ("b.n.", "bn."))
    key = mods.launch_key("ampere_forward", spec, config)
    out, lse = batched(kernel, support.batch_limit(spec), axes, key)(
        trim.queries(q), trim.keys(k), trim.keys(v), mods.runtime
    )
    return trim.untrim_queries(out), trim.untrim_queries(lse, -jnp.inf, axis=2)


def backward(
    spec: CallSpec,
    config: BackwardConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    operands: Operands,
    needs_grad: tuple[bool, ...],
) -> tuple[jax.Array, jax.Array, jax.Array, tuple]:
    """Return the gradients of q, k, v and of the floating-point inputs of scores; 0 for those that need none."""
    trim = causal_trim(spec)
    trimmed_operands = trim.operands(operands)
    mods = CompiledMods.compile(spec, trim, trimmed_operands, *config.tile, needs_grad)
    dq_mods = dq_aux = None
    if config.dq is not None:
        dq_mods = CompiledMods.compile(spec, trim, trimmed_operands, *config.dq.tile)
        dq_aux = dq_mods.runtime
    q, k, v, out, lse, dout, dlse = forbid_second_order((q, k, v, out, lse, dout, dlse))

    def kernel(*args: Any) -> tuple:
        q, k, v, out, dout, lse, dlse, dq_aux, runtime = args
        kernel_spec = mods.make_kernel_spec(q.shape[0], q.shape[2], k.shape[2])
        delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        delta = -delta if dlse is None else dlse - delta
        like, scales = (q, k, v), None
        if config.is_split:
            lse = _mark_nonfinite_queries(q, dout, lse)
            dims, multiples = (config.head_dim, config.value_dim), config.multiples
            q, k, v, dout, scales = split_for_gradients(q, k, v, dout, dims, multiples)
        elif kernel_spec.guards_nonfinite:
            q, k, dout, lse = _sanitize_for_backward(q, k, dout, lse)
        extra = -kernel_spec.q_len % config.rows_multiple
        lse, delta = (
            jnp.pad(x, ((0, 0), (0, 0), (0, extra)), constant_values=fill)
            for x, fill in ((lse, -jnp.inf), (delta, 0.0))
        )
        inputs = Inputs(q, k, v, dout, lse, delta, scales=scales)
        plan = mods.plan_mask(kernel_spec, runtime, config.tile, q_axis=1)
        block_mask = None if plan.classes is None else block_mask_by_keys(plan.classes)
        tiles = TileList.build(block_mask, plan.kernel_spec, config.num_ctas)
        by_keys = inputs._replace(tiles=tiles, aux=plan.aux, mask_bits=plan.mask_bits)
        dq, dk, dv, aux_grads = gradients(plan.kernel_spec, config, by_keys, like)
        if config.dq is not None:
            assert dq_mods is not None
            plan = dq_mods.plan_mask(kernel_spec, dq_aux, config.dq.tile, q_axis=0)
            tiles = TileList.build(plan.block_mask, plan.kernel_spec, config.dq.num_ctas)
            inputs = inputs._replace(tiles=tiles, aux=plan.aux, mask_bits=plan.mask_bits)
            dq = query_gradients(plan.kernel_spec, config.dq, inputs, like[0])
        return dq, dk, dv, aux_grads

    arguments = ("b.n.", "b.k.", "b.k.", "b.n.", "b.n.", "bn.", None if dlse is None else "bn.")
    dq_axes = None if dq_aux is None else dq_aux.axes
    axes = mods.sharded_axes(
        (*arguments, dq_axes), ("b.n.", "b.k.", "b.k.", AuxGrads.axes(mods.score))
    )
    dq_key = None if dq_mods is None else dq_mods.launch_key("dq", spec)
    key = mods.launch_key("ampere_backward", spec, config, needs_grad, dq_key)
    dq, dk, dv, aux_grads = batched(kernel, support.batch_limit(spec), axes, key)(
        trim.queries(q),
        trim.keys(k),
        trim.keys(v),
        trim.queries(out),
        trim.queries(dout),
        trim.queries(jnp.where(lse == -jnp.inf, -jnp.inf, lse * -LOG2E), 2),
        None if dlse is None else trim.queries(dlse, 2),
        dq_aux,
        mods.runtime,
    )
    dq = trim.untrim_queries(dq)
    dk, dv = (trim.untrim_keys(x, spec.kv_len) for x in (dk, dv))
    floats, trimmed = (split_floats(x.scores)[0] for x in (operands, trimmed_operands))
    dscores = aux_gradients(mods.spec, mods.score, aux_grads, trimmed, pairwise_from_fragments)
    dscores = [trim.untrim_aux(dx, x) for dx, x in zip(dscores, floats, strict=True)]
    return dq, dk, dv, tuple(dscores)


def _sanitize_keys(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return values that are finite, and keys that are NaN where their values were not.

    P V multiplies hidden values by 0, and 0 times infinity is NaN. The scores of such a key are NaN, and with them the
    output, unless the mask hides them.
    """
    finite = jnp.isfinite(v).all(-1, keepdims=True)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)


def _sanitize_for_backward(
    q: jax.Array, k: jax.Array, dout: jax.Array, lse: jax.Array
) -> tuple[jax.Array, ...]:
    """Return q, k and dout that are finite, and an lse that is NaN in rows where q or dout was not.

    P and dS are 0 where a mask hides a pair, and multiply these. Elsewhere, lse or delta is NaN where one of them was
    not finite, and with it P or dS.
    """
    lse = _mark_nonfinite_queries(q, dout, lse)
    q, k, dout = (jnp.where(jnp.isfinite(x).all(-1, keepdims=True), x, 0) for x in (q, k, dout))
    return q, k, dout, lse


def _mark_nonfinite_queries(q: jax.Array, dout: jax.Array, lse: jax.Array) -> jax.Array:
    """Return an lse that is NaN where a query's q or dO is not finite, unless the query sees no key: then it stays
    -inf, so that its P is 0 for keys past the end as well, which no mask hides."""
    finite = (jnp.isfinite(q).all(-1) & jnp.isfinite(dout).all(-1)).swapaxes(1, 2)
    return jnp.where(finite | (lse == -jnp.inf), lse, jnp.nan)


def describe(
    spec: CallSpec,
    forward: ForwardConfig | DecodeConfig,
    backward: BackwardConfig | None,
    operands: Operands,
) -> KernelDescription:
    """Describe the kernels of a call, of which nothing runs."""
    blocks, split = ", blocks from lists" if spec.has_general_mask else "", ""
    if isinstance(forward, DecodeConfig):
        tile = spec.q_len, forward.block_kv
        forward_text = f"mma.sync, {FLASH_FORWARD.describe(spec, forward)}"
    else:
        tile = forward.tile
        split = ", float32 as two float16 numbers, three products" if forward.is_split else ""
        forward_text = (
            f"mma.sync, a CTA of {4 * forward.warpgroups} warps for {forward.block_q} queries, {forward.block_kv} keys at "
            f"a time{blocks}{split}"
        )
    if backward is None:
        return KernelDescription(tile, forward_text, None, 0)
    rows = spec.batch * spec.q_heads * round_up(spec.q_len, backward.rows_multiple)
    keys = spec.batch * spec.q_heads * round_up(spec.kv_len, backward.block_kv)
    dims = backward.head_dim + backward.value_dim
    shares = 0 if spec.group == 1 else keys * dims
    # A copy of q, k, v and dout in two terms of 16 bits.
    tokens = spec.batch * (spec.q_len * spec.q_heads + spec.kv_len * spec.kv_heads)
    copies = tokens * dims if backward.is_split else 0
    if backward.dq is None:
        dq, columns = "float32 dQ, atomic additions in any order", backward.head_dim
    else:
        kernels = (
            "dK, dV and dQ by a kernel each" if backward.apart else "dQ by a kernel of its own"
        )
        dq, columns = f"{kernels}, dQ of {backward.dq.block_q} queries a CTA", 0
    return KernelDescription(
        tile,
        forward_text,
        f"mma.sync, a CTA of {4 * backward.warpgroups} warps for {backward.block_kv} keys, {backward.block_q} queries at "
        f"a time{blocks}; {dq}{split}",
        4 * (rows * (columns + 2 * backward.terms) + shares + copies),
    )


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    """Return why the kernels cannot run a call on a device, or must not, or None."""
    reason = support.unsupported_reason(spec, device)
    return reason or first_use.failure(spec, device, (forward, backward))


def cached_unsupported_reason(spec: CachedSpec, device: Device) -> str | None:
    """Return why the decode kernel cannot run a call on a cache on a device, or must not, or None."""
    reason = support.unsupported_device(device) or CACHED_FORWARD.unsupported_reason(spec, device)
    return reason or first_use.failure(
        spec, device, (CACHED_FORWARD.configure, CACHED_FORWARD.forward)
    )


CHECKED_CACHED_FORWARD = dataclasses.replace(
    CACHED_FORWARD, unsupported_reason=cached_unsupported_reason
)
FLASH_FORWARD = FlashForward(CHECKED_CACHED_FORWARD)


def configure(spec: CallSpec, device: Device) -> Configuration:
    """Return the configuration of a call on this device: few queries have the decode kernel."""
    configuration = configs.configure(spec, device)
    few = FLASH_FORWARD.configure(spec, device)
    return configuration if few is None else configuration._replace(forward=few)


def candidates(spec: CallSpec, device: Device) -> list[ForwardConfig]:
    """Return the forward configs that `autotune` tries, without those that must not be used on a device; the decode
    kernel has one."""
    right = []
    if FLASH_FORWARD.configure(spec, device) is not None:
        return right
    for config in configs.candidates(spec, device):
        reason = first_use.failure(spec, device, (forward, backward), config)
        if reason is None:
            right.append(config)
        else:
            log.warning("%s is not measured: %s", config, reason)
    return right


BACKEND = Backend(
    name="ampere",
    unsupported_reason=unsupported_reason,
    configure=configure,
    forward=forward,
    backward=backward,
    describe=describe,
    candidates=candidates,
    config_type=ForwardConfig,
    is_fused=True,
    cached=CHECKED_CACHED_FORWARD,
)
