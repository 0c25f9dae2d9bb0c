"""The configurations of the sm90 kernels, as measured, and which of them serves a call."""

import dataclasses
import math
from typing import Any, NamedTuple

from pallas_fa2.backends.common import aux_inputs, compile_mods, limits
from pallas_fa2.backends.protocol import Configuration
from pallas_fa2.backends.sm90 import support
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.decode.cached_forward import FLASH_FORWARD
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

ANY_LENGTH = math.inf, math.inf


class ConfigRule(NamedTuple):
    """A configuration of the forward, and the calls that it serves."""

    config: ForwardConfig
    max_q_len: tuple[float, float] = ANY_LENGTH  # up to so many queries if causal, if full
    for_mods: bool = False  # serves masks other than a causal one, and score functions
    for_mask_only: bool = False  # serves a mask alone that reads no pairs as well, of any length

    def matches_kind(self, spec: CallSpec) -> bool:
        """Return whether the rule serves such calls, of some length."""
        if spec.is_plain:
            return not self.for_mods
        mask_only = spec.has_only_mask and not compile_mods.pairwise_bytes(spec)
        return (self.for_mods or (self.for_mask_only and mask_only)) and self.fits_smem(spec)

    def matches(self, spec: CallSpec) -> bool:
        """Return whether the rule serves this call."""
        too_long = spec.is_plain and spec.q_len > self.max_q_len[spec.causal is None]
        return self.matches_kind(spec) and not too_long

    def fits_smem(self, spec: CallSpec) -> bool:
        """Return whether shared memory has room for the aux inputs. (Keys have a row more: their index.)"""
        size, rows = compile_mods.pairwise_bytes(spec), compile_mods.num_token_rows(spec, "k") + 1
        if size == 0:
            return self.config.free_smem(rows) >= 0
        return self.config.pairwise_stages(size, rows) >= 1


# The registers of a thread in a consumer and in the producer: 128 * (2 * 240 + 24) or 128 * (3 * 160 + 32) of 65,536.
TWO_CONSUMERS, THREE_CONSUMERS = (240, 24), (160, 32)

# For each head dim, the first rule that matches a call serves it, as measured on an H200 (docs/decisions/0009, 0012,
# 0018, 0019). A kernel takes a second buffer of Q where there is room (`ForwardConfig.with_double_buffered_q`): 1 % for
# long sequences and 5 to 13 % for 512 tokens.
FORWARD_CONFIGS = (
    # At H = 64 three consumers are 10 to 20 % faster than two, unless most of their larger tiles lies beyond the
    # diagonal, or a tile is most of a sequence (256 and 197 tokens 1.6 times as fast with two). P V of half of a
    # block at once: 1 to 2 % at H = 64, but 1.5 % less at 96 and 4 to 6 % at 128.
    ConfigRule(
        ForwardConfig(64, 64, 2, 128, stages=3, registers=TWO_CONSUMERS, q_stages=2, pv_chunk=64),
        max_q_len=(1024, 320),
    ),
    ConfigRule(
        ForwardConfig(64, 64, 3, 128, stages=3, registers=THREE_CONSUMERS, q_stages=2, pv_chunk=64)
    ),
    # At H = 96 three consumers are faster from 2048 queries on (2 to 4 %; 9 to 19 % at H = 80, whose panels of 16
    # columns TMA loads slowly). Under masks a third consumer's larger tiles cost windows of 128 keys 16 to 43 %.
    ConfigRule(
        ForwardConfig(96, 96, 2, 128, stages=2, registers=TWO_CONSUMERS, q_in_registers=True),
        max_q_len=(1024, 1024),
        for_mask_only=True,
    ),
    ConfigRule(
        ForwardConfig(128, 128, 2, 128, stages=2, registers=TWO_CONSUMERS, q_in_registers=True)
    ),
    # With more keys a third consumer would spill.
    ConfigRule(ForwardConfig(96, 96, 3, 96, stages=3, registers=THREE_CONSUMERS, q_stages=2)),
    ConfigRule(
        ForwardConfig(192, 128, 2, 128, stages=2, registers=TWO_CONSUMERS, epilogue_columns=64),
        for_mask_only=True,
    ),
    ConfigRule(
        ForwardConfig(192, 192, 2, 64, stages=2, registers=TWO_CONSUMERS, epilogue_columns=96)
    ),
    # At H = 256 an accumulator of 64 rows takes 128 registers of each thread, which leaves room for 64 keys.
    ConfigRule(ForwardConfig(256, 256, 2, 64, stages=2, registers=TWO_CONSUMERS)),
    # Mods take registers: those of Q, or of a third consumer. (Two buffers of Q beside pairwise inputs as well.)
    ConfigRule(
        ForwardConfig(64, 64, 2, 128, stages=3, registers=TWO_CONSUMERS, q_stages=2, pv_chunk=64),
        for_mods=True,
    ),
    ConfigRule(
        ForwardConfig(96, 96, 2, 128, stages=2, registers=TWO_CONSUMERS, q_stages=2), for_mods=True
    ),
    ConfigRule(ForwardConfig(128, 128, 2, 128, stages=2, registers=TWO_CONSUMERS), for_mods=True),
    # Per-key inputs take the room of half of the output, or of half of the keys.
    ConfigRule(
        ForwardConfig(192, 128, 2, 64, stages=2, registers=TWO_CONSUMERS, epilogue_columns=64),
        for_mods=True,
    ),
    ConfigRule(
        ForwardConfig(192, 192, 2, 64, stages=2, registers=TWO_CONSUMERS, epilogue_columns=96),
        for_mods=True,
    ),
    ConfigRule(
        ForwardConfig(256, 256, 2, 64, stages=2, registers=TWO_CONSUMERS, epilogue_columns=64),
        for_mods=True,
    ),
    # A block of keys brings 2 to 8 bytes of pairwise inputs for each of a CTA's rows and keys.
    *(
        ConfigRule(
            ForwardConfig(dim, dim, 2, block_kv=64, stages=2, registers=TWO_CONSUMERS),
            for_mods=True,
        )
        for dim in (64, 96, 128)
    ),
)


