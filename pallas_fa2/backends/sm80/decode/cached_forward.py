"""The forward of `cached_attention` by mma.sync."""

import jax

from pallas_fa2.backends.common.decode import cached_forward
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.sm80.decode.config import choose
from pallas_fa2.backends.sm80.decode.kernel import decode
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedOperands, CachedSpec


def configure(spec: CachedSpec, device: Device) -> DecodeConfig:
    """Return the configuration of a call that is supported."""
    config = choose(DecodeSpec.of_call(spec), device)
    assert config is not None, "`unsupported_reason` says so"
    return config


def forward(
    spec: CachedSpec,
    config: DecodeConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: CachedOperands,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [B, T, N, Hv]` and natural `lse [B, N, T]`; of packed queries `[tokens, N, Hv]` and `[N, tokens]`."""
    return cached_forward.forward(decode, spec, config, q, k, v, operands)
