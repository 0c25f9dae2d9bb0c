"""The calls whose kernels `compare_sass.py` compiles: each variant of a kernel that the library chooses by default.

They use only the public interface, so that one list works for every revision.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_fa2 as fa

Array = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of `flash_attention` on `[B, T, N, H]`, `[B, S, K, H]` and `[B, S, K, Hv]`, with its gradients.

    `options` maps one array for each of `inputs` to keyword arguments; floating-point ones have gradients as well.
    """

    dims: tuple[int, int] = (128, 128)  # H, Hv
    lengths: tuple[int, int] = (4096, 4096)  # T, S
    heads: tuple[int, int] = (16, 16)  # N, K
    batch: int = 2
    dtype: Any = jnp.bfloat16
    inputs: tuple[Array, ...] = ()
    options: Callable[..., dict[str, Any]] = dict
    small: bool = False  # whether CI compares it

    def arguments(self) -> list[Array]:
        """Return the shapes and dtypes of q, k, v, dout and `inputs`."""
        (t, s), (n, k), (h, hv) = self.lengths, self.heads, self.dims
        shapes = ((t, n, h), (s, k, h), (s, k, hv), (t, n, hv))
        return [*(Array((self.batch, *shape), self.dtype) for shape in shapes), *self.inputs]

    def run(self, q: Any, k: Any, v: Any, dout: Any, *inputs: Any) -> Any:
        floating = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]

        def attend(q: Any, k: Any, v: Any, *differentiated: Any) -> jax.Array:
            arrays = dict(enumerate(inputs)) | dict(zip(floating, differentiated, strict=True))
            options = self.options(*(arrays[i] for i in range(len(inputs))))
            return fa.flash_attention(q, k, v, implementation="fused", **options)

        out, vjp = jax.vjp(attend, q, k, v, *(inputs[i] for i in floating))
        return out, vjp(dout)


def causal() -> dict[str, Any]:
    return {"is_causal": True}


def masked(mask: Callable[..., Any], **options: Any) -> Callable[..., dict[str, Any]]:
    return lambda *arrays: {"mask": mask(*arrays), **options}


def scored(score: Callable[..., Any], **options: Any) -> Callable[..., dict[str, Any]]:
    return lambda *arrays: {"score": score(*arrays), **options}


@fa.mask_fn
def dilated(q: Any, k: Any) -> Any:
    return (q.index >= k.index) & ((q.index - k.index) % 3 == 0)


@fa.mask_fn
def natten(q: Any, k: Any) -> Any:
    """Attend to a neighborhood of 13 x 13 on a grid of 64 columns."""
    rows, columns = q.index // 64 - k.index // 64, q.index % 64 - k.index % 64
    return (abs(rows) <= 6) & (abs(columns) <= 6)


@fa.mask_fn
def window_by_head(q: Any, k: Any, c: Any) -> Any:
    return (q.index >= k.index) & (q.index - k.index <= c.width)


IDS = Array((2, 4096), jnp.int32)
BITS = Array((4096, 4096), jnp.bool_)
BITS_BY_HEAD = Array((2, 16, 4096, 4096), jnp.bool_)
BIAS = Array((1, 16, 4096, 4096), jnp.bfloat16)
KEY = Array((2,), jnp.uint32)


def dropped(key: Any, **options: Any) -> dict[str, Any]:
    return {"dropout_rate": 0.1, "dropout_rng": key, **options}


