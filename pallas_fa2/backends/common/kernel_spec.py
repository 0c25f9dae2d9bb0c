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
    causal_offset: int | None
    mask: Any = None  # tile_code.TileMask
    uses_mask_bits: bool = False  # its answers are in memory (`mask_bits`)
    score: Any = None  # tile_code.TileScore
    dropout: Any = None  # tile_code.TileDropout
    q_index_offset: int = 0  # the index of the first row

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def causal(self) -> bool:
        return self.causal_offset is not None

    @property
    def has_no_mods(self) -> bool:
        """No mask but a causal one, and no score function."""
        return self.mask is None and self.score is None

    @property
    def guards_nonfinite(self) -> bool:
        """Whether tokens that take part in nothing may be among those that do: they may hold NaN (`nonfinite`)."""
        return self.mask is not None and not self.mask.covers_every_token

    @property
    def dropout_scale(self) -> float:
        """Of probabilities that dropout has left."""
        return 1.0 if self.dropout is None else self.dropout.scale

    @property
    def evaluates_mask(self) -> bool:
        """Whether the kernel runs a mask's code."""
        return self.mask is not None and not self.uses_mask_bits

    def _functions(self, masked: bool) -> list[Any]:
        functions = [] if self.score is None else [self.score.value]
        return [*functions, self.mask.visible] if masked and self.evaluates_mask else functions

    def token_inputs(self, side: str, masked: bool) -> set[Any]:
        """What masks and scores read of q's or k's tokens, but for their index; and dropout of k's."""
        found = {source for f in self._functions(masked) for source in f.token_inputs(side)}
        if side == "k" and self.dropout is not None and self.dropout.explicit_positions:
            found.add(self.dropout.key_positions)
        return found

    def pairwise_inputs(self, masked: bool = True) -> list[Any]:
        """What they read of pairs of tokens."""
        found = {source for f in self._functions(masked) for source in f.pairwise_inputs}
        return sorted(found, key=operator.attrgetter("position"))

    def head_inputs(self, masked: bool) -> set[Any]:
        """What they read of what a head's tokens share."""
        return {source for f in self._functions(masked) for source in f.head_inputs}

    def reads_index(self, side: str, masked: bool) -> bool:
        if side == "k" and self.dropout is not None and not self.dropout.explicit_positions:
            return True
        return any(f.reads_index(side) for f in self._functions(masked))

    def loads_key_aux(self, masked: bool = True) -> bool:
        """Whether the forward reads data of keys: for a mask, mostly their index as well."""
        indexed = masked and self.evaluates_mask and not self.mask.is_key_interval
        return indexed or bool(self.token_inputs("k", masked))

    def loads_kv_aux(self, masked: bool = True) -> bool:
        """Whether the forward reads data that come with a block of keys."""
        return self.loads_key_aux(masked) or bool(self.pairwise_inputs(masked))
