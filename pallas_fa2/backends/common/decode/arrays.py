"""Arrays in device memory of a decode kernel."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.mods import NO_MODS, ModArrays
from pallas_fa2.backends.common.decode.schedule import DecodePlan
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.ir.quantized import Scales


def page_rows(spec: DecodeSpec, block_kv: int) -> int:
    """Return how many keys of a block one copy brings: a power of two that divides the page size, or the whole block.

    Copies begin at multiples of it, so that each is within a page.
    """
    if spec.page_size is None:
        return block_kv
    rows = block_kv
    while spec.page_size % rows:
        rows //= 2
    return rows


class Inputs(NamedTuple):
    """Arrays in device memory that the kernel reads."""

    q: Any  # [tokens * K, G, H]; of Hopper's [tokens * K, G, 1, H of shared memory]
    k: Any  # [B, S, K, H], or pages [P, page size, K, H]
    v: Any
    plan: DecodePlan
    table: Any = None  # int32 [B, pages of a request]: the pages, of a paged cache
    mods: ModArrays = NO_MODS
    scales: Scales | None = None  # [B, K, S], or of pages [P, K, page size]: of K and V of 8 bits


class Outputs(NamedTuple):
    """Arrays in device memory that the kernel writes.

    A CTA has two splits at most: `2 * cta` is of a tile that an earlier CTA begins, `2 * cta + 1` of one that it begins
    itself. Fixed splits are rows of the plan's entries: that of a head and a row is `head * rows + row`.
    """

    out: Any  # [tokens, N, Hv]; of Hopper's [tokens * K, G, 1, Hv of shared memory]
    lse: Any  # float32 [tokens * N], natural
    split_out: Any  # float32 [splits, Hv / 64, 64 * columns]: O^T, normalized, as its tiles lie in registers
    split_lse: Any  # float32 [splits, columns], in base 2
    # int32 [heads * rows, 2]: 64 bits that count the splits of a tile that are stored so far (`merge`), anything before
    # the kernel and after it. The word of a tile is that of its head and entry, or of its first fixed split.
    arrivals: Any

    @classmethod
    def types(cls, spec: DecodeSpec, config: DecodeConfig, out: Any) -> "Outputs":
        """Return the types of the arrays of a launch, of which `out` is that of the first."""
        rows, f32 = spec.kv_heads * spec.max_rows, jnp.float32
        splits = 2 * config.num_ctas if spec.split_blocks is None else rows
        fragments = splits, config.value_dim // 64, 64 * spec.columns
        return cls(
            out,
            jax.ShapeDtypeStruct((spec.num_tokens * spec.q_heads,), f32),
            jax.ShapeDtypeStruct(fragments, f32),
            jax.ShapeDtypeStruct((splits, spec.columns), f32),
            jax.ShapeDtypeStruct((rows, 2), I32),
        )


@dataclasses.dataclass(frozen=True)
class Cta[Memory]:
    """What one CTA works with."""

    spec: DecodeSpec
    config: DecodeConfig
    inputs: Inputs
    outputs: Outputs
    memory: Memory

    def load_entry(self, index: Scalar) -> Entry:
        """Load an entry of the plan, or a row of fixed splits."""
        return self.inputs.plan.load_entry(self.spec, index)
