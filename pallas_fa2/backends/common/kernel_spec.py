"""KernelSpec: what a kernel is specialized on."""

import dataclasses
import operator
from typing import Any


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """What a kernel must know of a call; one kernel is compiled for each.

    A query row sees the keys that `mask` lets it see, or those up to its own index + `offset`, or all of
    them if both are None. Without a mask every row sees a key: rows and keys that take part in nothing
    are cut off before. `q_len` and `kv_len` are the lengths of the arrays.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    scale: float
    offset: int | None
    mask: Any = None  # tile_code.TileMask
    asked: bool = False  # its answers are in memory (`answers`)
    # How many a block of keys has that are listed each for itself: see `visits.Visits`.
    parts: int = 1
    score: Any = None  # tile_code.TileScore
    dropout: Any = None  # tile_code.TileDropout
    first_query: int = 0  # the index of the first row

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def causal(self) -> bool:
        return self.offset is not None

    @property
    def plain(self) -> bool:
        """No mask but a causal one, and no score function."""
        return self.mask is None and self.score is None

    @property
    def tames(self) -> bool:
        """Whether tokens that take part in nothing may be among those that do: they may hold NaN (`tamed`)."""
        return self.mask is not None and not self.mask.all_take_part

    @property
    def kept_scale(self) -> float:
        """Of probabilities that dropout has left."""
        return 1.0 if self.dropout is None else self.dropout.scale

    @property
    def asks(self) -> bool:
        """Whether the kernel runs a mask's code."""
        return self.mask is not None and not self.asked

    def _functions(self, masked: bool) -> list[Any]:
        functions = [] if self.score is None else [self.score.value]
        return [*functions, self.mask.visible] if masked and self.asks else functions

    def rows(self, side: str, masked: bool) -> set[Any]:
        """What masks and scores read of q's or k's tokens, but for their index; and dropout of k's."""
        found = {source for f in self._functions(masked) for source in f.rows(side)}
        if side == "k" and self.dropout is not None and self.dropout.given:
            found.add(self.dropout.key)
        return found

    def pairs(self, masked: bool = True) -> list[Any]:
        """What they read of pairs of tokens."""
        found = {source for f in self._functions(masked) for source in f.pairs}
        return sorted(found, key=operator.attrgetter("place"))

    def numbers(self, masked: bool) -> set[Any]:
        """What they read of what a head's tokens share."""
        return {source for f in self._functions(masked) for source in f.numbers}

    def reads_index(self, side: str, masked: bool) -> bool:
        if side == "k" and self.dropout is not None and not self.dropout.given:
            return True
        return any(f.reads_index(side) for f in self._functions(masked))

    def reads_keys(self, masked: bool = True) -> bool:
        """Whether the forward reads data of keys: for a mask, mostly their index as well."""
        indexed = masked and self.asks and not self.mask.sees_a_range
        return indexed or bool(self.rows("k", masked))

    def reads_block(self, masked: bool = True) -> bool:
        """Whether the forward reads data that come with a block of keys."""
        return self.reads_keys(masked) or bool(self.pairs(masked))
