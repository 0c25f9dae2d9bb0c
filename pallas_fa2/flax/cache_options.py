"""The options of a layer's call on a cache of the caller's: which ones it excludes, and what `attention_fn` sets."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pallas_fa2.cached_api import CachedOptions
from pallas_fa2.caches import Cache, Pages
from pallas_fa2.flax.attention_fn import attention_fn

# What a partial `attention_fn` may set for a call on a cache; the rest is the layer's own, or needs no cache.
TAKEN = "score", "sinks", "implementation"
# The layer passes these itself, as Flax's does; the others have no effect on attention of a sequence on itself.
IGNORED = (
    *("mask", "is_causal", "dropout_rng", "dropout_rate", "deterministic", "dtype", "precision", "module"),
    *("broadcast_dropout", "force_fp32_for_softmax", "align"),
)  # fmt: skip


def check_cache_options(
    cache: Any,
    queries: Any,
    *,
    has_other_inputs: bool,
    decode: Any,
    dropout_rate: float,
    deterministic: bool | None,
) -> None:
    """Raise a ValueError or TypeError for options that a cache excludes, and for `queries` without a cache."""
    if cache is None:
        if queries is not None:
            raise ValueError(
                f"queries must be left out without cache, but they are {type(queries).__name__}; requests that share rows "
                "attend to caches of their own: pass cache=, or mask=Segments(...) to keep the documents of a row apart"
            )
        return
    if not isinstance(cache, Cache | Pages):
        raise TypeError(
            f"cache must be a pallas_fa2.Cache or pallas_fa2.Pages, but it is {type(cache).__name__}; Flax's own cache is a "
            "matter of decode=True"
        )
    if decode or has_other_inputs or (dropout_rate > 0.0 and not deterministic):
        raise ValueError(
            f"cache must be left out with decode (= {decode}), with dropout (dropout_rate = {dropout_rate}, deterministic = "
            f"{deterministic}) and with inputs_k or inputs_v, as tokens are appended to it and attend to themselves; leave "
            "these out, or pass deterministic=True"
        )


def options_of(function: Callable) -> dict[str, Any] | None:
    """Return what `functools.partial` sets of our `attention_fn`, or None for another function."""
    if function is attention_fn:
        return {}
    if isinstance(function, functools.partial) and function.func is attention_fn:
        names = inspect.signature(attention_fn).parameters
        return {**dict(zip(names, function.args, strict=False)), **function.keywords}
    return None


def cached_options(function: Callable, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `cached_attention`, those of a layer's call and what its attention function sets.

    Raises:
      ValueError: the function is not ours, or sets what a call on a cache does not have.
      TypeError: the layer's call has unknown options.
    """
    known = sorted(CachedOptions.__annotations__.keys() - {"queries", "mask"})
    if unknown := sorted(options.keys() - set(known)):
        raise TypeError(
            f"with cache, a layer has the options {', '.join(known)} of cached_attention and Flax's, but {unknown[0]!r} is "
            "none of them; leave it out"
        )
    if (preset := options_of(function)) is None:
        raise ValueError(
            "attention_fn must be pallas_fa2's, or functools.partial of it, where cache is given, as another function does "
            f"not read it, but it is {function!r}; leave attention_fn out, or the cache"
        )
    defaults = inspect.signature(attention_fn).parameters
    for name in preset.keys() - {*TAKEN, *IGNORED}:
        if preset[name] is not defaults[name].default:
            raise ValueError(
                f"attention_fn must not set {name} where cache is given, which cached_attention does not have, but it is "
                f"{preset[name]!r}; leave it out" + "; for a bias use score=" * (name == "bias")
            )
    return {**{name: preset[name] for name in TAKEN if name in preset}, **options}