# On a cache the producer holds the pages of a block, eight of 16 tokens, beside the claim of a tile: with 40 registers
# it spills. 128 * (2 * 224 + 56) are 64,512 registers.
IN_CACHE = (224, 56)
CACHED_FORWARD_CONFIGS = (
    ForwardConfig(64, 64, 2, 128, stages=3, registers=IN_CACHE, q_stages=2, pv_chunk=64),
    ForwardConfig(96, 96, 2, 128, stages=2, registers=IN_CACHE, q_stages=2),
    ForwardConfig(128, 128, 2, 128, stages=2, registers=IN_CACHE),
    ForwardConfig(192, 128, 2, 128, stages=2, registers=IN_CACHE, epilogue_columns=64),
    ForwardConfig(192, 192, 2, 64, stages=2, registers=IN_CACHE, epilogue_columns=96),
    ForwardConfig(256, 256, 2, 64, stages=2, registers=IN_CACHE, epilogue_columns=64),
)


def _of_8_bits(config: ForwardConfig, **changes: Any) -> ForwardConfig:
    """Return the configuration for a cache of 8 bits, of which blocks come in halves. 128 * (2 * 216 + 2 * 40) are
    65,536 registers."""
    config = dataclasses.replace(config, registers=(216, 40, 40), **changes)
    return dataclasses.replace(config, subtile_kv=config.block_kv // 2)


_64, _96, _128, _192_128, _192, _256 = CACHED_FORWARD_CONFIGS
FORWARD_CONFIGS_OF_8_BITS = (
    *map(_of_8_bits, (_64, _96, _128)),
    _of_8_bits(_192_128, block_kv=64),  # of 128 keys there is no room for the halves
    _of_8_bits(_192),
    # In CTAs of four warpgroups ptxas has 128 registers for an instruction, and a product of H = 256 takes more.
    dataclasses.replace(_256, subtile_kv=16),
)


def cached_forward_config(
    head_dim: int, value_dim: int, eight_bits: bool = False
) -> ForwardConfig | None:
    """Return the configuration of the forward on a cache of 16 bits or of 8, if there is one for these head dims."""
    configs = FORWARD_CONFIGS_OF_8_BITS if eight_bits else CACHED_FORWARD_CONFIGS
    dims = head_dim, value_dim
    return next((x for x in configs if (x.head_dim, x.value_dim) == dims), None)


def forward_configs(head_dim: int, value_dim: int) -> list[ConfigRule]:
    """Return the rules of the kernels of these head dims, or of the next sizes up."""
    dims = support.kernel_dims(head_dim, value_dim)
    return [
        rule for rule in FORWARD_CONFIGS if (rule.config.head_dim, rule.config.value_dim) == dims
    ]


def configure(spec: CallSpec, device: Device) -> Configuration:
    """Return the measured configuration of a call on this device."""
    forward = FLASH_FORWARD.configure(spec, device)
    if forward is None:
        rules = forward_configs(spec.head_dim, spec.value_dim)
        rule = next(rule for rule in rules if rule.matches(spec))
        forward = dataclasses.replace(rule.config, num_ctas=device.num_sms)
    backward = BackwardConfig(
        *support.kernel_dims(spec.head_dim, spec.value_dim),
        num_ctas=device.num_sms,
        deterministic=spec.deterministic,
    )
    reason = limits.reason_of_ordered_scores(spec)
    score_gradients = None if reason is None else "blockwise"
    return Configuration(forward, backward, score_gradients, reason)


# Bytes, of the 60 MB of L2, for K and V of the heads that run at the same time.
L2_BUDGETS = (16 << 20, 32 << 20, 48 << 20)


def candidates(spec: CallSpec, device: Device) -> list[ForwardConfig]:
    """Return the forward configs that `autotune` tries: those of the call's head dims; under a mask alone, those for
    calls without one as well; for causal calls, with several numbers of heads that share the L2. The decode kernel has
    no others."""
    if FLASH_FORWARD.configure(spec, device) is not None:
        return []

    def suits(rule: ConfigRule) -> bool:
        plain = spec.has_only_mask and not rule.for_mods
        padded = all(aux_inputs.PAD_MULTIPLE % n == 0 for n in rule.config.tile)
        plain &= padded or not compile_mods.mask_reads_pairs(spec)
        return rule.matches_kind(spec) or (plain and rule.fits_smem(spec))

    return [
        dataclasses.replace(rule.config, num_ctas=device.num_sms, l2_budget=budget)
        for rule in forward_configs(spec.head_dim, spec.value_dim)
        if suits(rule)
        for budget in (L2_BUDGETS if spec.causal else (rule.config.l2_budget,))
    ]
