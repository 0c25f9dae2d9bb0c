"""The sm90 kernels as a `Backend`: from a call's arrays to those of kernels and back."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import LOG2E, round_up
from pallas_fa2.backends.common.aux_gradients import aux_gradients
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.batching import batched
from pallas_fa2.backends.common.causal_trim import causal_trim
from pallas_fa2.backends.common.compiled_mods import CompiledMods, RuntimeAux
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.second_order import forbid_second_order
from pallas_fa2.backends.protocol import Backend, KernelDescription
from pallas_fa2.backends.sm90 import configs, support
from pallas_fa2.backends.sm90.backward import postprocess, preprocess
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.dq import DqRequest, DqStrategy, choose
from pallas_fa2.backends.sm90.backward.kernel import gradients
from pallas_fa2.backends.sm90.cached_forward import CACHED_FORWARD
from pallas_fa2.backends.sm90.decode.cached_forward import FLASH_FORWARD
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.kernel import attention
from pallas_fa2.ir import block_classes, coverage
from pallas_fa2.ir.call_spec import CallSpec, Operands, split_floats


def _dq_strategy(
    mods: CompiledMods,
    spec: KernelSpec,
    config: BackwardConfig,
    runtime: RuntimeAux,
    classes: Any,
) -> DqStrategy:
    """Return how the backward of a launch whose mask is planned sums dQ, with its schedule."""
    possible = functools.partial(block_classes.data_independent_classes, mods.spec, *config.tile)
    # A CTA with a whole head visits empty blocks as well: where a mask is precomputed, their bits must be too.
    whole_heads = not spec.uses_mask_bits or mods.get_classes(runtime) is None
    return choose(DqRequest(spec, config, classes, possible, whole_heads))


def describe(
    spec: CallSpec,
    forward: ForwardConfig | DecodeConfig,
    backward: BackwardConfig,
    operands: Operands,
) -> KernelDescription:
    """Describe the forward and the backward of a call, of which nothing runs."""
    trim = causal_trim(spec)
    strategies = []

    def plan_backward(operands: Operands) -> None:
        mods = CompiledMods.compile(spec, trim, trim.operands(operands), *backward.tile)
        kernel_spec = mods.make_kernel_spec(spec.batch, spec.q_heads, spec.kv_heads)
        plan = mods.plan_mask(kernel_spec, mods.runtime, backward.tile, q_axis=1)
        strategies.append(
            _dq_strategy(mods, plan.kernel_spec, backward, mods.runtime, plan.classes)
        )

    jax.eval_shape(plan_backward, operands)
    (strategy,) = strategies
    q_stages, do_stages = backward.stages
    tiles = "tiles listed by a block mask" if spec.has_general_mask else "tiles in order"
    pairs = ", in pairs" if backward.two_cta else ""
    if isinstance(forward, DecodeConfig):
        tile, text = (spec.q_len, forward.block_kv), FLASH_FORWARD.describe(spec, forward)
    else:
        tile = forward.tile
        text = (
            f"{forward.block_q} queries x {forward.block_kv} keys, {forward.stages} stages, {forward.warpgroups} "
            f"warpgroups multiply, {forward.num_ctas} persistent CTAs, {tiles}"
        )
    return KernelDescription(
        tile,
        text,
        f"{backward.block_kv} keys x {backward.block_q} queries, {q_stages} stages of Q, {do_stages} of dO, "
        f"{backward.num_ctas} persistent CTAs{pairs}, {tiles}; {strategy.summary}",
        strategy.workspace_bytes,
    )


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
        return attention(
            plan.kernel_spec, config, q, k, v, plan.block_mask, plan.aux, plan.mask_bits
        )

    axes = mods.sharded_axes(("b.n.", "b.k.", "b.k."), ("b.n.", "bn."))
    key = mods.launch_key("hopper_forward", spec, config)
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
    trimmed = trim.operands(operands)
    mods = CompiledMods.compile(spec, trim, trimmed, *config.tile, needs_grad)
    if mods.make_kernel_spec(spec.batch, spec.q_heads, spec.kv_heads).guards_nonfinite:
        unattended = coverage.batch_entries_without_self_attention(mods.spec, trimmed)
        mods = mods._replace(runtime=mods.runtime._replace(may_have_unattended=unattended))
    q, k, v, out, lse, dout, dlse = forbid_second_order((q, k, v, out, lse, dout, dlse))

    def kernel(*args: Any) -> tuple:
        q, k, v, out, dout, lse, dlse, runtime = args
        kernel_spec = mods.make_kernel_spec(q.shape[0], q.shape[2], k.shape[2])
        factors = preprocess.BackwardOperands(q, k, v, dout)
        plan = mods.plan_mask(kernel_spec, runtime, config.tile, q_axis=1)
        strategy = _dq_strategy(mods, plan.kernel_spec, config, runtime, plan.classes)
        factors, delta, zeros = preprocess.backward_preprocess(
            plan.kernel_spec,
            config,
            factors,
            out,
            lse,
            strategy.needs_zeros,
            runtime.may_have_unattended,
        )
        delta = delta if dlse is None else delta + dlse
        return gradients(
            strategy, factors, lse, delta, zeros, plan.classes, plan.aux, plan.mask_bits
        )

    def pad_rows(x: jax.Array, fill: float) -> jax.Array:
        extra = round_up(trim.q_len, config.block_q) - trim.q_len
        return jnp.pad(trim.queries(x, 2), ((0, 0), (0, 0), (0, extra)), constant_values=fill)

    arguments = ("b.n.", "b.k.", "b.k.", "b.n.", "b.n.", "bn.", None if dlse is None else "bn.")
    axes = mods.sharded_axes(arguments, ("b.n.", "b.k.", "b.k.", AuxGrads.axes(mods.score)))
    key = mods.launch_key("hopper_backward", spec, config, needs_grad)
    dq, dk, dv, sums = batched(kernel, support.batch_limit(spec), axes, key)(
        trim.queries(q),
        trim.keys(k),
        trim.keys(v),
        trim.queries(out),
        trim.queries(dout),
        pad_rows(jnp.where(lse == -jnp.inf, -jnp.inf, lse * -LOG2E), -jnp.inf),
        None if dlse is None else pad_rows(dlse, 0.0),
        mods.runtime,
    )
    dq = trim.untrim_queries(dq)
    dk = trim.untrim_keys(dk, spec.kv_len)
    dv = trim.untrim_keys(dv, spec.kv_len)
    floats, trimmed_floats = (split_floats(x.scores)[0] for x in (operands, trimmed))
    dscores = aux_gradients(
        mods.spec, mods.score, sums, trimmed_floats, postprocess.finalize_pairwise_grad
    )
    dscores = [trim.untrim_aux(dx, x) for dx, x in zip(dscores, floats, strict=True)]
    return dq, dk, dv, tuple(dscores)


BACKEND = Backend(
    name="hopper",
    unsupported_reason=support.unsupported_reason,
    configure=configs.configure,
    forward=forward,
    backward=backward,
    describe=describe,
    candidates=configs.candidates,
    config_type=ForwardConfig,
    cached=CACHED_FORWARD,
    is_fused=True,
)
