"""What the warpgroups of the Hopper forward share."""

from typing import Any, NamedTuple

from pallas_fa2.backends.sm90 import block_mask
from pallas_fa2.backends.sm90.forward.schedule import QueryTile
from pallas_fa2.backends.sm90.primitives import layouts
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.backends.sm90.scheduler import DynamicTileScheduler, StaticTileScheduler


class SharedStorage(NamedTuple):
    """Shared memory and barriers of a CTA."""

    q: Any  # [warpgroups, q_buffers, 64, H]
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, Hv]
    out: Any  # [warpgroups, 64, columns of a piece]
    key_aux: Any  # [stages, rows, block_kv], if masks or scores read any
    full: Any  # all that complete by one arrival: each array costs a register for its phases
    q_empty: Any
    kv_empty: Any
    exit_barriers: list[Any]
    pairwise: list[Any]  # [warpgroups, pair_stages, 64, block_kv] of each array of pairs

    @property
    def warpgroups(self) -> int:
        return self.q.shape[0]

    @property
    def stages(self) -> int:
        return self.k.shape[0]

    @property
    def q_slots(self) -> int:
        return self.warpgroups * self.q.shape[1]

    @property
    def k_pipeline(self) -> Pipeline:
        return Pipeline((self.k,), self.full, self.kv_empty, self.q_slots)

    @property
    def v_pipeline(self) -> Pipeline:
        first = self.q_slots + self.stages
        return Pipeline((self.v,), self.full, self.kv_empty, first, self.stages)

    @property
    def key_aux_pipeline(self) -> Pipeline:
        """Of those blocks whose data somebody reads."""
        first = self.q_slots + 2 * self.stages
        return Pipeline((self.key_aux,), self.full, self.kv_empty, first, 2 * self.stages)

    @property
    def kv_pipelines(self) -> list[Pipeline]:
        """Of the keys and what belongs to them."""
        return [
            self.k_pipeline,
            self.v_pipeline,
            *([] if self.key_aux is None else [self.key_aux_pipeline]),
        ]

    def pairwise_pipelines(self, warpgroup: Any) -> list[Pipeline]:
        """Of the blocks that come with data: those of this warpgroup's rows."""

        def ring(i: int, array: Any) -> Pipeline:
            stages = array.shape[1]
            place = (i * self.warpgroups + warpgroup) * stages
            first = self.q_slots + len(self.kv_pipelines) * self.stages
            free = self.q_slots + place
            return Pipeline((array.at[warpgroup],), self.full, self.q_empty, first + place, free)

        return [ring(i, array) for i, array in enumerate(self.pairwise)]

    def retry_full(self, warpgroup: Any) -> Any:
        """Where in `full`."""
        return self.full.shape[0] - 2 * self.warpgroups + warpgroup

    def retry_sync(self, warpgroup: Any) -> Any:
        """Where the warps of one warpgroup wait for each other."""
        return self.full.at[self.full.shape[0] - self.warpgroups + warpgroup]

    def q_pipeline(self, warpgroup: Any) -> Pipeline:
        first = warpgroup * self.q.shape[1]
        return Pipeline((self.q.at[warpgroup],), self.full, self.q_empty, first, first)


class Inputs(NamedTuple):
    """In device memory."""

    q: Any
    k: Any
    v: Any
    block_indices: Any = None  # under a mask
    aux: Any = None  # of masks and scores
    mask_bits: Any = None  # of a mask that has been asked (`mask_bits`)


class Outputs(NamedTuple):
    out: Any
    lse: Any


class Arrays(NamedTuple):
    """In device memory."""

    scheduler: StaticTileScheduler | DynamicTileScheduler
    inputs: Inputs
    outputs: Outputs

    def kv_block(self, tile: QueryTile, t: Any) -> Any:
        """Return the block of keys that the tile visits as its t-th."""
        index = tile.list_index(t)
        if self.inputs.block_indices is None:
            return index
        return block_mask.block_id(
            layouts.index_broadcast(self.inputs.block_indices, *tile.coordinates)[index]
        )
