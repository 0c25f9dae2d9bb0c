"""The masks and scores of a call on a cache: their code, and what it reads, as arrays in device memory."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common import compile_mods
from pallas_fa2.backends.common.tile_mods import TileMask, TileScore
from pallas_fa2.ir import legality
from pallas_fa2.ir.arrays import Q_AXIS
from pallas_fa2.ir.cached_spec import CachedOperands, CachedSpec, requests_of
from pallas_fa2.ir.tile_functions import ArgSource, TileFunction

# What `compile_mods` makes of explicit positions: the first array of each side.
Q_POSITIONS, K_POSITIONS = ArgSource("q", 0, "int32"), ArgSource("k", 0, "int32")
K_INDEX = ArgSource("k", None, "int32")


@dataclasses.dataclass(frozen=True)
class DecodeMods:
    """The mask and the score functions of a call, compiled for tiles in registers."""

    mask: TileMask | None  # unless it is a range of distances from the queries' own positions
    score: TileScore | None
    is_packed: bool
    has_given_positions: bool

    @classmethod
    def compile(cls, cached: CachedSpec) -> "DecodeMods | None":
        """Compile those of a call, or return None if it needs none."""
        mask, score = None, compile_mods.compile_score(cached.call, ())
        if needs_mask_code(cached):
            mask = compile_mods.compile_mask(cached.call)
            assert mask is not None
            mask = dataclasses.replace(mask, visible=_with_key_index(mask.visible))
        if score is not None:
            score = dataclasses.replace(score, value=_with_key_index(score.value))
        if mask is None and score is None:
            return None
        return cls(mask, score, cached.is_packed, cached.has_given_positions)

    def sources(self, *sides: str) -> dict[ArgSource, int]:
        """Return the arrays of these sides that the code reads, each with its position among those of its side."""
        functions = [] if self.mask is None else [self.mask.visible]
        functions += [] if self.score is None else [self.score.value]
        sources = (s for f in functions for s in f.sources if s.side in sides)
        return {s: s.position for s in sources if s.position is not None}


def needs_mask_code(cached: CachedSpec) -> bool:
    """Return whether the kernel runs the mask's code, which comparisons of positions with lengths do not replace."""
    if cached.call.mask is None:
        return False
    return cached.distances is None or cached.has_given_positions


def _with_key_index(function: TileFunction) -> TileFunction:
    """Return the function that reads a key's index in the place of its position, which is the same."""
    sources = tuple(K_INDEX if s == K_POSITIONS else s for s in function.sources)
    return dataclasses.replace(function, sources=sources)


class ModArrays(NamedTuple):
    """What masks and scores read. Rows are int32 whatever their bits stand for; None where nothing is read."""

    # [B, rows, T]; [1, rows, tokens] of packed queries. In the kernel [rows, all tokens]
    q: Any = None
    k: Any = None  # [B | 1, rows, S]; the first row is that of `ArgSource` 1, as the first source are positions
    integers: Any = None  # int32 [B | 1, K, G, fields]
    floats: Any = None  # float32 [B | 1, K, G, fields]
    # [B | 1, K | 1, G | 1, T | 1, S | 1] each; tokens for T if queries are packed. Booleans are bytes.
    pairwise: tuple = ()

    @classmethod
    def pack(cls, cached: CachedSpec, operands: CachedOperands) -> "ModArrays":
        """Pack those of a call."""
        call, leaves = cached.call, operands.call
        sources = compile_mods.argument_sources(call)
        given: list[tuple[ArgSource, Any]] = [(sources.q, leaves.q_index)]
        if call.mask is not None:
            given += zip(sources.mask, jax.tree.leaves(leaves.mask), strict=True)
        given += zip(sources.scores, jax.tree.leaves(leaves.scores), strict=True)
        packed: dict[str, list] = {s: [] for s in ("q", "k", "integer", "real", "pair")}
        for source, x in given:
            if source.side == "pair":
                packed["pair"].append(x.astype(jnp.int8) if x.dtype == jnp.bool_ else x)
                continue
            x = x.astype(jnp.float32) if source.dtype in legality.NARROW else x
            if source.side == "q" and cached.is_packed and x.shape[0] > 1:
                x = _of_each_row(operands.starts, x, call.q_len)
            packed[source.side].append(x if source.side == "real" else _bits(x))
        batch = 1 if cached.is_packed else call.batch
        return cls(
            _rows(packed["q"], batch, call.q_len),
            _rows(packed["k"], max((len(x) for x in packed["k"]), default=1), call.kv_len),
            _fields(packed["integer"], call.kv_heads, call.group),
            _fields(packed["real"], call.kv_heads, call.group),
            tuple(packed["pair"]),
        )

    def in_rows(self) -> "ModArrays":
        """Return the arrays as a kernel reads them: what is read of queries is [rows, all tokens]."""
        if self.q is None:
            return self
        return self._replace(q=jnp.swapaxes(self.q, 0, 1).reshape(self.q.shape[1], -1))

    def axes(self, batch: str) -> "ModArrays":
        """Return the axes of all arrays, as `sharding.Axes` has them, with this letter for sequences."""
        rows, fields, pairs = f"{batch}..", f"{batch}k..", f"{batch}k..."
        axes = rows, rows, fields, fields
        given: Any = (None if x is None else y for x, y in zip(self, axes, strict=False))
        return ModArrays(*given)._replace(pairwise=(pairs,) * len(self.pairwise))


NO_MODS = ModArrays()


def _of_each_row(starts: jax.Array | None, x: jax.Array, rows: int) -> jax.Array:
    """Return `[1, 1, 1, rows, 1]`, of each packed query the value `[R, 1, 1, 1, 1]` of its request."""
    assert starts is not None
    request = jnp.minimum(requests_of(starts, rows), x.shape[0] - 1)
    return jnp.moveaxis(x[request], 0, Q_AXIS)[0]


def _rows(arrays: list[jax.Array], batch: int, length: int) -> jax.Array | None:
    if not arrays:
        return None
    shape = batch, 1, length
    return jnp.concatenate([jnp.broadcast_to(x.reshape(len(x), 1, -1), shape) for x in arrays], 1)


def _fields(arrays: list[jax.Array], kv_heads: int, group: int) -> jax.Array | None:
    if not arrays:
        return None
    shape = max(map(len, arrays)), kv_heads, group
    return jnp.stack([jnp.broadcast_to(x[..., 0, 0], shape) for x in arrays], 3)


def _bits(x: jax.Array) -> jax.Array:
    return x.astype(I32) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, I32)
