"""The forward of `cached_attention` on Hopper: steps of few tokens by the decode kernel, prompts by tiles of the forward.

docs/design/paged-forward.md says which request takes which.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.cached_forward import LaunchArrays, forward, launch_decode
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.mods import needs_mask_code
from pallas_fa2.backends.common.decode.spec import MAX_COLUMNS, DecodeSpec, pad_group
from pallas_fa2.backends.protocol import CachedForward
from pallas_fa2.backends.sm90 import configs
from pallas_fa2.backends.sm90.decode import cached_forward as decode_forward
from pallas_fa2.backends.sm90.decode.kernel import decode
from pallas_fa2.backends.sm90.forward.cached_tiles import plan_tiles, tiles_spec
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.kernel import attention_on_cache
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec

DECODE = decode_forward.CACHED_FORWARD
# By estimate (docs/design/paged-forward.md) 128 keys cost 2,900 clocks in a tile, for each head of a group, and 525 for a
# token in an entry of 64 columns: as much with 5.5 tokens a head. Of groups beyond 8, an entry has fewer tokens.
DECODED_TOKENS_PER_HEAD, PADDED_GROUP = 4, 8
# Eight copies bring a block of 128 keys from pages of 16 tokens.
PAGE_MULTIPLE = 16
# Tiles of one launch: their ids are int32, and so are the positions of keys.
MAX_TILES = 1 << 24


class TileConfigs(NamedTuple):
    """The configurations of a call of which some requests, or all, are tiles of the forward."""

    decode: DecodeConfig | None  # of the requests of few tokens, where queries are packed
    tiles: ForwardConfig


def unsupported_tiles(cached: CachedSpec, device: Device) -> str | None:
    """Return why the forward does not run a call on a cache on this device, or None."""
    call = cached.call
    if not device.is_sm90:
        return f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind}"
    if not (isinstance(call.batch, int) and call.has_known_lengths):
        return "its arrays have sizes that are known, and here some are symbols"
    if call.dtype.name not in ("bfloat16", "float16") or cached.quantized is not None:
        return "its inputs are bfloat16 or float16"
    if 0 in (call.batch, call.q_len, call.kv_len):
        return "it has queries and slots for keys, and here are none"
    distances = cached.distances
    if needs_mask_code(cached) or call.scores or distances is None or distances.least is not None:
        return "its mask is causal or None, without scores"
    if configs.cached_forward_config(call.head_dim, call.value_dim) is None:
        return f"H and Hv are both 64 or both 128, and here {call.head_dim} and {call.value_dim}"
    if (cached.page_size or 0) % PAGE_MULTIPLE:
        return f"a page has a multiple of {PAGE_MULTIPLE} tokens, and here {cached.page_size}"
    if cached.split_size is not None:
        return "it has no splits"
    rows = call.q_len if cached.is_packed else call.batch * call.q_len
    if rows * call.q_heads > MAX_TILES or call.kv_len > 1 << 30:
        return f"there are {MAX_TILES} rows of all heads at most"
    return None


def _decodes_all(cached: CachedSpec) -> bool:
    """Return whether the decode kernel has all requests, by the shapes alone: no request has, or can have, a whole tile."""
    call = cached.call
    if cached.is_packed:
        block_q = configs.CACHED_FORWARD_CONFIGS[0].block_q
        return call.q_len < call.batch + block_q  # a token of each request, and a tile
    return call.q_len * pad_group(call.group) <= MAX_COLUMNS


def max_decoded(group: int) -> int:
    """Return the new tokens of a request, at most, that the decode kernel takes beside tiles."""
    return DECODED_TOKENS_PER_HEAD * min(group, PADDED_GROUP)


def unsupported_reason(cached: CachedSpec, device: Device) -> str | None:
    """Return why no kernel runs a call on a cache on this device, or None."""
    reason = DECODE.unsupported_reason(cached, device)
    if reason is not None and unsupported_tiles(cached, device) is None:
        return None
    return reason


def configure(cached: CachedSpec, device: Device) -> DecodeConfig | TileConfigs:
    """Return the configuration of a call, or those of its two launches."""
    decodes = DECODE.unsupported_reason(cached, device) is None
    if decodes and (_decodes_all(cached) or unsupported_tiles(cached, device) is not None):
        return DECODE.configure(cached, device)
    tiles = configs.cached_forward_config(cached.call.head_dim, cached.call.value_dim)
    assert tiles is not None, "`unsupported_tiles` says so"
    both = decodes and cached.is_packed
    return TileConfigs(
        DECODE.configure(cached, device) if both else None,
        dataclasses.replace(tiles, num_ctas=device.num_sms),
    )


def launch(
    spec: CachedSpec,
    config: DecodeConfig | TileConfigs,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    arrays: LaunchArrays,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [tokens, N, Hv]` and natural `lse [tokens, N]`."""
    if isinstance(config, DecodeConfig):
        return launch_decode(decode, spec, config, q, k, v, arrays)
    tokens, requests = q.shape[0], arrays.lengths.size
    starts, least, others = arrays.starts, 0, None
    if starts is None:
        starts = jnp.arange(requests + 1, dtype=I32) * (tokens // requests)
    if config.decode is not None:
        most = max_decoded(spec.call.group)
        least = most + 1
        others = launch_decode(decode, spec, config.decode, q, k, v, arrays, (0, most))
    tiles = DecodeSpec.of_call(spec, requests, k.shape[2])
    tiles = tiles_spec(tiles, config.tiles, tokens, requests, least)
    plan = plan_tiles(tiles, config.tiles, arrays.lengths, starts)
    return attention_on_cache(tiles, config.tiles, q, k, v, plan, arrays.table, others)


def describe(spec: CachedSpec, config: DecodeConfig | TileConfigs) -> str:
    """Describe the kernels that serve a call."""
    if isinstance(config, DecodeConfig):
        return DECODE.describe(spec, config)
    tiles = config.tiles
    keys = "the pages in the pool" if spec.page_size else "keys in the cache"
    text = (
        f"{tiles.block_q} queries x {tiles.block_kv} keys, {tiles.stages} stages, {tiles.warpgroups} warpgroups multiply, "
        f"{tiles.num_ctas} persistent CTAs that read {keys}, tiles by lengths"
    )
    if config.decode is None:
        return text
    few = DECODE.describe(spec, config.decode)
    return f"requests of up to {max_decoded(spec.call.group)} tokens: {few}; others: {text}"


CACHED_FORWARD = CachedForward(
    unsupported_reason,
    configure,
    functools.partial(forward, launch, f"{__name__}.launch"),
    describe,
)
