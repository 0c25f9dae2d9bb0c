"""The forward of `flash_attention` with few queries, by a decode kernel: a cache that is full."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.spec import MAX_COLUMNS, pad_group
from pallas_fa2.backends.protocol import CachedForward
from pallas_fa2.device import Device
from pallas_fa2.ir.affine import DistanceRange, distance_range
from pallas_fa2.ir.arrays import NUM_LEADING_AXES, Q_AXIS, default_positions
from pallas_fa2.ir.cached_spec import CachedOperands, CachedSpec
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.trace import TracedFn, trace

# When a plan took 10 us, as seven small kernels of XLA's (docs/decisions/0076-decode-kernel.md), the other kernels
# visited 2000 keys or so in that time, by estimate. Now the lengths alone are made before; this was not counted anew,
# nor for the kernels by mma.sync.
MIN_KEYS = 4096


@dataclasses.dataclass(frozen=True)
class FlashForward:
    """The forward of few queries by the decode kernel of an architecture."""

    cached: CachedForward

    def configure(self, spec: CallSpec, device: Device) -> DecodeConfig | None:
        """Return the configuration of a call of few queries, or None if it is one for the other kernels.

        A tile of these has 128 rows, of which such a call would use few, and each query head its own. With as many of
        them as there are multiprocessors, and heads that share no keys, they lack nothing but splits.
        """
        few_tiles = spec.batch * spec.q_heads < device.num_sms
        if spec.has_explicit_positions or spec.dropout_rate or spec.kv_len < MIN_KEYS:
            return None
        if spec.q_len * pad_group(spec.group) > MAX_COLUMNS:
            return None  # a sequence's keys would be read more than once
        if spec.causal == "start" or not (few_tiles or spec.group > 1):
            return None
        cached = _on_a_cache(spec)
        if self.cached.unsupported_reason(cached, device) is not None:
            return None
        return self.cached.configure(cached, device)

    def forward(
        self,
        spec: CallSpec,
        config: DecodeConfig,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        operands: Operands,
    ) -> tuple[jax.Array, jax.Array]:
        """Return `out [B, T, N, Hv]` and natural `lse [B, N, T]`."""
        lengths = jnp.full(q.shape[0], spec.kv_len, jnp.int32)
        positions = default_positions(spec.q_len, Q_AXIS)
        cached = CachedOperands(lengths, operands._replace(q_index=positions))
        return self.cached.forward(_on_a_cache(spec), config, q, k, v, cached)

    def describe(self, spec: CallSpec, config: DecodeConfig) -> str:
        """Describe the kernel that serves a call."""
        return self.cached.describe(_on_a_cache(spec), config)


def _on_a_cache(spec: CallSpec) -> CachedSpec:
    """Return the same call on a cache that is full.

    There the queries are the last tokens, where a mask that is a range of distances suits the kernel. Any other code
    reads positions that count from 0, as if the caller had given them.
    """
    distances = DistanceRange() if spec.mask is None else distance_range(spec.mask)
    call = dataclasses.replace(spec, causal=None, has_explicit_positions=True)
    if spec.scores or distances is None:
        return CachedSpec(call, has_given_positions=True)
    if spec.mask is None:
        return CachedSpec(call)
    shift = spec.kv_len - spec.q_len
    least, most = (None if n is None else n - shift for n in distances)
    return CachedSpec(dataclasses.replace(call, mask=_range_mask(DistanceRange(least, most))))


def _range_mask(distances: DistanceRange) -> TracedFn:
    """Return the mask of the pairs whose `k.index - q.index` is in a range."""
    least, most = distances

    def visible(q_index: Any, k_index: Any, _: Any) -> Any:
        distance, result = k_index - q_index, None
        if most is not None:
            result = distance <= most
        if least is not None:
            from_least = distance >= least
            result = from_least if result is None else result & from_least
        return result

    index = jax.ShapeDtypeStruct((1,) * NUM_LEADING_AXES, jnp.int32)
    return trace(f"distances {least} to {most}", visible, index, index, ())
