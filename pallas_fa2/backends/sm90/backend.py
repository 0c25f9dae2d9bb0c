"""The Hopper kernels as an implementation: what they refuse, and the arrays in their form."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import LOG2E, round_up
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.batching import batched
from pallas_fa2.backends.common.causal_trim import causal_trim
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.protocol import Backend, KernelDescription
from pallas_fa2.backends.sm90 import configs, support
from pallas_fa2.backends.sm90.backward import aux_gradients, preprocess
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.dq import DqRequest, DqStrategy, choose
from pallas_fa2.backends.sm90.backward.kernel import gradients
from pallas_fa2.backends.sm90.compiled_mods import CompiledMods, RuntimeAux
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.kernel import attention
from pallas_fa2.ir import block_classes, coverage
from pallas_fa2.ir.call_spec import CallSpec, Operands, split_floats


def _dq_strategy(
    extras: CompiledMods,
    problem: KernelSpec,
    config: BackwardConfig,
    traced: RuntimeAux,
    classes: Any,
) -> DqStrategy:
    """Return how the backward of a launch whose mask is planned sums dQ, with its schedule."""
    possible = functools.partial(block_classes.data_independent_classes, extras.spec, *config.tile)
    # Whole heads visit blocks that nobody sees.
    answered = not problem.uses_mask_bits or extras.classes_of(traced) is None
    return choose(DqRequest(problem, config, classes, possible, answered))


def describe(
    spec: CallSpec,
    forward: ForwardConfig,
    backward: BackwardConfig,
    operands: Operands,
) -> KernelDescription:
    """Describes the forward and the backward of a call, of which nothing runs."""
    trimmed = causal_trim(spec)
    strategies = []

    def plan_backward(operands: Operands) -> None:
        extras = CompiledMods.compile(spec, trimmed, trimmed.operands(operands), *backward.tile)
        problem = extras.kernel_spec(spec.batch, spec.q_heads, spec.kv_heads)
        problem, _, classes, *_ = extras.plan_mask(problem, extras.runtime, backward.tile, q_axis=1)
        strategies.append(_dq_strategy(extras, problem, backward, extras.runtime, classes))

    jax.eval_shape(plan_backward, operands)
    (strategy,) = strategies
    q_stages, do_stages = backward.stages
    tiles = "tiles from lists of those that are seen" if spec.has_general_mask else "tiles in order"
    pairs = ", in pairs" if backward.two_cta else ""
    return KernelDescription(
        forward.tile,
        f"{forward.block_q} queries x {forward.block_kv} keys, {forward.stages} stages, {forward.warpgroups} "
        f"warpgroups multiply, {forward.num_ctas} persistent CTAs, {tiles}",
        f"{backward.block_kv} keys x {backward.block_q} queries, {q_stages} stages of Q, {do_stages} of dO, "
        f"{backward.num_ctas} persistent CTAs{pairs}, {tiles}; {strategy.summary}",
        strategy.workspace_bytes,
    )


@jax.custom_jvp
def _forbid_second_order(arrays: tuple) -> tuple:
    return arrays


@_forbid_second_order.defjvp
def _(*_: Any) -> Any:
    raise NotImplementedError(
        "the gradients of the hopper kernels cannot be differentiated again; ask for "
        "implementation='blockwise' where second derivatives are needed"
    )


def forward(
    spec: CallSpec,
    config: ForwardConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: Operands,
) -> tuple[jax.Array, jax.Array]:
    """`out [B, T, N, Hv]` and natural `lse [B, N, T]`."""
    part = causal_trim(spec)
    extras = CompiledMods.compile(
        spec, part, part.operands(operands), *config.tile, may_have_parts=True
    )

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, traced: RuntimeAux) -> tuple:
        problem = extras.kernel_spec(q.shape[0], q.shape[2], k.shape[2])
        problem, data, _, seen, found = extras.plan_mask(problem, traced, config.tile, q_axis=0)
        return attention(problem, config, q, k, v, seen, data, found)

    axes = extras.sharded_axes(("b.n.", "b.k.", "b.k."), ("b.n.", "bn."))
    out, lse = batched(kernel, support.batch_limit(spec), axes)(
        part.queries(q), part.keys(k), part.keys(v), extras.runtime
    )
    return part.untrim_queries(out), part.untrim_queries(lse, -jnp.inf, axis=2)


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
    wanted: tuple[bool, ...],
) -> tuple[jax.Array, jax.Array, jax.Array, tuple]:
    """Gradients of q, k, v and of the data of scores; 0 for those that are not wanted."""
    part = causal_trim(spec)
    part_operands = part.operands(operands)
    extras = CompiledMods.compile(spec, part, part_operands, *config.tile, wanted)
    if extras.kernel_spec(spec.batch, spec.q_heads, spec.kv_heads).guards_nonfinite:
        in_doubt = coverage.batch_entries_without_self_attention(extras.spec, part_operands)
        extras = extras._replace(runtime=extras.runtime._replace(may_have_unattended=in_doubt))
    q, k, v, out, lse, dout, dlse = _forbid_second_order((q, k, v, out, lse, dout, dlse))

    def kernel(*args: Any) -> tuple:
        q, k, v, out, dout, lse, dlse, traced = args
        problem = extras.kernel_spec(q.shape[0], q.shape[2], k.shape[2])
        factors = preprocess.BackwardOperands(q, k, v, dout)
        problem, data, classes, _, found = extras.plan_mask(problem, traced, config.tile, q_axis=1)
        strategy = _dq_strategy(extras, problem, config, traced, classes)
        factors, delta, zeros = preprocess.backward_preprocess(
            problem, config, factors, out, lse, strategy.needs_zeros, traced.may_have_unattended
        )
        delta = delta if dlse is None else delta + dlse
        return gradients(strategy, factors, lse, delta, zeros, classes, data, found)

    def rows(x: jax.Array, fill: float) -> jax.Array:
        extra = round_up(part.q_len, config.block_q) - part.q_len
        return jnp.pad(part.queries(x, 2), ((0, 0), (0, 0), (0, extra)), constant_values=fill)

    arguments = ("b.n.", "b.k.", "b.k.", "b.n.", "b.n.", "bn.", None if dlse is None else "bn.")
    axes = extras.sharded_axes(arguments, ("b.n.", "b.k.", "b.k.", AuxGrads.axes(extras.score)))
    dq, dk, dv, sums = batched(kernel, support.batch_limit(spec), axes)(
        part.queries(q),
        part.keys(k),
        part.keys(v),
        part.queries(out),
        part.queries(dout),
        rows(jnp.where(lse == -jnp.inf, -jnp.inf, lse * -LOG2E), -jnp.inf),
        None if dlse is None else rows(dlse, 0.0),
        extras.runtime,
    )
    dq = part.untrim_queries(dq)
    dk = part.untrim_keys(dk, spec.kv_len)
    dv = part.untrim_keys(dv, spec.kv_len)
    floats, part_floats = (split_floats(x.scores)[0] for x in (operands, part_operands))
    dscores = aux_gradients.aux_gradients(extras.spec, extras.score, sums, part_floats)
    dscores = [part.untrim_aux(dx, x) for dx, x in zip(dscores, floats, strict=True)]
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
    is_fused=True,
)
