"""The configurations of the sm90 kernels, as measured, and which of them serves a call."""

import dataclasses
import math
from typing import Any, NamedTuple

from pallas_fa2.backends.common import aux_inputs
from pallas_fa2.backends.protocol import Configuration
from pallas_fa2.backends.sm90 import compile_mods, support
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.device import Device
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
        alone = spec.has_only_mask and not compile_mods.pairwise_bytes(spec)
        return (self.for_mods or (self.for_mask_only and alone)) and self.fits_smem(spec)

    def matches(self, spec: CallSpec) -> bool:
        long = spec.is_plain and spec.q_len > self.max_q_len[spec.causal is None]
        return self.matches_kind(spec) and not long

    def fits_smem(self, spec: CallSpec) -> bool:
        """Whether shared memory has room for data of tokens and pairs. (A row more of keys is their places.)"""
        size, rows = compile_mods.pairwise_bytes(spec), compile_mods.num_token_rows(spec, "k") + 1
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


def configure(spec: CallSpec, device: Device) -> Configuration:
    """The measured configuration of a call, on a device with so many SMs."""
    rules = forward_configs(spec.head_dim, spec.value_dim)
    forward = next(rule.config for rule in rules if rule.matches(spec))
    backward = BackwardConfig(
        *support.kernel_dims(spec.head_dim, spec.value_dim),
        num_ctas=device.num_sms,
        deterministic=spec.deterministic,
    )
    # The kernels sum gradients of score data in any order.
    score_gradients = "blockwise" if spec.deterministic and spec.scores else None
    forward = dataclasses.replace(forward, num_ctas=device.num_sms)
    return Configuration(forward, backward, score_gradients)


# Of the 60 MB of L2: the keys and values of the heads that run at the same time.
L2_BUDGETS = (16 << 20, 32 << 20, 48 << 20)


def candidates(spec: CallSpec, device: Device) -> list[ForwardConfig]:
    """The kernels of the call's head dim; under a mask alone, those without one as well. Causal calls also
    choose how many heads share the L2."""

    def suits(kernel: ConfigRule) -> bool:
        plain = spec.has_only_mask and not kernel.for_mods
        whole = all(aux_inputs.PAD_MULTIPLE % n == 0 for n in kernel.config.tile)
        plain &= whole or not compile_mods.mask_reads_pairs(spec)
        return kernel.matches_kind(spec) or (plain and kernel.fits_smem(spec))

    return [
        dataclasses.replace(kernel.config, num_ctas=device.num_sms, l2_budget=section)
        for kernel in forward_configs(spec.head_dim, spec.value_dim)
        if suits(kernel)
        for section in (L2_BUDGETS if spec.causal else (kernel.config.l2_budget,))
    ]
