"""The forward of `cached_attention` on Hopper: few tokens by the decode kernel, prompts by tiles of the forward.

docs/design/paged-forward.md says which request takes which.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common import limits
from pallas_fa2.backends.common.block_mask_kernel import MAX_BLOCKS
from pallas_fa2.backends.common.decode import break_even
from pallas_fa2.backends.common.decode.cached_forward import LaunchArrays, forward, launch_decode
from pallas_fa2.backends.common.decode.cached_forward import describe as describe_decode
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.mods import DecodeMods, needs_mask_code
from pallas_fa2.backends.common.decode.spec import MAX_COLUMNS, DecodeSpec, max_columns
from pallas_fa2.backends.common.decode.support import MAX_INDEX
from pallas_fa2.backends.protocol import CachedForward
from pallas_fa2.backends.sm90 import configs
from pallas_fa2.backends.sm90.decode import cached_forward as decode_forward
from pallas_fa2.backends.sm90.decode import support as decode_support
from pallas_fa2.backends.sm90.decode.config import choose
from pallas_fa2.backends.sm90.decode.kernel import decode
from pallas_fa2.backends.sm90.forward import eight_bit_rows
from pallas_fa2.backends.sm90.forward.cached_tiles import plan_tiles, reads_tokens, tiles_spec
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.kernel import attention_on_cache
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec

DECODE = decode_forward.CACHED_FORWARD
# Microseconds on an H200 with H = 128 (docs/decisions/0087-prompts-on-a-cache.md); other head dims are taken to be
# alike.
COSTS = break_even.BlockCosts(tile=0.69, full_entry=1.64, load=1.0)
# The same of 8 bits (docs/decisions/0093-tiles-of-8-bits.md).
COSTS_OF_8_BITS = break_even.BlockCosts(tile=0.93, full_entry=1.4, load=0.6)
# The columns of an entry beside tiles: one of half as many as there may be takes no longer than its loads, so that a
# decode step loses nothing by them.
FEW_COLUMNS = MAX_COLUMNS // 2
# By estimate a second launch and its tables take 10 to 20 us, so that tiles beside entries have to save half of the
# time.
LEAST_GAIN = 2
# Eight copies bring a block of 128 keys from pages of 16 tokens.
PAGE_MULTIPLE = 16
# Tiles of one launch, at most: their ids are int32, and the table of their order has 8 bytes for each.
MAX_TILES = 1 << 24
DIMS = ", ".join(f"{x.head_dim} and {x.value_dim}" for x in configs.CACHED_FORWARD_CONFIGS)


class TileConfigs(NamedTuple):
    """The configurations of a call of which some requests, or all, are tiles of the forward."""

    # Of the requests of few tokens, where those of packed queries may have many or few.
    decode: DecodeConfig | None
    decoded: int  # their new tokens at most; 0 where all requests are tiles
    tiles: ForwardConfig


def unsupported_tiles(cached: CachedSpec) -> str | None:
    """Return why the forward does not run a call on a cache, or None."""
    call = cached.call
    if not (isinstance(call.batch, int) and call.has_known_lengths):
        return "its arrays have sizes that are known, and here some are symbols"
    if 0 in (call.batch, call.q_len, call.kv_len):
        return "it has queries and slots for keys, and here are none"
    if reason := limits.unsupported_reason(call):
        return reason
    if needs_mask_code(cached):
        return "its mask is causal, a window of distances, or None, without given positions"
    if call.scores and (reason := _unsupported_scores(cached)):
        return reason
    if cached.quantized is not None and call.dtype == jnp.float16:
        return "queries beside 8 bits are in bfloat16: in float16 numbers times large scales are infinite"
    if configs.cached_forward_config(call.head_dim, call.value_dim) is None:
        return f"H and Hv are {DIMS}, and here {call.head_dim} and {call.value_dim}"
    if cached.quantized is None and (cached.page_size or 0) % PAGE_MULTIPLE:
        return f"a page has a multiple of {PAGE_MULTIPLE} tokens, and here {cached.page_size}"
    if cached.split_size is not None:
        return "it has no fixed splits"
    if call.kv_len > MAX_BLOCKS * 64:
        return f"a sequence has {MAX_BLOCKS * 64} slots at most, and here {call.kv_len}"
    rows = call.q_len if cached.is_packed else call.batch * call.q_len
    if rows * call.q_heads > MAX_TILES:
        return f"there are {MAX_TILES} rows of all heads at most, and here {rows * call.q_heads}"
    return None


def _unsupported_scores(cached: CachedSpec) -> str | None:
    if cached.has_given_positions:
        return "with scores it computes the positions of queries, and here they are given"
    mods = DecodeMods.compile(cached)
    if mods is not None and reads_tokens(mods):
        return "its scores read positions and data of heads, none of tokens"
    if cached.call.kv_len > MAX_INDEX:
        return (
            f"with scores sequences have {MAX_INDEX} slots at most, and here {cached.call.kv_len}"
        )
    return None


def _few_spec(
    spec: CachedSpec, decoded: int, requests: int | None = None, kv_heads: int | None = None
) -> DecodeSpec:
    """Return the launch of the decode kernel beside tiles: of requests with up to `decoded` new tokens."""
    launch = DecodeSpec.of_call(spec, requests, kv_heads)
    q_len = max(1, min(FEW_COLUMNS, max_columns(spec)) // launch.padded_group)
    requests = spec.call.batch if requests is None else requests
    # rows before the first request and after the last one count as two more
    entries = min(launch.num_tokens, (requests + 2) * -(-decoded // q_len))
    return dataclasses.replace(launch, q_len=q_len, max_entries=entries, taken_queries=(0, decoded))


def _costs(spec: CachedSpec) -> break_even.BlockCosts:
    return COSTS if spec.quantized is None else COSTS_OF_8_BITS


def max_decoded(spec: CachedSpec, num_sms: int) -> int:
    """Return the new tokens of a request, at most, that the decode kernel takes beside tiles: those with which it would
    take no longer if all requests had as many."""
    call, launch, costs = spec.call, _few_spec(spec, 1), _costs(spec)
    heads = call.q_heads, call.kv_heads

    def takes_longer(entries: int) -> bool:
        count = call.batch * entries * launch.kv_heads
        tiles = costs.tiles(call.batch, entries * launch.q_len, heads, num_sms)
        return costs.entries(count, launch.columns) > tiles

    entries = 1
    while not takes_longer(entries + 1):
        entries += 1
    return entries * launch.q_len


def _may_gain(spec: CachedSpec, num_sms: int) -> bool:
    """Return whether tiles beside entries would save time, if one request of packed queries had all but a token of each
    other one."""
    call, launch, costs = spec.call, DecodeSpec.of_call(spec), _costs(spec)
    queries = call.q_len - (call.batch - 1)
    if queries < 1:
        return False
    entries = costs.entries(-(-queries // launch.q_len) * launch.kv_heads, launch.columns)
    tiles = costs.tiles(1, queries, (call.q_heads, call.kv_heads), num_sms)
    return entries > tiles * (LEAST_GAIN if call.batch > 1 else 1)


def _prefers_tiles(spec: CachedSpec, num_sms: int) -> bool:
    if spec.is_packed:
        return _may_gain(spec, num_sms)
    return break_even.prefers_tiles(spec, _costs(spec), num_sms)


def _has_both(spec: CachedSpec) -> bool:
    """Return whether some requests may be tiles and others the decode kernel's: how many tokens each has is data."""
    return spec.is_packed and spec.call.batch > 1


