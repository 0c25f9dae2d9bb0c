"""Parses the arguments of one call into a `CallSpec` and its `Operands`."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.check_args import (
    check_arrays,
    check_dropout,
    check_dtypes,
    check_flag,
    check_positions,
    check_scale,
    check_shapes,
)
from pallas_fa2.ir.affine import causal_offset
from pallas_fa2.ir.arrays import K_AXIS, Q_AXIS, CallShape, check_align, default_positions
from pallas_fa2.ir.call_spec import CallSpec, Operands, accumulator_dtype
from pallas_fa2.ir.trace import TracedFn
from pallas_fa2.masks import Causal, Mask, as_mask
from pallas_fa2.scores import Score, as_scores
from pallas_fa2.sinks import as_sinks
from pallas_fa2.trace_mods import trace_mod


class CheckedCall(NamedTuple):
    """The checked arguments of a call, whose masks and scores are not traced yet; positions are in `operands`."""

    dims: CallShape
    dtype: np.dtype
    head_dim: int
    value_dim: int
    scale: float
    mask: Mask | None
    scores: tuple[Score, ...]
    first_position: Any  # of query 0, if the operands have no positions
    dropout_rate: float
    deterministic: bool
    operands: Operands

    @property
    def has_explicit_positions(self) -> bool:
        return self.operands.q_index is not None

    def spec(self) -> CallSpec:
        """Trace the mask and the scores, and describe the call."""
        dims, data = self.dims, self.operands
        explicit, first_position = self.has_explicit_positions, self.first_position
        code = None if self.mask is None else trace_mod(self.mask, data.mask, dims, first_position)
        return CallSpec(
            batch=math.prod(dims.batch),
            q_len=dims.q_len,
            kv_len=dims.kv_len,
            q_heads=dims.kv_heads * dims.group,
            kv_heads=dims.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            dtype=self.dtype,
            scale=self.scale,
            mask=code,
            mask_varies_by_head=any(x.shape[1:3] != (1, 1) for x in jax.tree.leaves(data.mask)),
            scores=tuple(
                trace_mod(s, x, dims, first_position, accumulator_dtype(self.dtype))
                for s, x in zip(self.scores, data.scores, strict=True)
            ),
            causal=None if code is None or explicit else _causal_alignment(code, dims),
            has_explicit_positions=explicit,
            dropout_rate=self.dropout_rate,
            deterministic=self.deterministic,
            # Without dropout it is in the code alone.
            first_position=first_position if self.dropout_rate else 0,
            source=self.without_arrays(),
        )

    def without_arrays(self) -> "CheckedCall":
        """Return the same call without operands; leaves of masks and scores are shapes and dtypes."""
        mods = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self.mask, self.scores)
        )
        return self._replace(mask=mods[0], scores=mods[1], operands=Operands())


def parse_call(query: Any, key: Any, value: Any, **options: Any) -> tuple[CallSpec, Operands]:
    """Check the arguments of `flash_attention` and describe the call; arrays may be `jax.ShapeDtypeStruct`s.

    Sinks are checked alone: they are added to the result of the call.
    """
    call = check_call(query, key, value, **options)
    return call.spec(), call.operands


def check_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    score: Any = None,
    scale: Any = None,
    sinks: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    align: str = "start",
    q_positions: Any = None,
    kv_positions: Any = None,
    is_causal: bool = False,
    deterministic_gradients: bool = False,
    shards: int = 1,
) -> CheckedCall:
    """Check the arguments of `flash_attention`, where sequences are divided over `shards` devices: those of one."""
    check_arrays(query, key, value)
    dims = check_shapes(query, key, value)
    if shards > 1:
        dims = dims._replace(sequence_lengths=(dims.q_len * shards, dims.kv_len * shards))
    dtype = check_dtypes(query, key, value)
    scale, scale_scores = check_scale(scale, query.shape[-1])
    seed = check_dropout(dropout_rate, dropout_rng)
    check_flag("is_causal", is_causal, "for a mask of run-time data use mask=")
    check_flag(
        "deterministic_gradients",
        deterministic_gradients,
        "it chooses the backward when a call is traced",
    )
    first_position = check_align(align, dims)
    if align != "start" and q_positions is not None:
        raise ValueError(
            f"align (= {align!r}) must be left out where q_positions are given, which are the positions of the queries; "
            "leave one of them out"
        )
    q_index = check_positions("q_positions", q_positions, dims, Q_AXIS)
    k_index = check_positions("kv_positions", kv_positions, dims, K_AXIS)
    mask = None if mask is None else as_mask(mask)
    if is_causal:
        mask = Causal() if mask is None else mask & Causal()
    scores = (*scale_scores, *as_scores(score))
    explicit = q_index is not None or k_index is not None or not isinstance(first_position, int)
    if explicit:  # where one side is given, the other counts from 0
        if q_index is None:
            q_index = default_positions(dims.q_len, Q_AXIS) + jnp.asarray(first_position, jnp.int32)
            first_position = 0
        k_index = default_positions(dims.kv_len, K_AXIS) if k_index is None else k_index

    mask_data = None if mask is None else mask.normalized_data(dims)
    score_data = tuple(s.normalized_data(dims) for s in scores)
    if sinks is not None:
        as_sinks(sinks, dims.kv_heads * dims.group)
    return CheckedCall(
        dims,
        dtype,
        query.shape[-1],
        value.shape[-1],
        scale,
        mask,
        scores,
        first_position,
        float(dropout_rate),
        bool(deterministic_gradients),
        Operands(mask_data, score_data, q_index, k_index, seed),
    )


def _causal_alignment(mask: TracedFn, dims: CallShape) -> Literal["start", "end"] | None:
    offset = causal_offset(mask)
    if offset == 0:
        return "start"
    return "end" if offset == dims.kv_len - dims.q_len else None
