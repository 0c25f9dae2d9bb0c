"""Which calls on a cache take less time in tiles of 128 queries of one head, as the other kernels have, than in entries
of a decode kernel: one rule, by shapes alone (docs/decisions/0087-prompts-on-a-cache.md)."""

import dataclasses

from pallas_fa2.arithmetic import round_up
from pallas_fa2.backends.common.decode.spec import MAX_COLUMNS, DecodeSpec
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec

ROWS = 128  # queries of a tile


@dataclasses.dataclass(frozen=True)
class BlockCosts:
    """What 64 keys of one head cost a multiprocessor, in any unit of time."""

    tile: float  # against the rows of a tile, however many are queries
    full_entry: float  # against `MAX_COLUMNS` columns of an entry; fewer cost less in proportion
    load: float  # at least, where they come from device memory

    def tiles(self, requests: int, queries: int, heads: tuple[int, int], num_sms: int) -> float:
        """Return the cost of the tiles of requests of so many queries, in whole waves, as no tile is split."""
        q_heads, kv_heads = heads
        of_head = -(-queries // ROWS)
        tiles = round_up(requests * q_heads * of_head, num_sms)
        # of the same keys, at about the same time: one of them waits for memory
        readers = of_head * q_heads / kv_heads
        return tiles * max(self.tile, self.load / readers)

    def entries(self, count: int, columns: int) -> float:
        """Return the cost of so many entries of a key head each; they are split, so that all multiprocessors have a
        share."""
        return count * max(self.load, self.full_entry * columns / MAX_COLUMNS)


# Not measured: a tile's products with 64 keys and H = 128 are 4.2 MFLOP, and their loads 32 KiB, each 0.9 us at a share
# of an H200's 600 TFLOP/s and 4.8 TB/s.
BY_COUNT = BlockCosts(tile=1, full_entry=1, load=1)


def prefers_tiles(cached: CachedSpec, costs: BlockCosts, num_sms: int) -> bool:
    """Return whether a call whose requests have as many queries each takes less time in tiles."""
    call, launch = cached.call, DecodeSpec.of_call(cached)
    entries = costs.entries(launch.max_entries * launch.kv_heads, launch.columns)
    heads = call.q_heads, call.kv_heads
    tiles = costs.tiles(call.batch, call.q_len, heads, num_sms)
    return entries > tiles


def slower_reason(cached: CachedSpec, device: Device, costs: BlockCosts = BY_COUNT) -> str | None:
    """Return why the kernels of `flash_attention` take less time for a call on a contiguous cache, or None.

    They read it where it is too, with fewer reads of keys for many queries, and more for grouped heads.
    """
    is_contiguous = cached.page_size is None and cached.quantized is None
    if cached.is_packed or cached.split_size is not None or not is_contiguous:
        return None
    if not prefers_tiles(cached, costs, device.num_sms):
        return None
    call, launch = cached.call, DecodeSpec.of_call(cached)
    others = call.batch * call.q_heads * -(-call.q_len // ROWS)
    times = launch.entries_per_request * launch.parts
    return (
        f"it would read keys {times} times for {call.q_len} queries, {launch.q_len} at a time, and takes more time than the "
        f"{others} tiles of {ROWS} queries of one head, which read the cache where it is as well"
    )