def unsupported_reason(cached: CachedSpec, device: Device) -> str | None:
    """Return why no kernel runs a call on a cache on this device, or None."""
    reason = DECODE.unsupported_reason(cached, device)
    if reason is None or not device.is_sm90 or unsupported_tiles(cached) is not None:
        return reason
    if not _prefers_tiles(cached, device.num_sms):
        return reason
    if not _has_both(cached):
        return None
    few = _few_spec(cached, max_decoded(cached, device.num_sms))
    return decode_support.unsupported_reason(cached, device, few)


def slower_reason(cached: CachedSpec, device: Device) -> str | None:
    """Return why the kernels of `flash_attention` take less time for a call that has no tiles here, or None."""
    if unsupported_tiles(cached) is None:
        return None
    return break_even.slower_reason(cached, device, _costs(cached))


def configure(cached: CachedSpec, device: Device) -> DecodeConfig | TileConfigs:
    """Return the configuration of a call, or those of its two launches."""
    if unsupported_tiles(cached) is not None or not _prefers_tiles(cached, device.num_sms):
        return DECODE.configure(cached, device)
    dims = cached.call.head_dim, cached.call.value_dim
    tiles = configs.cached_forward_config(*dims, eight_bits=cached.quantized is not None)
    assert tiles is not None, "`unsupported_tiles` says so"
    tiles = dataclasses.replace(tiles, num_ctas=device.num_sms)
    if not _has_both(cached):
        return TileConfigs(None, 0, tiles)
    decoded = max_decoded(cached, device.num_sms)
    few = choose(_few_spec(cached, decoded), device.num_sms)
    assert few is not None, "`unsupported_reason` says so"
    return TileConfigs(few, decoded, tiles)


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
    if spec.quantized is not None and max(k.size, v.size) > eight_bit_rows.MAX_ELEMENTS:
        raise ValueError(
            f"prompts read caches of {eight_bit_rows.MAX_ELEMENTS} elements of 8 bits in key, or in value, at most, and here are "
            f"{k.size} and {v.size}; divide the cache, or append prompts in parts of few tokens"
        )
    tokens, requests, kv_heads = q.shape[0], arrays.lengths.size, k.shape[2]
    starts, least, others = arrays.starts, 0, None
    if starts is None:
        starts = jnp.arange(requests + 1, dtype=I32) * (tokens // requests)
    if config.decode is not None:
        least = config.decoded + 1
        few = _few_spec(spec, config.decoded, requests, kv_heads)
        others = launch_decode(decode, spec, config.decode, q, k, v, arrays, few)
    tiles = tiles_spec(spec, config.tiles, tokens, requests, kv_heads, least)
    plan = plan_tiles(tiles, config.tiles, arrays.lengths, starts)
    table, mods, scales = arrays.table, arrays.mods, arrays.scales
    return attention_on_cache(
        tiles, config.tiles, q, k, v, plan, table, mods, scales=scales, others=others
    )


def describe(spec: CachedSpec, config: DecodeConfig | TileConfigs) -> str:
    """Describe the kernels that serve a call."""
    if isinstance(config, DecodeConfig):
        reason = unsupported_tiles(spec) if _prefers_tiles(spec, config.num_sms) else None
        text = "" if reason is None else f"; the forward's tiles would take less time, but {reason}"
        return DECODE.describe(spec, config) + text
    tiles = config.tiles
    keys = "the pages in the pool" if spec.page_size else "keys in the cache"
    text = (
        f"{tiles.block_q} queries x {tiles.block_kv} keys, {tiles.stages} stages, {tiles.warpgroups} warpgroups multiply, "
        f"{tiles.num_ctas} persistent CTAs that read {keys}, tiles by lengths"
    )
    if config.decode is None:
        return text
    few = describe_decode(spec, config.decode, _few_spec(spec, config.decoded))
    return f"requests of up to {config.decoded} tokens: {few}; others: {text}"


CACHED_FORWARD = CachedForward(
    unsupported_reason,
    configure,
    functools.partial(forward, launch, f"{__name__}.launch"),
    describe,
    slower_reason,
)
