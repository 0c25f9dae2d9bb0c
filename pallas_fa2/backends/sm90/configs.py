"""Measured configurations of the forward kernels."""

import math
from typing import Any, NamedTuple

from pallas_fa2.backends.sm90 import aux_inputs, support
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.ir.call_spec import CallSpec

ANY_LENGTH = math.inf, math.inf


class ConfigRule(NamedTuple):
    """A kernel's configuration, and the calls that it serves."""

    config: Any
    max_q_len: tuple[float, float] = ANY_LENGTH  # up to so many queries; causal, full
    for_mods: bool = False  # under masks other than a causal one, and with score functions
    for_mask_only: bool = False  # under a mask alone that reads no pairs as well, of any length

    def matches_kind(self, spec: CallSpec) -> bool:
        """Whether it is made for such calls, of some length."""
        if spec.is_plain:
            return not self.for_mods
        alone = spec.has_only_mask and not aux_inputs.pairwise_bytes(spec)
        return (self.for_mods or (self.for_mask_only and alone)) and self.fits_smem(spec)

    def matches(self, spec: CallSpec) -> bool:
        long = spec.is_plain and spec.q_len > self.max_q_len[spec.causal is None]
        return self.matches_kind(spec) and not long

    def fits_smem(self, spec: CallSpec) -> bool:
        """Whether shared memory has room for data of tokens and pairs. (A row more of keys is their places.)"""
        size, rows = aux_inputs.pairwise_bytes(spec), aux_inputs.num_token_rows(spec, "k") + 1
        if size == 0:
            return self.config.free_smem(rows) >= 0
        return self.config.pairwise_stages(size, rows) >= 1


# Of a head dim, the first that serves a call, as measured on an H200 (docs/decisions/0009, 0012, 0018, 0019). Registers:
# 128 * (2 * 240 + 24) or 128 * (3 * 160 + 32) of 65,536. A kernel takes a second buffer of Q where there is
# room (`Config.with_double_buffered_q`): 1 % for long sequences and 5 to 13 % for 512 tokens. At H = 64 three
# warpgroups are 10 to 20 % faster than two, unless most of their larger tiles lies beyond the diagonal, or a tile is most of a sequence
# (256 and 197 tokens 1.6 times as fast with two); at H = 96 from 2048 queries
# on (2 to 4 %; 9 to 19 % at H = 80, whose panels of 16 columns TMA loads slowly); at H = 256 an
# accumulator of 64 rows takes 128 registers of each thread, which leaves room for 64 keys. Under masks a third
# warpgroup's larger tiles cost windows of 128 keys 16 to 43 %. Half of a block's values at once: 1 to 2 % at
# H = 64, but 1.5 % less at 96 and 4 to 6 % at 128.
FORWARD_CONFIGS = (
    *(
        ConfigRule(
            ForwardConfig(64, 64, warpgroups, 128, 3, registers, q_stages=2, pv_chunk=64),
            max_q_len=longest,
        )
        for warpgroups, registers, longest in (
            (2, (240, 24), (1024, 320)),
            (3, (160, 32), ANY_LENGTH),
        )
    ),
    *(
        ConfigRule(
            ForwardConfig(
                dim, dim, 2, block_kv=128, stages=2, registers=(240, 24), q_in_registers=True
            ),
            max_q_len=longest,
            for_mask_only=masks,
        )
        for dim, longest, masks in ((96, (1024, 1024), True), (128, ANY_LENGTH, False))
    ),
    # More keys would spill.
    ConfigRule(ForwardConfig(96, 96, 3, block_kv=96, stages=3, registers=(160, 32), q_stages=2)),
    ConfigRule(
        ForwardConfig(
            192, 128, 2, block_kv=128, stages=2, registers=(240, 24), epilogue_columns=64
        ),
        for_mask_only=True,
    ),
    ConfigRule(
        ForwardConfig(192, 192, 2, block_kv=64, stages=2, registers=(240, 24), epilogue_columns=96)
    ),
    ConfigRule(ForwardConfig(256, 256, 2, block_kv=64, stages=2, registers=(240, 24))),
    # Functions take registers: for Q, or of a third warpgroup. (Two buffers of Q beside data of pairs as well.)
    *(
        ConfigRule(
            ForwardConfig(
                dim, dim, 2, 128, stages, (240, 24), q_stages=q_buffers, pv_chunk=at_once
            ),
            for_mods=True,
        )
        for dim, stages, q_buffers, at_once in (
            (64, 3, 2, 64),
            (96, 2, 2, None),
            (128, 2, 1, None),
        )
    ),
    # Data of keys take the room of half of the output, or of half of the keys.
    *(
        ConfigRule(
            ForwardConfig(
                *dims, 2, block_kv=64, stages=2, registers=(240, 24), epilogue_columns=out_columns
            ),
            for_mods=True,
        )
        for dims, out_columns in (((192, 128), 64), ((192, 192), 96), ((256, 256), 64))
    ),
    # Of data of pairs, a block of keys brings 2 to 8 bytes for each of a CTA's rows.
    *(
        ConfigRule(
            ForwardConfig(dim, dim, 2, block_kv=64, stages=2, registers=(240, 24)),
            for_mods=True,
        )
        for dim in (64, 96, 128)
    ),
)


def forward_configs(head_dim: int, value_dim: int) -> list[ConfigRule]:
    """The forward kernels of these head dims, or of the next sizes up."""
    dims = support.kernel_dims(head_dim, value_dim)
    return [t for t in FORWARD_CONFIGS if (t.config.head_dim, t.config.value_dim) == dims]