CALLS: dict[str, Call] = {
    # One forward for each pair of head dims and number of warpgroups; above H = 128 a backward of two CTAs.
    "h64": Call((64, 64)),
    "h64_causal": Call((64, 64), options=causal),
    "h64_1024": Call((64, 64), (1024, 1024), batch=16),
    "h72_1024": Call((72, 72), (1024, 1024), batch=16),
    "h80_causal": Call((80, 80), options=causal),
    "h96_causal": Call((96, 96), options=causal),
    "h96_1024": Call((96, 96), (1024, 1024), batch=16),
    "h128": Call(),
    "h128_causal": Call(options=causal, small=True),
    "h192_hv128_causal": Call((192, 128), options=causal),
    "h192": Call((192, 192)),
    "h256_causal": Call((256, 256), heads=(8, 8), options=causal),
    "h128_float16": Call(dtype=jnp.float16),
    # By mma.sync, of two terms.
    "h64_float32": Call((64, 64), dtype=jnp.float32),
    "h128_float32_causal": Call(dtype=jnp.float32, options=causal),
    "h128_grouped": Call(heads=(32, 8), options=causal),
    "h128_ragged": Call(lengths=(3000, 3001)),
    "h128_end": Call(lengths=(2048, 8192), options=lambda: {"is_causal": True, "align": "end"}),
    # Strategies for dQ: a head for each CTA, the first tile stored and others added, in a fixed order.
    "h64_512": Call((64, 64), (512, 512), batch=32),
    "h128_512_causal": Call(lengths=(512, 512), batch=32, options=causal),
    "h128_window": Call(options=masked(lambda: fa.SlidingWindow(128)), small=True),
    "h64_window": Call((64, 64), options=masked(lambda: fa.SlidingWindow(128))),
    "h128_deterministic": Call(
        options=lambda: {"is_causal": True, "deterministic_gradients": True}
    ),
    "h256_deterministic": Call((256, 256), options=lambda: {"deterministic_gradients": True}),
    "h128_deterministic_packed": Call(
        inputs=(IDS,), options=masked(fa.Segments, is_causal=True, deterministic_gradients=True)
    ),
    # Masks by code, by token data, by precomputed bits, by arrays.
    "h128_window_1024": Call(options=masked(lambda: fa.SlidingWindow(1024))),
    "h128_packed": Call(inputs=(IDS,), options=masked(fa.Segments, is_causal=True), small=True),
    "h64_packed": Call((64, 64), inputs=(IDS,), options=masked(fa.Segments, is_causal=True)),
    "h256_packed": Call((256, 256), inputs=(IDS,), options=masked(fa.Segments, is_causal=True)),
    "h128_documents": Call(inputs=(IDS,), options=masked(fa.Documents, is_causal=True)),
    "h128_lengths": Call(inputs=(Array((2,), jnp.int32),), options=masked(fa.Lengths)),
    "h128_chunked": Call(options=masked(lambda: fa.Chunked(256))),
    "h128_dilated": Call(options=masked(lambda: dilated)),
    "h128_natten": Call(options=masked(lambda: natten)),
    "h128_window_by_head": Call(
        inputs=(Array((16,), jnp.int32),),
        options=masked(lambda width: window_by_head(heads={"width": width})),
    ),
    "h128_array": Call(inputs=(BITS,), options=masked(lambda bits: bits)),
    "h128_array_by_head": Call(inputs=(BITS_BY_HEAD,), options=masked(lambda bits: bits)),
    "h256_array": Call((256, 256), inputs=(BITS,), options=masked(lambda bits: bits)),
    "h128_positions": Call(
        inputs=(IDS, IDS),
        options=lambda q, k: {"is_causal": True, "q_positions": q, "kv_positions": k},
    ),
    # Scores with gradients of their data, dropout, sinks.
    "h128_soft_cap": Call(options=scored(lambda: fa.soft_cap(30.0), is_causal=True)),
    "h64_soft_cap": Call((64, 64), options=scored(lambda: fa.soft_cap(30.0))),
    "h256_soft_cap": Call((256, 256), options=scored(lambda: fa.soft_cap(30.0))),
    "h128_alibi": Call(options=scored(lambda: fa.alibi(jnp.arange(16.0)), is_causal=True)),
    "h128_bias": Call(inputs=(BIAS,), options=scored(fa.bias)),
    "h128_dropout": Call(inputs=(KEY,), options=functools.partial(dropped, is_causal=True)),
    "h64_dropout": Call((64, 64), inputs=(KEY,), options=dropped),
    "h128_sinks": Call(
        inputs=(Array((16,), jnp.float32),), options=lambda x: {"is_causal": True, "sinks": x}
    ),
}
