"""Explains how a call of `cached_attention` would run."""

import dataclasses
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.backends.protocol import describe_kernels
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.cached_api import CAUSAL, cached_attention
from pallas_fa2.caches import Cache, Pages
from pallas_fa2.check_caches import check_cache, is_known
from pallas_fa2.device import Device, DeviceLike, as_device, device_of
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.quantized import SCALE_DTYPE
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.planning.cached_plan import CachedPlan, make_cached_plan


@dataclasses.dataclass(frozen=True)
class CachedExplanation:
    """How a call on a cache would run, by `explain`; `str()` gives the text.

    Attributes:
      spec, device, plan: the parsed call, where it runs, and by which backend and configurations.
      bytes: the size of queries, results and the keys and values of all sequences, each moved once; None where the
        lengths are not known.
      copied_bytes: the size of the copy of the pages, or of what 8 bits stand for; 0 where the backend reads the cache.
      forward: a description of the kernels.
    """

    spec: CachedSpec
    device: Device
    plan: CachedPlan
    bytes: int | None
    copied_bytes: int
    forward: str

    @property
    def implementation(self) -> str:
        return self.plan.implementation

    def __str__(self) -> str:
        moved = "unknown, as lengths are," if self.bytes is None else f"{self.bytes / 1e6:.4g} MB"
        copies = "gathered pages" if self.spec.page_size is not None else "keys and values"
        copies += "" if self.spec.quantized is None else f" in {self.spec.call.dtype.name}"
        gathered = f", {self.copied_bytes / 1e6:.4g} MB of {copies} in each call"
        lines = [
            f"{self.spec}",
            f"implementation  {self.plan.implementation} on {self.device.kind}",
            *(f"  {reason}" for reason in self.plan.reasons()),
            f"forward         {self.forward}",
            f"memory          {moved} of inputs and outputs{gathered if self.copied_bytes else ''}",
        ]
        return "\n".join(lines)


def explain_cached(
    query: Any,
    cache: Cache | Pages,
    *,
    mask: Any = CAUSAL,
    implementation: str | None = None,
    device: DeviceLike | None = None,
    **options: Any,
) -> CachedExplanation:
    """Explain how `cached_attention` would run the same call; arrays may be `jax.ShapeDtypeStruct`s."""
    known = inspect.signature(cached_attention).parameters
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"explain must have the arguments of cached_attention where keys are a cache, but {unknown} are none of them; "
            f"those are {list(known)}"
        )
    options.pop("return_lse", None)
    if isinstance(cache, Cache | Pages):
        check_cache(cache)
    device = device_of(query) if device is None else as_device(device)
    described: list = []
    leaves, tree = jax.tree.flatten((cache, {"mask": mask, **options}))
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape")}

    def describe(traced: dict) -> None:
        cache, data = tree.unflatten([traced.get(i, x) for i, x in enumerate(leaves)])
        spec, operands = parse_cached(query, cache, **data)
        plan = make_cached_plan(spec, device, implementation)
        backend = BACKENDS[plan.implementation]
        if plan.reads_cache:
            assert backend.cached is not None
            forward = backend.cached.describe(spec, plan.config)
        else:
            kernels = describe_kernels(
                backend, spec.call, plan.call.forward, plan.call.backward, operands.call
            )
            forward = f"the equivalent call of flash_attention: {kernels.forward}"
        described.extend((spec, plan, forward))

    jax.eval_shape(describe, arrays)
    spec, plan, forward = described
    call, item = spec.call, spec.call.dtype.itemsize
    per_row = (call.head_dim + call.value_dim) * item
    per_key = per_row
    if spec.quantized is not None:
        per_key = per_row // item + 2 * jnp.dtype(SCALE_DTYPE).itemsize
    moved = None
    if is_known(cache.lengths):
        keys = int(np.sum(np.asarray(cache.lengths, np.int64))) * call.kv_heads
        rows = math.prod(np.shape(query)[:-1])
        moved = keys * per_key + rows * (per_row + call.accumulator.itemsize)
    # What 8 bits stand for is a copy in the dtype of queries, of pages and of contiguous keys.
    is_copied = spec.page_size is not None or spec.quantized is not None
    copied = spec.contiguous_bytes * (is_copied and not plan.reads_cache)
    return CachedExplanation(spec, device, plan, moved, copied, forward)
