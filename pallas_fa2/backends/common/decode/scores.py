"""The scores of a block of keys: masks and scores on a tile of S^T, whose rows are keys."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import I32, LOG2E
from pallas_fa2.backends.common.decode.arrays import Cta
from pallas_fa2.backends.common.decode.columns import QueryColumns
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.tile_inputs import TileMods
from pallas_fa2.backends.common.primitives import layouts, masking, votes
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.common.tile_mods import by_columns
from pallas_fa2.control_flow import when


class ScoreTile(NamedTuple):
    """64 keys and the queries of a tile."""

    cta: Cta[Any]
    entry: Entry
    head: Scalar  # of keys
    first_key: Scalar

    def mask(self, s: jax.Array) -> jax.Array:
        """Return the scores of a block in base 2, -inf where a query does not attend to a key."""
        spec, entry = self.cta.spec, self.entry
        s = self._apply_mods(s)
        key = layouts.index(s.shape, 0, self.first_key)
        # The queries that attend to a key are consecutive columns, of which each row has the bounds: bounds on the keys
        # of each column would hold more registers.
        distance = key - entry.first_position  # from the first query

        def first_column(token: jax.Array) -> jax.Array:
            """Return the first column of a token of the entry, cut off to the columns that there are."""
            return jnp.clip(token, 0, spec.q_len) * spec.padded_group

        first, (least, most) = I32(0), spec.distances
        if most is not None:
            first = first_column(distance - most)
        if spec.attends_past_its_own:
            first = jnp.where(key < entry.kv_len, first, spec.columns)
        s = masking.mask_before(s, first)
        if least is None:
            return s
        return masking.mask_after(s, first_column(distance - least + 1) - 1)

    def _apply_mods(self, s: jax.Array) -> jax.Array:
        """Return the scores in base 2, by the score functions and under the mask that are code."""
        spec, arrays = self.cta.spec, self.cta.inputs.mods
        if spec.mods is None:
            return s * (spec.scale * LOG2E)
        tile = TileMods(spec, spec.mods, arrays, self.entry, self.head, self.first_key)
        if spec.mods.score is None:
            s = s * (spec.scale * LOG2E)
        else:
            score = functools.partial(spec.mods.score.evaluate, scale=spec.scale)
            s = by_columns(lambda piece, inputs: score(piece, inputs=inputs), s, tile.inputs_at)
        return s if spec.mods.mask is None else spec.mods.mask.apply(s, tile.inputs_at)

    def attended_keys(self, s: jax.Array) -> jax.Array | None:
        """Return the largest score of each key, [64], -inf if no query attends to it; None where `key_range` says which
        keys these are."""
        spec = self.cta.spec
        if spec.mods is None or spec.mods.mask is None:
            return None
        if spec.pads_columns:  # they are masked as some other query is
            is_query = QueryColumns.compute(spec).are_queries(spec, self.entry)
            is_query = layouts.broadcast_columns(jnp.where(is_query, 1, 0), s.shape) != 0
            s = jnp.where(is_query, s, -jnp.inf)
        return layouts.fold_octets(jnp.maximum, s).max(axis=1)

    def zero_missing_values(
        self, attended: jax.Array | None, keep: Callable[[jax.Array], None]
    ) -> None:
        """Call `keep` with which keys some query of the tile attends to, [64], if there are others: it sets V to 0 at
        those.

        There V may be NaN, and P = 0 times NaN is NaN.
        """
        config = self.cta.config
        if attended is not None:
            # negated, because the vote finds infinity and NaN, but not -infinity
            missing = votes.warpgroup_any_nonfinite(-attended, I32(0)) != 0
            when(missing)(lambda: keep(attended > -jnp.inf))
            return
        first, end = self.key_range()
        key = layouts.index((64, 64), 0, self.first_key)
        is_partial = (self.first_key < first) | (self.first_key + config.block_kv > end)
        when(is_partial)(lambda: keep((key >= first) & (key < end)))

    def key_range(self) -> tuple[Scalar, Scalar]:
        """Return the first key that a query of the tile may attend to, and the end of those that exist."""
        first, least = I32(0), self.cta.spec.distances.least
        if least is not None:
            first = self.entry.first_position + least
        return first, self.entry.kv_len
