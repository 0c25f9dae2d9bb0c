"""KernelSpec: what a kernel is specialized on."""

import dataclasses
import operator
from typing import Any


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """The static description of one launch; one kernel is compiled for each.

    A query sees the keys that `mask` lets it see, or those up to its own index + `causal_offset`, or all of
    them if both are None. Without a mask every query sees a key: queries and keys without a partner are
    trimmed before (`CausalTrim`). `q_len` and `kv_len` are the lengths of the arrays.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    scale: float
    causal_offset: int | None
    mask: Any = None  # tile_mods.TileMask
    uses_mask_bits: bool = False  # whether the mask is precomputed as a bitmap (`mask_bits`)
    score: Any = None  # tile_mods.TileScore
    dropout: Any = None  # tile_mods.TileDropout
    q_index_offset: int = 0  # the index of the first row
    # Whether keys are in a cache: which ones a row sees, and whether any, is then data (`sm90.forward.cached_tiles`).
    in_cache: bool = False
    # Of the first key that a row sees in a cache, from its position.
    window_offset: int | None = None

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def causal(self) -> bool:
        return self.causal_offset is not None

    @property
    def has_no_mods(self) -> bool:
        """Whether there is no mask but a causal one, and no score function: every row sees the first key of its
        tile."""
        return self.mask is None and self.score is None and not self.in_cache

    @property
    def guards_nonfinite(self) -> bool:
        """Whether some token may have no partner, and so hold NaN or infinity that must not spread (`nonfinite`)."""
        return self.in_cache or (self.mask is not None and not self.mask.covers_every_token)

    @property
    def dropout_scale(self) -> float:
        """The factor of probabilities that are not dropped."""
        return 1.0 if self.dropout is None else self.dropout.scale

    @property
    def evaluates_mask(self) -> bool:
        """Whether the kernel runs a mask's code."""
        return self.mask is not None and not self.uses_mask_bits

    def _functions(self, masked: bool) -> list[Any]:
        functions = [] if self.score is None else [self.score.value]
        return [*functions, self.mask.visible] if masked and self.evaluates_mask else functions

    def token_inputs(self, side: str, masked: bool) -> set[Any]:
        """Return the per-token inputs, on the side "q" or "k", of scores, of the mask if `masked`, and of dropout."""
        sources = {source for f in self._functions(masked) for source in f.token_inputs(side)}
        if side == "k" and self.dropout is not None and self.dropout.explicit_positions:
            sources.add(self.dropout.key_positions)
        return sources

    def pairwise_inputs(self, masked: bool = True) -> list[Any]:
        """Return the pairwise inputs of scores and, if `masked`, of the mask, in the order of their arrays."""
        sources = {source for f in self._functions(masked) for source in f.pairwise_inputs}
        return sorted(sources, key=operator.attrgetter("position"))

    def head_inputs(self, masked: bool) -> set[Any]:
        """Return the inputs that have one value a head, of scores and, if `masked`, of the mask."""
        return {source for f in self._functions(masked) for source in f.head_inputs}

    def reads_index(self, side: str, masked: bool) -> bool:
        """Return whether scores, dropout, or the mask if `masked`, read the index of tokens."""
        if side == "k" and self.dropout is not None and not self.dropout.explicit_positions:
            return True
        return any(f.reads_index(side) for f in self._functions(masked))

    def loads_key_aux(self, masked: bool = True) -> bool:
        """Return whether the forward loads per-key inputs. Most masks read the keys' index so as well."""
        loads_index = masked and self.evaluates_mask and not self.mask.is_key_interval
        return loads_index or bool(self.token_inputs("k", masked))

    def loads_kv_aux(self, masked: bool = True) -> bool:
        """Return whether the forward loads aux inputs with a block of keys: per-key or pairwise ones."""
        return self.loads_key_aux(masked) or bool(self.pairwise_inputs(masked))
