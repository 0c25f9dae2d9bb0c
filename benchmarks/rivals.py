"""The implementations that a benchmark compares, each called as its authors intend.

All take `[B, T, N, H]`. One that does not support a shape raises an error, whose message is in the results.
"""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pallas_fa2 as fa
from benchmarks.shapes import Shape

# The limit on bytes of float32 scores, and the part of a GPU's memory: probabilities and the gradients of both must fit
# in memory beside them.
XLA_SCORES, XLA_SCORES_PART = 20e9, 0.2
# The limit on bytes of a dense mask, of which there are several copies as well.
DENSE_MASK = 2e9


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function of (shape, q, k, v, data), its module, and the package whose version is recorded.

    `data` is a shape's bias `[1, N, T, S]`, or the index at which each token's document begins, `[B, T]`, which can
    also be used as segment id. A `worker` is a module of benchmarks that runs the implementation in a process without
    JAX.
    """

    attention: Callable[..., Array]
    module: str
    package: str
    worker: str | None = None


def mask_of(shape: Shape, data: Array | None = None) -> fa.Mask | None:
    """Return our mask for a call with the alignment of `align_of`."""
    if not shape.causal:
        return None
    causal = fa.Causal()
    if shape.documents:
        assert data is not None
        # FlashAttention-3 is told the longest document as well.
        return causal & fa.Documents(data, longest=max(shape.documents))
    return causal if shape.window is None else causal & fa.Window(shape.window)


def align_of(shape: Shape) -> Literal["start", "end"]:
    """Return the alignment, "end" only where that makes a difference."""
    return "end" if shape.causal and shape.q_len != shape.kv_len else "start"


def mask_fn_of(shape: Shape, data: Array | None = None) -> fa.Mask:
    """Return the equivalent of `mask_of` as a user would write it."""
    if not shape.causal:
        raise NotImplementedError("there is no mask")
    if shape.documents:
        assert data is not None
        longest = max(shape.documents)

        @fa.mask_fn
        def mask(q: Any, k: Any) -> Any:
            near = (q.index >= k.index) & (q.index - k.index < longest)
            # The built-in mask's code also shows that a token attends to itself.
            return near & (k.index >= jnp.minimum(q.start, q.index))

        return mask(q_tokens={"start": data})
    if (window := shape.window) is not None:
        return fa.mask_fn(lambda q, k: (q.index >= k.index) & (q.index - k.index <= window))
    shift = shape.kv_len - shape.q_len
    return fa.mask_fn(lambda q, k: q.index + shift >= k.index)


def score_of(shape: Shape, data: Array | None = None) -> fa.Score | None:
    if shape.bias:
        assert data is not None
        return fa.bias(data)
    return None if shape.soft_cap is None else fa.soft_cap(shape.soft_cap)


def check_alignment(shape: Shape) -> None:
    """Raise an error for a causal shape with T ≠ S, which some align to the first key."""
    if shape.causal and shape.q_len != shape.kv_len:
        raise NotImplementedError("its causal mask is aligned to the first key")


def check_unsupported(shape: Shape, *features: str) -> None:
    """Raise an error for a shape with a feature for which the implementation has no argument."""
    for feature in features:
        if getattr(shape, feature):
            raise NotImplementedError(f"it has no {feature}")


def score_limit() -> float:
    """Return how many bytes the float32 scores of dense attention may have on this device."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return XLA_SCORES if memory is None else min(XLA_SCORES, XLA_SCORES_PART * memory)


def check_size(name: str, size: float, limit: float) -> None:
    """Raise an error for a pairwise array of more than `limit` bytes."""
    if size > limit:
        raise NotImplementedError(f"{name} of {size / 1e9:.0f} GB (limit {limit / 1e9:.0f})")


def pairwise_arrays(shape: Shape, data: Array | None) -> dict[str, Array]:
    """Return the bias, or the documents as a dense mask for implementations without packed documents."""
    if data is None:
        return {}
    if shape.bias:
        return {"bias": data}
    check_size("a dense mask", float(shape.batch * shape.q_len * shape.kv_len), DENSE_MASK)
    return {"mask": (data[:, :, None] == data[:, None, :])[:, None]}


