"""`flash_attention`: parses the call, plans it, and runs the backend's kernel."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pallas_fa2.autodiff import attention
from pallas_fa2.check_args import check_arrays
from pallas_fa2.device import device_of
from pallas_fa2.fallback import warn_of_fallback
from pallas_fa2.ir.arrays import as_array
from pallas_fa2.masks import as_mask
from pallas_fa2.options import Implementation, Key, MaskLike, Options, Out, Query, Scores, Value
from pallas_fa2.parse_call import parse_call
from pallas_fa2.planning.plan import make_plan
from pallas_fa2.scores import as_scores
from pallas_fa2.sinks import add_sinks

Lse = Float[Array, "*B N T"]


@overload
def flash_attention(
    query: Query, key: Key, value: Value,
    *, return_lse: Literal[False] = False, **options: Unpack[Options],
) -> Out: ...  # fmt: skip
@overload
def flash_attention(
    query: Query, key: Key, value: Value,
    *, return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Out, Lse]: ...  # fmt: skip
@overload
def flash_attention(
    query: Query, key: Key, value: Value,
    *, return_lse: bool = ..., **options: Unpack[Options],
) -> Out | tuple[Out, Lse]: ...  # fmt: skip
def flash_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    mask: MaskLike | None = None,
    is_causal: bool = False,
    score: Scores | None = None,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKeyArray | None = None,
    align: Literal["start", "end"] = "start",
    q_positions: Int[Array, "*B T"] | None = None,
    kv_positions: Int[Array, "*B S"] | None = None,
    return_lse: bool = False,
    deterministic_gradients: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    r"""Compute exact softmax attention in memory that is linear in the sequence length.

    For each head, with the score functions $f$ and the mask $M$,

    $$O_i = \sum_j P_{ij} V_j, \quad P_{ij} = e^{S_{ij} - L_i}, \quad
      S_{ij} = f(\mathrm{scale}\; q_i \cdot k_j), \quad L_i = \log \sum_{j \in M_i} e^{S_{ij}}.$$

    This is FlashAttention-2 (arXiv:2307.08691), Algorithms 1 and 2. It is differentiable in query, key, value, sinks
    and the floating-point data of the score functions, in reverse mode; for `jax.jvp`, `jax.jacfwd` and `jax.hessian`
    use `implementation="reference"` (the others raise a TypeError). Under `jax.checkpoint` the policy
    `save_only_these_names("attention_out", "attention_lse")` keeps the forward from running twice.

    Args:
      query: `[*B, T, N, H]`, bfloat16, float16, float32 or float64; any number of batch axes.
      key: `[*B, S, K, H]` in query's dtype, with N a multiple of K: query head n reads key head `n // (N // K)`.
      value: `[*B, S, K, Hv]` in query's dtype; Hv may differ from H.
      mask: a mask object, such as `Causal() & Window(1024)`, a function of two tokens, or a boolean
        array that broadcasts to `[*B, N, T, S]`, True where a query attends to a key (an array over keys alone
        is `[*B, 1, 1, S]`, one for all heads `[*B, 1, T, S]`). A query that attends to no key gets output 0,
        lse -inf and no gradient.
      is_causal: whether queries attend to no later keys; `Causal()` is then joined to the mask.
      score: a score function or a tuple of them, applied in order to the scaled scores in float32. A query whose
        scores are all below -2^26, as additive masks leave them, attends to no key.
      scale: the factor of q·k, a real number; `1 / sqrt(H)` by default. A traced one is run-time data, and a score
        function to the kernels: pass a Python number where it is known.
      sinks: floats `[N]`, a logit for each query head, to which its queries attend as well and which has no value
        (gpt-oss, arXiv:2508.10925): $L_i = \log (e^{sink} + \sum_j e^{S_{ij}})$.
      dropout_rate: the fraction of probabilities that are dropped, in [0, 1), rounded to a multiple of 2^-16. Which
        ones depends on the key, the batch entry, the head and both positions alone.
      dropout_rng: one PRNG key; required where `dropout_rate` is not 0.
      align: how positions of queries and keys correspond: `"start"` puts query 0 at key 0 (as in `jax.nn`), `"end"`
        the last query at the last key (as in FlashAttention, for decoding and prefill against a longer cache), so
        that query i is at S - T + i. Masks, scores and dropout read it as `q.index`.
      q_positions, kv_positions: integers `[*B, T]` and `[*B, S]`, any other positions, which masks and scores read as
        `q.index` and `k.index`.
      return_lse: also return the natural logsumexp of the scores.
      deterministic_gradients: whether gradients must be bitwise the same in every run. Otherwise the fused
        kernels sum those of query and of the score functions' data in any order.
      implementation: the name of one backend, or `"fused"` for any kernel of this package; the call is an error if
        that does not support it, and its derivative if no fused kernel computes that. By default the fastest
        that does is chosen (see `explain`). On a GPU a `FallbackWarning` is issued once for each reason that none is
        fused, or that no fused kernel computes the gradients of a call that is differentiated.

    Returns:
      `[*B, T, N, Hv]` in query's dtype; with `return_lse` also `[*B, N, T]` in float32 (float64 for
      float64 inputs), itself differentiable.

    Raises:
      ValueError, TypeError: before anything is compiled; the message names the argument, the rule,
        the value and the remedy.

    Example:
      >>> import jax, pallas_fa2 as fa
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64))
      >>> fa.flash_attention(q, k, v, mask=fa.Causal()).shape
      (2, 128, 8, 64)
    """
    check_arrays(query, key, value)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if isinstance(query, Tracer):
        mask, score = as_run_time_data((None if mask is None else as_mask(mask), as_scores(score)))
    spec, operands = parse_call(
        query,
        key,
        value,
        mask=mask,
        score=score,
        scale=scale,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        align=align,
        q_positions=q_positions,
        kv_positions=kv_positions,
        is_causal=is_causal,
        deterministic_gradients=deterministic_gradients,
    )
    device = device_of(query)
    plan = make_plan(spec, device, implementation)
    if implementation is None:
        warn_of_fallback(spec, plan.implementation, plan.rejected, device)
    if spec.batch == 0:
        out = jnp.zeros((*query.shape[:-1], spec.value_dim), spec.dtype)
        lse = jnp.zeros((*query.shape[:-3], spec.q_heads, spec.q_len), spec.accumulator)
    else:
        with naming_the_cure_of_forward_mode(plan.implementation):
            out, lse = attention(spec, plan, query, key, value, operands)
    if sinks is not None:
        out, lse = add_sinks(out, lse, jnp.asarray(sinks))
    return (out, lse) if return_lse else out


@contextlib.contextmanager
def naming_the_cure_of_forward_mode(implementation: str | None) -> Iterator[None]:
    """Replace JAX's error about `jax.jvp` of a `custom_vjp` by one that names the implementation with forward mode.

    The implementation is None where the fastest was chosen, which may differ between the steps of a ring.
    """
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        named = "the fastest implementations have"
        if implementation is not None:
            named = f"implementation {implementation!r} has"
        raise TypeError(
            f"{named} no forward-mode autodiff (jax.jvp, jax.jacfwd, jax.hessian); ask "
            "for implementation='reference'"
        ) from error


def as_run_time_data(tree: Any) -> Any:
    """Return the same masks and scores with their constant arrays behind an optimization barrier.

    XLA would fold what is computed from them while it compiles: 30 s for a dense mask of 1024 x 1024. An array that
    occurs twice stays one.
    """
    barriers: dict[int, Any] = {}

    def isolate(x: Any) -> Any:
        if isinstance(x, Tracer) or not isinstance(x, jax.Array | np.ndarray) or x.size == 1:
            return x
        if id(x) not in barriers:
            barriers[id(x)] = lax.optimization_barrier(as_array("data of a mask or score", x))
        return barriers[id(x)]

    return jax.tree.map(isolate, tree)
