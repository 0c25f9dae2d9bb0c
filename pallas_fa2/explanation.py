"""Explains how a call would run: the backend, its kernels, the work and the memory."""

import dataclasses
import inspect
import math
from typing import Any, overload

import jax
import numpy as np

from pallas_fa2.api import flash_attention
from pallas_fa2.backends.protocol import describe_kernels
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.cached_explanation import CachedExplanation, explain_cached
from pallas_fa2.caches import Cache, Pages
from pallas_fa2.device import Device, DeviceLike, as_device, device_of
from pallas_fa2.ir import block_classes
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.options import Implementation
from pallas_fa2.parse_call import parse_call
from pallas_fa2.planning.plan import Plan, make_plan

# The arguments that hold arrays.
DATA = "mask", "score", "scale", "sinks", "dropout_rng", "q_positions", "kv_positions"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a call would run, by `explain`; `str()` gives the text.

    Attributes:
      spec, device, plan: the parsed call, where it runs, and by which backend and configurations.
      tiles: queries and keys of a tile of the forward.
      share: the fraction of tiles that is computed; None where it depends on traced data or on sizes that are symbols
        of `jax.export`.
      flops: floating-point operations of the forward's two matrix products on these tiles, or None.
      bytes: the size of inputs and outputs, each moved once, or None.
      forward, backward: descriptions of the kernels.
      workspace_bytes: device memory beside inputs, results and gradients while the backward runs (the arrays that grow
        with the call; for `reference` and `blockwise`, as XLA may allocate them), or None.
    """

    spec: CallSpec
    device: Device
    plan: Plan
    tiles: tuple[int, int]
    share: float | None
    flops: int | None
    bytes: int | None
    forward: str = ""
    backward: str = ""
    workspace_bytes: int | None = None

    @property
    def implementation(self) -> str:
        return self.plan.implementation

    def __str__(self) -> str:
        def quantity(n: int | None, unit: float, name: str) -> str:
            return "unknown" if n is None else f"{n / unit:.4g} {name}"

        known = self.spec.has_known_lengths
        unknown = f"depends on {'run-time data' if known else 'the lengths'}"
        share = unknown if self.share is None else f"{self.share:.1%} of the tiles"
        moved, workspace = (quantity(n, 1e6, "MB") for n in (self.bytes, self.workspace_bytes))
        lines = [
            f"{self.spec}",
            f"implementation  {self.plan.implementation} on {self.device.kind}",
            *(f"  not {name}: {reason}" for name, reason in self.plan.rejected),
            f"forward         {self.forward}",
            f"backward        {self.backward}",
            f"computed        {share}",
            f"work            {quantity(self.flops, 1e9, 'GFLOP')} forward",
            f"memory          {moved} of inputs and outputs, {workspace} of workspace in the backward",
        ]
        return "\n".join(lines)


@overload
def explain(  # pyright: ignore[reportOverlappingOverload]  # arrays may be anything
    query: Any, key: Cache | Pages,
    *, implementation: Implementation | None = ..., device: DeviceLike | None = ..., **options: Any,
) -> CachedExplanation: ...  # fmt: skip
@overload
def explain(
    query: Any, key: Any, value: Any,
    *, implementation: Implementation | None = ..., device: DeviceLike | None = ..., **options: Any,
) -> Explanation: ...  # fmt: skip
def explain(
    query: Any,
    key: Any,
    value: Any = None,
    *,
    implementation: Implementation | None = None,
    device: DeviceLike | None = None,
    **options: Any,
) -> Explanation | CachedExplanation:
    """Explain how `flash_attention` would run the same call, and why no faster backend does.

    Nothing is computed but the classes of the mask's tiles. `explain(query, cache)` explains a call of
    `cached_attention` with its options.

    Args:
      query, key, value: arrays, or `jax.ShapeDtypeStruct`s, as `flash_attention` takes them; or query and a cache.
      implementation: as in `flash_attention`.
      device: where the call would run, by default the device of query: a `jax.Device`, the compute capability of an
        NVIDIA GPU ("8.0" for an A100, "9.0" for an H100), or a `Device`, such as `Device("gpu", "NVIDIA H200", "9.0",
        132)`.
      options: any other argument of `flash_attention`; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      An `Explanation`, or a `CachedExplanation`, which print as text.

    Raises:
      ValueError, TypeError: as `flash_attention`; it has no such argument, or device is none of these.

    Example:
      >>> import jax, jax.numpy as jnp, pallas_fa2 as fa
      >>> x = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
      >>> print(fa.explain(x, x, x, mask=fa.Causal()))          # doctest: +SKIP
      >>> fa.explain(x, x, x, mask=fa.Causal(), device="9.0").implementation
      'hopper'
    """
    if value is None:
        return explain_cached(query, key, implementation=implementation, device=device, **options)
    known = inspect.signature(flash_attention).parameters
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"explain must have the arguments of flash_attention, but {unknown} are none of them; "
            f"those are {list(known)}"
        )
    options.pop("return_lse", None)
    device = device_of(query) if device is None else as_device(device)
    described: list = []
    leaves, tree = jax.tree.flatten({name: options.pop(name) for name in DATA if name in options})
    shapes = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}

    def describe(traced: dict) -> None:
        data = jax.tree.unflatten(tree, [traced.get(i, x) for i, x in enumerate(leaves)])
        spec, operands = parse_call(query, key, value, **data, **options)
        plan = make_plan(spec, device, implementation)
        backend = BACKENDS[plan.implementation]
        kernels = describe_kernels(backend, spec, plan.forward, plan.backward, operands)
        if kernels.backward is None:
            assert plan.score_grad_fallback is not None
            name, _ = plan.score_grad_fallback
            fallback = BACKENDS[name]
            others = fallback.describe(spec, *fallback.configure(spec, device)[:2], operands)
            backward = f"{name}: {others.backward}"
            kernels = kernels._replace(backward=backward, workspace_bytes=others.workspace_bytes)
        table = None
        if spec.has_known_lengths and spec.batch != 0:
            table = block_classes.block_classes_all_heads(spec, operands, *kernels.tile)
        described.extend((spec, plan, kernels, table))

    has_symbols = not all(isinstance(n, int) for x in (query, key) for n in np.shape(x))
    if shapes or has_symbols:
        jax.eval_shape(describe, shapes)
    else:
        describe({})
    spec, plan, kernels, table = described
    backward = kernels.backward
    if plan.score_grad_fallback is not None and plan.backward is not None and spec.batch != 0:
        backward += f"; {plan.score_grad_fallback[0]} where gradients of score data are asked for"
    share = float((table != block_classes.EMPTY).mean()) if isinstance(table, np.ndarray) else None
    if spec.batch == 0:
        share = 0.0
    pairs = spec.batch * spec.q_heads * spec.q_len * spec.kv_len
    flops = None if share is None else round(2 * pairs * share * (spec.head_dim + spec.value_dim))
    per_query = spec.q_heads * (spec.head_dim + spec.value_dim)
    per_key = spec.kv_heads * (spec.head_dim + spec.value_dim)
    moved = spec.batch * (spec.q_len * per_query + spec.kv_len * per_key) * spec.dtype.itemsize
    moved += math.prod((spec.batch, spec.q_heads, spec.q_len)) * spec.accumulator.itemsize
    moved, workspace = (n if isinstance(n, int) else None for n in (moved, kernels.workspace_bytes))
    return Explanation(
        spec, device, plan, kernels.tile, share, flops, moved, kernels.forward, backward, workspace
    )