def ours(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    return _ours("hopper", shape, q, k, v, data)


def ampere(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Run our kernels by mma.sync, for GPUs of compute capability 8.0 or more."""
    return _ours("ampere", shape, q, k, v, data)


def _ours(implementation: Any, shape: Shape, q: Array, k: Array, v: Array, data: Any) -> Array:
    mask, score, align = mask_of(shape, data), score_of(shape, data), align_of(shape)
    return fa.flash_attention(
        q, k, v, mask=mask, score=score, align=align, implementation=implementation
    )


def mask_fn(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Run ours with a mask function that a user might write instead of the built-in mask."""
    mask, score = mask_fn_of(shape, data), score_of(shape, data)
    return fa.flash_attention(q, k, v, mask=mask, score=score, implementation="hopper")


def segments(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Run ours with segment ids, which do not say that documents are contiguous."""
    _require_documents(shape)
    assert data is not None
    mask = fa.Causal() & fa.Segments(data)
    return fa.flash_attention(q, k, v, mask=mask, implementation="hopper")


def array(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Run ours with the dense mask that implementations without packed documents get."""
    _require_documents(shape)
    mask = fa.Dense(pairwise_arrays(shape, data)["mask"]) & fa.Causal()
    return fa.flash_attention(q, k, v, mask=mask, implementation="hopper")


def _require_documents(shape: Shape) -> None:
    if not shape.documents:
        raise NotImplementedError("it is for documents")


def fa3(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Run FlashAttention-3's CUDA kernels, which align a causal mask to the last key."""
    import dew_flash_attn  # type: ignore[import-not-found]

    check_unsupported(shape, "bias")
    if shape.documents:
        ends = jnp.asarray(np.cumsum((0, *shape.documents)), jnp.int32)
        return dew_flash_attn.flash_mha_varlen(
            q[0], k[0], v[0], ends, max(shape.documents), is_causal=shape.causal
        )[None]
    options: dict[str, Any] = {}
    if shape.window is not None:
        options["window_size"] = (shape.window, 0)
    if shape.soft_cap is not None:
        options["softcap"] = shape.soft_cap
    return dew_flash_attn.flash_mha(q, k, v, is_causal=shape.causal, **options)


def fa2(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    raise NotImplementedError("its kernels run in a process without JAX (benchmarks/torch_fa2.py)")


def cudnn(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    return _jax_nn("cudnn", shape, q, k, v, data)


def tokamax(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Run tokamax's Mosaic GPU kernels for the device: on Hopper by WGMMA, on an A100 by mma.sync."""
    return _tokamax("mosaic", shape, q, k, v, data)


def tokamax_triton(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    return _tokamax("triton", shape, q, k, v, data)


def _tokamax(implementation: str, shape: Shape, q: Array, k: Array, v: Array, data: Any) -> Array:
    """Run tokamax's kernels with the tile sizes that it chooses without autotuning."""
    import tokamax  # type: ignore[import-not-found]

    logging.getLogger("absl").setLevel(
        logging.ERROR
    )  # otherwise it logs this choice for every shape
    check_alignment(shape)
    options: dict[str, Any] = pairwise_arrays(shape, data)
    if shape.window is not None:
        options["local_window_size"] = (shape.window, 0)
    if shape.soft_cap is not None:
        options["logits_soft_cap"] = shape.soft_cap
    return tokamax.dot_product_attention(
        q, k, v, is_causal=shape.causal, implementation=implementation, **options
    )


def jla(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Run jla with the faster of its two backward passes, which sums dQ in any order, as ours and FA3's do."""
    from jla.ops.mosaic_gpu import attention  # type: ignore[import-not-found]

    if not shape.causal:  # it has no argument for this
        raise NotImplementedError("causal only")
    check_unsupported(shape, "soft_cap", "bias")
    options: dict[str, Any] = {}
    if shape.documents:
        options["segment_ids"] = data
    if shape.window is not None:
        options["sliding_window"] = shape.window + 1  # it counts a query's own key
    return attention.flash_attention(q, k, v, backward="fused", **options)


def xla(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    check_size("scores", shape.score_bytes, score_limit())
    return _jax_nn("xla", shape, q, k, v, data)


def _jax_nn(implementation: Any, shape: Shape, q: Array, k: Array, v: Array, data: Any) -> Array:
    check_alignment(shape)
    check_unsupported(shape, "soft_cap")
    options: dict[str, Any] = pairwise_arrays(shape, data)
    if shape.window is not None:
        options["local_window_size"] = (shape.window, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=shape.causal, implementation=implementation, **options
    )


IMPLEMENTATIONS = {
    "ours": Implementation(ours, "pallas_fa2", "pallas_fa2"),
    "ampere": Implementation(ampere, "pallas_fa2", "pallas_fa2"),
    "mask_fn": Implementation(mask_fn, "pallas_fa2", "pallas_fa2"),
    "segments": Implementation(segments, "pallas_fa2", "pallas_fa2"),
    "array": Implementation(array, "pallas_fa2", "pallas_fa2"),
    "fa3": Implementation(fa3, "dew_flash_attn", "dew-flash-attn-cu13"),
    "fa2": Implementation(fa2, "torch", "torch", worker="benchmarks.torch_fa2"),
    "cudnn": Implementation(cudnn, "jax", "nvidia-cudnn-cu13"),
    "tokamax": Implementation(tokamax, "tokamax", "tokamax"),
    "tokamax_triton": Implementation(tokamax_triton, "tokamax", "tokamax"),
    "jla": Implementation(jla, "jla.ops.mosaic_gpu.attention", "jax-linear-attention"),
    "xla": Implementation(xla, "jax", "jaxlib"),
}


def importable(names: Iterable[str]) -> tuple[dict[str, Implementation], dict[str, str]]:
    """Return the implementations of these names whose modules can be imported, and why the others cannot."""
    available, missing = {}, {}
    for name in names:
        implementation = IMPLEMENTATIONS[name]
        try:
            if implementation.worker is None:
                importlib.import_module(implementation.module)
            elif importlib.util.find_spec(implementation.module) is None:
                raise ModuleNotFoundError(f"No module named {implementation.module!r}")
            available[name] = implementation
        except Exception as e:  # noqa: BLE001 - a library may fail to load in any way
            missing[name] = f"{type(e).__name__}: {e}"
    return available, missing


def version(implementation: Implementation) -> str:
    try:
        return importlib.metadata.version(implementation.package)
    except importlib.metadata.PackageNotFoundError:  # cuDNN may be a part of the system
        return "unknown"
