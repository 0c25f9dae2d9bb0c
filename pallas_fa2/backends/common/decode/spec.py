"""What a decode kernel is specialized on."""

import dataclasses
from typing import Any

from pallas_fa2.arithmetic import LOG2E, div, round_up
from pallas_fa2.backends.common.decode.mods import DecodeMods, needs_mask_code
from pallas_fa2.ir.affine import DistanceRange
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.call_spec import MASKED_SCORE_THRESHOLD

BLOCK_KV = 64  # keys are the rows of S^T: the M of WGMMA, and four warps' M of mma.sync
# The rows of a swizzle atom, and the least N of WGMMA: the queries of a tile are columns, in groups of so many.
COLUMN_MULTIPLE = 8
# A thread has (Hv + 3 * 64) / 128 registers for each column in O^T, S^T, P^T and the sums of its rows: with 64 columns
# at Hv = 128 all 255 are in use.
MAX_COLUMNS = 64
# As operands in registers, K and V of 8 bits take max(H, Hv) / 4 more at a time: with 64 columns at Hv = 128 (and with
# 32 at 256) a thread spills 42 of them (62).
MAX_COLUMNS_OF_8_BITS = {128: 32, 256: 16}  # up to so large head dims
# Below any score, but finite: a query that attends to no key has P = 0 rather than NaN.
NO_MAXIMUM = -1e30


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static description of one launch; one kernel is compiled for each.

    Queries come in entries: up to `q_len` consecutive queries of one request, a decode step or a part of a prompt. How
    many entries there are, and where each begins, is data (`schedule.DecodePlan`).
    """

    max_entries: int
    q_len: int
    num_tokens: int  # rows of Q
    kv_len: int  # the capacity of a request
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    distances: DistanceRange  # of the keys that a query attends to, from its own position
    page_size: int | None = None  # keys of a page, if the cache is paged
    mods: DecodeMods | None = None
    # Blocks of keys of a fixed split, if splits are fixed.
    split_blocks: int | None = None
    quantized: str | None = None  # the dtype of keys and values of 8 bits, which have scales
    # Each entry of a request reads its keys. Packed requests have as many entries as they need.
    entries_per_request: int = 1
    # Where a group has more heads than a tile has columns, it is divided into so many parts: `kv_heads` are parts of
    # groups then, several of which read the keys of one head. Those of the last part may be fewer.
    parts: int = 1
    missing_heads: int = 0
    # Of packed queries, the least and the most of a request whose entries the launch has, where another has the others.
    taken_queries: tuple[int, int] | None = None

    @classmethod
    def of_call(
        cls,
        cached: CachedSpec,
        requests: int | None = None,
        kv_heads: int | None = None,
    ) -> "DecodeSpec":
        """Return the launch of a call, or of the part of it that has these requests and heads."""
        call = cached.call
        requests = call.batch if requests is None else requests
        kv_heads = call.kv_heads if kv_heads is None else kv_heads
        parts, group = divide_group(call.group, max_columns(cached))
        q_len, tokens, most = call.q_len, requests * call.q_len, max_queries(cached)
        per_request, entries = 1, requests
        if cached.is_packed:
            tokens, q_len = call.q_len, packed_q_len(call.q_len, requests, most)
            entries = max_packed_entries(tokens, requests, q_len)
        elif q_len:
            per_request = -(-q_len // most)
            entries, q_len = requests * per_request, -(-q_len // per_request)
        distances = cached.distances
        if distances is None or needs_mask_code(cached):
            distances = DistanceRange()
        return cls(
            max_entries=entries,
            q_len=q_len,
            num_tokens=tokens,
            kv_len=call.kv_len,
            q_heads=kv_heads * parts * group,
            kv_heads=kv_heads * parts,
            head_dim=call.head_dim,
            value_dim=call.value_dim,
            scale=call.scale,
            distances=distances,
            page_size=cached.page_size,
            mods=DecodeMods.compile(cached),
            split_blocks=None if cached.split_size is None else cached.split_size // BLOCK_KV,
            quantized=cached.quantized,
            entries_per_request=per_request,
            parts=parts,
            missing_heads=parts * group - call.group,
        )

    @property
    def group(self) -> int:
        """The query heads of a tile."""
        return self.q_heads // self.kv_heads

    def key_head(self, head: Any) -> Any:
        """Return the head of keys that a tile reads, one of `kv_heads`."""
        return head if self.parts == 1 else div(head, self.parts)

    @property
    def max_blocks(self) -> int:
        """The blocks of keys of a full cache."""
        return -(-self.kv_len // BLOCK_KV)

    @property
    def max_rows(self) -> int:
        """The rows of the plan's table of entries at most: fixed splits have one each."""
        if self.split_blocks is None:
            return self.max_entries
        return self.max_entries * max(1, -(-self.kv_len // (self.split_blocks * BLOCK_KV)))

    @property
    def padded_group(self) -> int:
        """The columns that the query heads of one token and key head take."""
        return pad_group(self.group)

    @property
    def queries_of_request(self) -> int:
        """How many queries each request has, where they are not packed."""
        return self.num_tokens * self.entries_per_request // self.max_entries

    @property
    def pads_columns(self) -> bool:
        """Whether some columns are no queries: of a group, or of packed entries, which may have fewer than `q_len`."""
        return self.padded_group > self.group or self.max_entries * self.q_len > self.num_tokens

    @property
    def attends_past_its_own(self) -> bool:
        """Whether a query may attend to keys after its own, so that those that exist limit it as well."""
        return self.distances.most is None or self.distances.most > 0

    @property
    def no_key_threshold(self) -> float:
        """The score in base 2 such that a query whose scores are all as low or lower attends to no key."""
        has_score = self.mods is not None and self.mods.score is not None
        return MASKED_SCORE_THRESHOLD * LOG2E if has_score else NO_MAXIMUM

    @property
    def columns(self) -> int:
        """The columns of a tile of S^T: token t and head g of the group have column `t * padded_group + g`."""
        return self.q_len * self.padded_group


def pad_group(group: int) -> int:
    """Return the columns that a group takes."""
    return round_up(group, COLUMN_MULTIPLE)


def divide_group(group: int, columns: int) -> tuple[int, int]:
    """Return into how many parts a group is divided, and the query heads of a part: those of a tile of so many
    columns."""
    parts = -(-group // columns)
    return parts, -(-group // parts)


def max_columns(cached: CachedSpec) -> int:
    """Return the most columns of a tile."""
    if cached.quantized is None:
        return MAX_COLUMNS
    dim = max(cached.call.head_dim, cached.call.value_dim)
    fitting = (n for limit, n in MAX_COLUMNS_OF_8_BITS.items() if dim <= limit)
    return next(fitting, COLUMN_MULTIPLE)  # of larger dims there is no kernel


def max_queries(cached: CachedSpec) -> int:
    """Return the most queries of an entry."""
    columns = max_columns(cached)
    return columns // pad_group(divide_group(cached.call.group, columns)[1])


def packed_q_len(tokens: int, requests: int, most: int) -> int:
    """Return how many queries an entry of packed queries has, at `most`: as many as a request has on the average.

    A decode step has 1, and any more are columns of zeros; a prompt reads its keys once for each entry.
    """
    average = -(-tokens // requests)
    return min(1 << (average - 1).bit_length(), 1 << (most.bit_length() - 1))


def max_packed_entries(tokens: int, requests: int, q_len: int) -> int:
    """Return how many entries of up to `q_len` queries so many requests and tokens make at most.

    The tokens before the first request's and after the last one's make entries as well, which attend to nothing.
    """
    return min(tokens, tokens // q_len + requests + 2)
