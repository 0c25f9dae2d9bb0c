"""Runs a call on a cache, and differentiates it: JAX does so through the equivalent call of `flash_attention`."""

import functools
import logging
from typing import Any

import jax

from pallas_fa2.autodiff import attention
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.ir.cached_spec import CachedOperands, CachedSpec
from pallas_fa2.ir.call_spec import split_floats
from pallas_fa2.ir.equivalent_call import equivalent_arrays, equivalent_spec
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.passes import on_mesh, result_specs
from pallas_fa2.planning.cached_plan import CachedPlan

log = logging.getLogger("pallas_fa2")

Results = tuple[jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 1))
def attention_on_cache(
    spec: CachedSpec, plan: CachedPlan, q: Any, k: Any, v: Any, operands: CachedOperands
) -> Results:
    """Return `out [B, T, N, Hv]` and `lse [B, N, T]`; of packed queries `[tokens, N, Hv]` and `[N, tokens]`."""
    log.info("%s", plan.summary(spec))  # when it is traced: once for each kind of call
    run = _by_kernel if plan.reads_cache else _by_equivalent_call
    return run(spec, plan, *match_varying_axes((q, k, v, operands)))


def _by_equivalent_call(
    spec: CachedSpec, plan: CachedPlan, q: Any, k: Any, v: Any, operands: CachedOperands
) -> Results:
    out, lse = attention(
        equivalent_spec(spec), plan.call, *equivalent_arrays(spec, q, k, v, operands)
    )
    return (out[0], lse[0]) if spec.is_packed else (out, lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_kernel(
    spec: CachedSpec, plan: CachedPlan, q: Any, k: Any, v: Any, operands: CachedOperands
) -> Results:
    cached = BACKENDS[plan.implementation].cached
    assert cached is not None, "the plan says that it reads the cache"
    run = functools.partial(cached.forward, spec, plan.config)
    results = on_mesh(run, jax.typeof(q).sharding.mesh, result_specs(q))(q, k, v, operands)
    return match_varying_axes(results, q)  # a kernel does not say that its results vary


def _fwd_rule(spec: CachedSpec, plan: CachedPlan, *args: Any) -> tuple[Results, tuple]:
    return _by_kernel(spec, plan, *args), args


def _bwd_rule(spec: CachedSpec, plan: CachedPlan, args: tuple, cotangents: Results) -> tuple:
    """Return the cotangents of q, k, v and the operands, of which only the floats of score data have one.

    The forward runs again, as the equivalent call: caches are for inference, and no kernel need support this.
    """
    q, k, v, operands = args
    scores = operands.call.scores
    floats, rebuild = split_floats(scores)
    # Those of 8 bits have no gradient.
    keys = (k, v) if spec.quantized is None else ()

    def run(q: Any, floats: list, keys: tuple) -> Results:
        call = operands.call._replace(scores=rebuild(floats))
        own_k, own_v = keys or (k, v)
        return _by_equivalent_call(spec, plan, q, own_k, own_v, operands._replace(call=call))

    dq, dfloats, dkeys = jax.vjp(run, q, floats, keys)[1](cotangents)
    dk, dv = dkeys or (None, None)
    none = jax.tree.map(lambda _: None, operands)
    is_float, remaining = set(map(id, floats)), iter(dfloats)
    dscores = jax.tree.map(lambda x: next(remaining) if id(x) in is_float else None, scores)
    return dq, dk, dv, none._replace(call=none.call._replace(scores=dscores))


_by_kernel.defvjp(_fwd_rule, _bwd_rule)
