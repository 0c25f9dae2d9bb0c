"""The blocks of one CTA."""

from typing import Any, NamedTuple

from pallas_fa2.backends.common.decode.deal import Deal
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.primitives.types import Ref, Scalar


class Share(NamedTuple):
    """The blocks of one CTA in the line, and the tile that it begins with: int32 scalars.

    A CTA without blocks begins where the line ends, with a head that does not exist: it loads nothing of a tile.
    """

    begin: Any  # its first block
    end: Any
    head: Any  # of the tile
    entry: Any  # the tile's, as an index
    tile_begin: Any  # the tile's first block in the line
    num_entries: Any  # that there are
    first_entry: Entry  # the tile's
    deal: Deal

    def store_deal(self, memory: Ref) -> None:
        """Store what `load_deal` returns, which a CTA needs where it notes splits. All threads store the same.

        In registers it would be held through all loops, and kernels of 64 columns spill.
        """
        for i, x in enumerate((self.begin, *self.deal)):
            memory[i] = x


def load_deal(memory: Ref) -> tuple[Scalar, Deal]:
    """Load the first block of this CTA, and how the line is dealt."""
    begin, *deal = (memory[i] for i in range(memory.shape[0]))
    return begin, Deal(*deal)
