"""The implementations that a benchmark compares, each called the way its authors mean it.

All take `[B, T, N, H]`. What one of them cannot run raises, and the message stands in the results.
"""

import dataclasses
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable

import jax

import pallas_fa2 as fa
from benchmarks.shapes import Shape

# Bytes of float32 scores; their probabilities and the gradients of both must fit beside them.
XLA_SCORES = 20e9


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function of (shape, q, k, v), the module it needs and the package whose version counts."""

    attention: Callable[..., jax.Array]
    module: str
    package: str


def mask_of(shape: Shape) -> fa.Causal | None:
    """Ours; aligned to the last key only where that makes a difference."""
    if not shape.causal:
        return None
    return fa.Causal(align="start" if shape.q_len == shape.kv_len else "end")


def aligned_to_the_first_key(shape: Shape) -> None:
    """Refuses a causal shape with T ≠ S for those who would compute something else."""
    if shape.causal and shape.q_len != shape.kv_len:
        raise NotImplementedError("its causal mask is aligned to the first key")


def ours(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return fa.flash_attention(q, k, v, mask=mask_of(shape), implementation="hopper")


def fa3(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """FlashAttention-3's CUDA kernels; a causal mask is aligned to the last key."""
    import dew_flash_attn  # type: ignore[import-not-found]

    return dew_flash_attn.flash_mha(q, k, v, is_causal=shape.causal)


def cudnn(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    aligned_to_the_first_key(shape)
    return jax.nn.dot_product_attention(q, k, v, is_causal=shape.causal, implementation="cudnn")


def tokamax(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Its Pallas kernels, with the tile sizes that it chooses when nothing has been autotuned."""
    import tokamax  # type: ignore[import-not-found]

    logging.getLogger("absl").setLevel(logging.ERROR)  # or it says so at length for every shape
    aligned_to_the_first_key(shape)
    return tokamax.dot_product_attention(q, k, v, is_causal=shape.causal, implementation="mosaic")


def jla(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The faster of its two backward passes, whose dQ is summed in any order, as ours and FA3's."""
    from jla.ops.mosaic_gpu import attention  # type: ignore[import-not-found]

    if not shape.causal:  # it has no argument that would say so
        raise NotImplementedError("causal only")
    return attention.flash_attention(q, k, v, backward="fused")


def xla(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    aligned_to_the_first_key(shape)
    scores = 4.0 * shape.batch * shape.q_heads * shape.q_len * shape.kv_len
    if scores > XLA_SCORES:
        raise NotImplementedError(f"scores of {scores / 1e9:.0f} GB (limit {XLA_SCORES / 1e9:.0f})")
    return jax.nn.dot_product_attention(q, k, v, is_causal=shape.causal, implementation="xla")


IMPLEMENTATIONS = {
    "ours": Implementation(ours, "pallas_fa2", "pallas_fa2"),
    "fa3": Implementation(fa3, "dew_flash_attn", "dew-flash-attn-cu13"),
    "cudnn": Implementation(cudnn, "jax", "nvidia-cudnn-cu13"),
    "tokamax": Implementation(tokamax, "tokamax", "tokamax"),
    "jla": Implementation(jla, "jla.ops.mosaic_gpu.attention", "jax-linear-attention"),
    "xla": Implementation(xla, "jax", "jaxlib"),
}


def importable(names: Iterable[str]) -> tuple[dict[str, Implementation], dict[str, str]]:
    """Those of `names` whose modules can be imported, and why the others cannot."""
    found, missing = {}, {}
    for name in names:
        try:
            importlib.import_module(IMPLEMENTATIONS[name].module)
            found[name] = IMPLEMENTATIONS[name]
        except Exception as e:  # noqa: BLE001 - a library may fail to load in any way
            missing[name] = f"{type(e).__name__}: {e}"
    return found, missing


def version(implementation: Implementation) -> str:
    try:
        return importlib.metadata.version(implementation.package)
    except importlib.metadata.PackageNotFoundError:  # cuDNN may come with the machine
        return "unknown"
