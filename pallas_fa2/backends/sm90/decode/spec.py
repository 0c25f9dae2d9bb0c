"""What a decode kernel is specialized on."""

import dataclasses

from pallas_fa2.arithmetic import round_up
from pallas_fa2.ir.affine import DistanceRange

# The rows of a swizzle atom, and the least N of WGMMA: the queries of a tile are columns, in groups of so many.
COLUMN_MULTIPLE = 8


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

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def padded_group(self) -> int:
        """The columns that the query heads of one token and key head take."""
        return round_up(self.group, COLUMN_MULTIPLE)

    @property
    def attends_past_its_own(self) -> bool:
        """Whether a query may attend to keys after its own, so that those that exist limit it as well."""
        return self.distances.most is None or self.distances.most > 0

    @property
    def columns(self) -> int:
        """The columns of a tile of S^T: token t and head g of the group have column `t * padded_group + g`."""
        return self.q_len * self.padded_group
