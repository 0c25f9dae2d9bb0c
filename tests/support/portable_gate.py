"""Compiles the mma.sync kernels for a compute capability and prints a line of JSON for each kernel.

PALLAS_FA2_GATE=8.0 python -m tests.support.portable_gate [call ...]
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.sm80 import configs
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from tests.support import compile_gate, gpus
from tests.support.decode_cases import mods_of
from tests.support.hopper import planned_for

LENGTH = 4096


@dataclasses.dataclass(frozen=True)
class Call:
    dims: tuple[int, int]
    options: Callable[[Any], dict[str, Any]]  # of int32 [1, LENGTH]
    forward: ForwardConfig | None = None  # instead of the one that the call would take
    dtype: Any = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class CachedCall:
    """A step on a cache of 16 sequences of `LENGTH` slots at most."""

    heads: tuple[int, int] = (32, 8)  # N, K
    dims: tuple[int, int] = (128, 128)
    queries: int = 1
    page_size: int | None = None
    options: Callable[[tuple[int, ...]], dict[str, Any]] = lambda _: {}  # of (B, N, T, S)
    dtype: Any = jnp.bfloat16


def _documents(ids: Any) -> dict[str, Any]:
    return {"mask": fa.Causal() & fa.Segments(ids)}


def _causal(_: Any) -> dict[str, Any]:
    return {"is_causal": True}


def _scored(_: Any) -> dict[str, Any]:
    return {"mask": fa.Causal(), "score": fa.alibi(4)}


def _biased(ids: Any) -> dict[str, Any]:
    bias = (ids[:, None, :, None] - ids[:, None, None, :]).astype(jnp.bfloat16)
    return {"score": fa.bias(bias)}


def _dropped(_: Any) -> dict[str, Any]:
    return {"is_causal": True, "dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}


def _deterministic(options: Callable) -> Callable:
    return lambda ids: options(ids) | {"deterministic_gradients": True}


DETERMINISTIC = (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)
CALLS = {
    **{f"h{h}_{hv}": Call((h, hv), _causal) for h, hv in ((64, 64), (96, 96), (128, 128))},
    **{f"h{h}_{hv}": Call((h, hv), _causal) for h, hv in ((192, 128), (256, 256))},
    "full": Call((64, 64), lambda _: {}),
    "full_128": Call((128, 128), lambda _: {}),
    "full_256": Call((256, 256), lambda _: {}),
    "window": Call((128, 128), lambda _: {"mask": fa.SlidingWindow(512)}),
    "documents": Call((128, 128), _documents),
    "documents_256": Call((256, 256), _documents),
    "scored": Call((64, 64), _scored),
    "biased": Call((64, 64), _biased),
    "dropped": Call((64, 64), _dropped),
    **{f"deterministic_{h}": Call((h, hv), _deterministic(_causal)) for h, hv in DETERMINISTIC},
    "deterministic_documents": Call((128, 128), _deterministic(_documents)),
    "deterministic_scored": Call((64, 64), _deterministic(_scored)),
    "deterministic_dropped": Call((128, 128), _deterministic(_dropped)),
    "float16": Call((128, 128), _causal, dtype=jnp.float16),
    **{
        f"float32_{name}": Call(dims, options, dtype=jnp.float32)
        for name, dims, options in (
            ("h64", (64, 64), _causal),
            ("h96", (96, 96), _causal),
            ("h128", (128, 128), _causal),
            ("h192_128", (192, 128), _causal),
            ("h192", (192, 192), _causal),
            ("h256", (256, 256), _causal),
            ("full", (64, 64), lambda _: {}),
            ("full_128", (128, 128), lambda _: {}),
            ("documents", (128, 128), _documents),
            ("biased", (64, 64), _biased),
            ("dropped", (64, 64), _dropped),
            *((f"deterministic_{h}", (h, h), _deterministic(_causal)) for h in (64, 96, 128)),
            ("deterministic_documents", (128, 128), _deterministic(_documents)),
        )
    },
}
CACHED_CALLS = {
    "decode": CachedCall(),
    "decode_pages_16": CachedCall(page_size=16),
    "decode_pages_8": CachedCall(page_size=8),
    "decode_mha": CachedCall(heads=(8, 8), page_size=256),
    "decode_group_20": CachedCall(heads=(40, 2)),
    "decode_h64": CachedCall(dims=(64, 64), page_size=64),
    "decode_h80_hv40": CachedCall(dims=(80, 40), page_size=32),
    "decode_h192_hv128": CachedCall(dims=(192, 128)),
    "decode_h256": CachedCall(dims=(256, 256), page_size=16),
    "decode_float16": CachedCall(page_size=16, dtype=jnp.float16),
    "decode_full": CachedCall(queries=2, options=lambda _: {"mask": None}),
    "decode_columns_64": CachedCall(heads=(64, 8), queries=8, page_size=16),
    "decode_columns_64_window": CachedCall(
        heads=(64, 8), queries=8, options=lambda _: {"mask": fa.SlidingWindow(512)}
    ),
    **{
        f"decode_{name}": CachedCall(options=functools.partial(mods_of, name))
        for name in ("soft_cap", "streaming", "bias", "tree")
    },
    "decode_columns_64_entries": CachedCall(heads=(64, 8), queries=16, page_size=16),
    "decode_columns_64_parts": CachedCall(heads=(128, 1), page_size=16),
    "decode_columns_64_tree_entries": CachedCall(
        heads=(64, 4), queries=8, page_size=16, options=functools.partial(mods_of, "tree")
    ),
    "decode_columns_64_tree": CachedCall(
        heads=(64, 4), queries=4, options=functools.partial(mods_of, "tree")
    ),
}
# What `autotune` may choose, without gradients.
CANDIDATES = {
    f"candidate_{i}": Call((rule.config.head_dim, rule.config.value_dim), _causal, rule.config)
    for i, rule in enumerate(configs.FORWARD_RULES)
}


def compile_kernels(name: str) -> list[compile_gate.KernelReport]:
    """Compile a call; return the kernels that multiply, the forward first."""
    return [report for report in compile_all(name) if report.count("HMMA")]


def compile_all(name: str) -> list[compile_gate.KernelReport]:
    """Compile the kernels of a call and of its gradients, or the forward of a candidate."""
    if name in CACHED_CALLS:
        return _compile_cached(CACHED_CALLS[name])
    call = (CALLS | CANDIDATES)[name]
    h, hv = call.dims

    def run(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return fa.flash_attention(q, k, v, implementation="ampere", **call.options(ids))

        if call.forward is not None:
            rules = (configs.Rule(call.forward),)
            with mock.patch.object(configs, "FORWARD_RULES", rules):
                return attend(q, k, v)
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    shapes = [(1, LENGTH, 4, size) for size in (h, h, hv, hv)]
    args = [jax.ShapeDtypeStruct(shape, call.dtype) for shape in shapes]
    ids = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    with planned_for(gpus.device()):
        return compile_gate.compile_for_h200(run, *args, ids)


def _arrays(call: CachedCall) -> tuple[Any, Any]:
    """Return the query and the cache of a call."""
    batch, (n, heads), (h, hv) = 16, call.heads, call.dims
    shape = (batch, LENGTH) if call.page_size is None else (batch * LENGTH, call.page_size)
    q, k, v = (
        jax.ShapeDtypeStruct(x, call.dtype)
        for x in ((batch, call.queries, n, h), (*shape, heads, h), (*shape, heads, hv))
    )
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    if call.page_size is None:
        return q, fa.Cache(k, v, lengths)
    table = jax.ShapeDtypeStruct((batch, LENGTH // call.page_size), jnp.int32)
    return q, fa.Pages(k, v, table, lengths)


def _compile_cached(call: CachedCall) -> list[compile_gate.KernelReport]:
    """Compile the kernel that reads the cache of a call."""
    query, cache = _arrays(call)

    def run(q: Any, cache: Any) -> Any:
        options = call.options((q.shape[0], q.shape[2], q.shape[1], LENGTH))
        return fa.cached_attention(q, cache, implementation="ampere", **options)

    with planned_for(gpus.device()):
        return compile_gate.compile_for_h200(run, query, cache)


def ctas_per_sm(name: str, capability: str) -> int:
    """Return how many CTAs of a call's decode kernel a multiprocessor shall have."""
    call = CACHED_CALLS[name]
    query, cache = _arrays(call)
    options = call.options((query.shape[0], query.shape[2], query.shape[1], LENGTH))
    device = gpus.device(capability)
    explanation = fa.explain(query, cache, implementation="ampere", device=device, **options)
    assert isinstance(explanation.plan.config, DecodeConfig)
    return explanation.plan.config.ctas_per_sm


def compile_call(name: str) -> list[dict[str, Any]]:
    """Return what ptxas says of each kernel of a call."""
    return [
        {
            "call": name,
            "kernel": report.name,
            "registers": report.registers,
            "spill_bytes": report.spill_stores + report.spill_loads,
            "smem_bytes": report.smem_bytes,
            **{op: report.count(op) for op in ("HMMA", "LDSM", "LDGSTS", "MUFU", "LDL", "STL")},
        }
        for report in compile_all(name)
    ]


if __name__ == "__main__":
    for name in sys.argv[1:] or (*CALLS, *CACHED_CALLS):
        for line in compile_call(name):
            print(json.dumps(line), flush=True)
