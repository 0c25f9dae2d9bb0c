"""The implementations that a benchmark compares, each called the way its authors mean it.

All take `[B, T, N, H]`. What one of them cannot run raises, and the message stands in the results.
"""

import dataclasses
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import pallas_fa2 as fa
from benchmarks.shapes import Shape

# Bytes of float32 scores; their probabilities and the gradients of both must fit beside them.
XLA_SCORES = 20e9
# Bytes of a dense mask, of which there are several copies as well.
DENSE_MASK = 2e9


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function of (shape, q, k, v, data), its module and the package whose version counts.

    `data` is a shape's bias `[1, N, T, S]`, or where the document of each token begins, `[B, T]`: as good as its
    number for those who ask for that.
    """

    attention: Callable[..., Array]
    module: str
    package: str


def mask_of(shape: Shape, data: Array | None = None) -> fa.Mask | None:
    """Ours, of a call that `align_of` aligns."""
    if not shape.causal:
        return None
    causal = fa.Causal()
    if shape.documents:
        assert data is not None
        # of which the rival with documents is told the longest as well
        return causal & fa.Documents(data, longest=max(shape.documents))
    return causal if shape.window is None else causal & fa.Window(shape.window)


def align_of(shape: Shape) -> Literal["start", "end"]:
    """To the last key, but only where that makes a difference."""
    return "end" if shape.causal and shape.q_len != shape.kv_len else "start"


def function_of(shape: Shape, data: Array | None = None) -> fa.Mask:
    """`mask_of`, as a user would write it."""
    if not shape.causal:
        raise NotImplementedError("there is no mask")
    if shape.documents:
        assert data is not None
        longest = max(shape.documents)

        @fa.mask_fn
        def mask(q: Any, k: Any) -> Any:
            near = (q.index >= k.index) & (q.index - k.index < longest)
            # that a token sees itself stands in the ready-made mask's code too
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


def aligned_to_the_first_key(shape: Shape) -> None:
    """Refuses a causal shape with T ≠ S for those who would compute something else."""
    if shape.causal and shape.q_len != shape.kv_len:
        raise NotImplementedError("its causal mask is aligned to the first key")


def without(shape: Shape, *features: str) -> None:
    """Refuses what the implementation has no argument for."""
    for feature in features:
        if getattr(shape, feature):
            raise NotImplementedError(f"it has no {feature}")


def has_room(what: str, size: float, limit: float) -> None:
    """Refuses arrays of a number a pair that are too large."""
    if size > limit:
        raise NotImplementedError(f"{what} of {size / 1e9:.0f} GB (limit {limit / 1e9:.0f})")


def arrays_of_pairs(shape: Shape, data: Array | None) -> dict[str, Array]:
    """The bias, or the documents as a dense mask for those who know no other."""
    if data is None:
        return {}
    if shape.bias:
        return {"bias": data}
    has_room("a dense mask", float(shape.batch * shape.q_len * shape.kv_len), DENSE_MASK)
    return {"mask": (data[:, :, None] == data[:, None, :])[:, None]}


def ours(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    mask, score, align = mask_of(shape, data), score_of(shape, data), align_of(shape)
    return fa.flash_attention(q, k, v, mask=mask, score=score, align=align, implementation="hopper")


def mask_fn(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Ours, under a mask that a user has written instead of a ready-made one."""
    mask, score = function_of(shape, data), score_of(shape, data)
    return fa.flash_attention(q, k, v, mask=mask, score=score, implementation="hopper")


def segments(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Ours, under a mask that does not say that documents lie one after another."""
    _are_documents(shape)
    assert data is not None
    mask = fa.Causal() & fa.Segments(data)
    return fa.flash_attention(q, k, v, mask=mask, implementation="hopper")


def array(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Ours, under the array that those get who know no documents."""
    _are_documents(shape)
    mask = fa.Dense(arrays_of_pairs(shape, data)["mask"]) & fa.Causal()
    return fa.flash_attention(q, k, v, mask=mask, implementation="hopper")


def _are_documents(shape: Shape) -> None:
    if not shape.documents:
        raise NotImplementedError("it is for documents")


def fa3(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """FlashAttention-3's CUDA kernels; a causal mask is aligned to the last key."""
    import dew_flash_attn  # type: ignore[import-not-found]

    without(shape, "bias")
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


def cudnn(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    return _jax_nn("cudnn", shape, q, k, v, data)


def tokamax(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """Its Pallas kernels, with the tile sizes that it chooses when nothing has been autotuned."""
    import tokamax  # type: ignore[import-not-found]

    logging.getLogger("absl").setLevel(logging.ERROR)  # or it says so at length for every shape
    aligned_to_the_first_key(shape)
    options: dict[str, Any] = arrays_of_pairs(shape, data)
    if shape.window is not None:
        options["local_window_size"] = (shape.window, 0)
    if shape.soft_cap is not None:
        options["logits_soft_cap"] = shape.soft_cap
    return tokamax.dot_product_attention(
        q, k, v, is_causal=shape.causal, implementation="mosaic", **options
    )


def jla(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    """The faster of its two backward passes, whose dQ is summed in any order, as ours and FA3's."""
    from jla.ops.mosaic_gpu import attention  # type: ignore[import-not-found]

    if not shape.causal:  # it has no argument that would say so
        raise NotImplementedError("causal only")
    without(shape, "soft_cap", "bias")
    options: dict[str, Any] = {}
    if shape.documents:
        options["segment_ids"] = data
    if shape.window is not None:
        options["sliding_window"] = shape.window + 1  # it counts a query's own key
    return attention.flash_attention(q, k, v, backward="fused", **options)


def xla(shape: Shape, q: Array, k: Array, v: Array, data: Array | None = None) -> Array:
    has_room("scores", shape.score_bytes, XLA_SCORES)
    return _jax_nn("xla", shape, q, k, v, data)


def _jax_nn(implementation: Any, shape: Shape, q: Array, k: Array, v: Array, data: Any) -> Array:
    aligned_to_the_first_key(shape)
    without(shape, "soft_cap")
    options: dict[str, Any] = arrays_of_pairs(shape, data)
    if shape.window is not None:
        options["local_window_size"] = (shape.window, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=shape.causal, implementation=implementation, **options
    )


IMPLEMENTATIONS = {
    "ours": Implementation(ours, "pallas_fa2", "pallas_fa2"),
    "mask_fn": Implementation(mask_fn, "pallas_fa2", "pallas_fa2"),
    "segments": Implementation(segments, "pallas_fa2", "pallas_fa2"),
    "array": Implementation(array, "pallas_fa2", "pallas_fa2"),
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
