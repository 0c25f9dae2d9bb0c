"""How a call would run, in words and numbers."""

import dataclasses
import inspect
import math
from typing import Any

import jax
import numpy as np

from pallas_fa2.api import Implementation, flash_attention
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.device import Device, device_of
from pallas_fa2.ir import block_classes
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.parse_call import as_sinks, parse_call
from pallas_fa2.planning.plan import Plan, make_plan


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How a call would run. `str()` gives the text that `explain` is for.

    `share` is the part of all tiles that is computed, None where it depends on traced data, as all numbers are
    where sizes are symbols of `jax.export`;
    `flops` counts the forward's two matrix products over the pairs of those tiles,
    `bytes` the inputs and outputs, each moved once; `forward` and `backward` say in words what runs, and
    `workspace_bytes` is what lies in device memory beside inputs, results and gradients while the backward
    runs (the arrays that grow with the call; where `reference` or `blockwise` run, as XLA may lay them out).
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
        s = self.spec
        unknown = f"depends on {'run-time data' if s.has_known_lengths else 'the lengths'}"
        share = unknown if self.share is None else f"{self.share:.1%} of the tiles"
        flops = f"{self.flops / 1e9:.4g} GFLOP" if self.flops is not None else "unknown"
        moved = f"{self.bytes / 1e6:.4g} MB" if self.bytes is not None else "unknown"
        workspace = (
            "unknown" if self.workspace_bytes is None else f"{self.workspace_bytes / 1e6:.4g} MB"
        )
        lines = [
            f"{s}",
            f"implementation  {self.plan.implementation} on {self.device.kind}",
            *(f"  not {name}: {reason}" for name, reason in self.plan.rejected),
            f"forward         {self.forward}",
            f"backward        {self.backward}",
            f"computed        {share}",
            f"work            {flops} forward",
            f"memory          {moved} of inputs and outputs, {workspace} of workspace in the backward",
        ]
        return "\n".join(lines)


def explain(
    query: Any,
    key: Any,
    value: Any,
    *,
    implementation: Implementation | None = None,
    device: Device | None = None,
    **options: Any,
) -> Explanation:
    """Says how `flash_attention` would run the same call, and why no faster way was taken.

    Takes the arguments of `flash_attention` (arrays or `jax.ShapeDtypeStruct`s); nothing is
    computed but the classes of the mask's tiles.

    Example:
      >>> import jax, jax.numpy as jnp, pallas_fa2 as fa
      >>> x = jax.ShapeDtypeStruct((2, 4096, 16, 128), jnp.bfloat16)
      >>> print(fa.explain(x, x, x, mask=fa.Causal()))          # doctest: +SKIP
    """
    known = inspect.signature(flash_attention).parameters
    if unknown := [name for name in options if name not in known]:
        raise TypeError(
            f"explain must have the arguments of flash_attention, but {unknown} are none of them; "
            f"those are {list(known)}"
        )
    options.pop("return_lse", None)
    device = device_of(query) if device is None else device
    described: list = []

    def classify(sinks: Any = None, **options: Any) -> None:
        spec, operands = parse_call(query, key, value, **options)
        if sinks is not None:
            as_sinks(sinks, spec.q_heads)
        plan = make_plan(spec, device, implementation)
        chosen = BACKENDS[plan.implementation]
        kernels = chosen.describe(spec, plan.forward, plan.backward, operands)
        table = None
        if spec.has_known_lengths:
            table = block_classes.block_classes_all_heads(spec, operands, *kernels.tile)
        described.extend((spec, plan, kernels, table))

    names = "mask", "score", "scale", "sinks", "dropout_rng", "q_positions", "kv_positions"
    data = {name: options.pop(name) for name in names if name in options}
    leaves, tree = jax.tree.flatten(data)
    shapes = {i: x for i, x in enumerate(leaves) if isinstance(x, jax.ShapeDtypeStruct)}

    def classify_with(traced: dict) -> None:
        arrays = [traced.get(i, x) for i, x in enumerate(leaves)]
        classify(**jax.tree.unflatten(tree, arrays), **options)

    symbols = not all(isinstance(n, int) for x in (query, key) for n in np.shape(x))
    if shapes or symbols:
        jax.eval_shape(classify_with, shapes)
    else:
        classify_with({})
    spec, plan, kernels, table = described
    backward = kernels.backward
    if plan.score_grad_fallback is not None:
        backward += f"; {plan.score_grad_fallback[0]} where gradients of score data are asked for"
    share = float((table != block_classes.EMPTY).mean()) if isinstance(table, np.ndarray) else None
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
