"""Launches of decode kernels: requests with keys that are NaN where nobody may look, and their attention in NumPy."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from pallas_fa2.arithmetic import round_up
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.schedule import DecodePlan, plan_decode
from pallas_fa2.backends.common.decode.spec import DecodeSpec, max_packed_entries
from pallas_fa2.ir.affine import DistanceRange
from pallas_fa2.ir.quantized import Scales
from tests.support import interpreter

CAUSAL, FULL = DistanceRange(most=0), DistanceRange()


class Case(NamedTuple):
    """Requests of these lengths, whose last queries, so many of each, attend to their keys."""

    lengths: tuple[int, ...]
    queries: int | tuple[int, ...] = 1  # of each request; several numbers are packed
    q_len: int = 1  # of an entry
    capacity: int = 256
    heads: tuple[int, int] = (4, 2)  # N, K
    dims: tuple[int, int] = (64, 64)  # H, Hv
    page_size: int | None = None
    distances: DistanceRange = CAUSAL
    dtype: Any = jnp.bfloat16
    num_ctas: int = 3
    stages: int = 2
    split_blocks: int | None = None
    quantized: str | None = None  # the dtype of keys and values of 8 bits
    per_request: int = 1  # entries of a request
    parts: int = 1  # of a group

    @property
    def starts(self) -> np.ndarray:
        queries = np.broadcast_to(self.queries, len(self.lengths))
        return np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)

    @property
    def is_packed(self) -> bool:
        return isinstance(self.queries, tuple)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1]) + (3 if self.is_packed else 0)  # some belong to no request

    @property
    def spec(self) -> DecodeSpec:
        requests = len(self.lengths)
        entries = max_packed_entries(self.num_tokens, requests, self.q_len)
        return DecodeSpec(
            max_entries=entries if self.is_packed else requests * self.per_request,
            q_len=self.q_len,
            num_tokens=self.num_tokens,
            kv_len=self.capacity,
            q_heads=self.heads[0],
            kv_heads=self.heads[1] * self.parts,
            head_dim=self.dims[0],
            value_dim=self.dims[1],
            scale=1 / math.sqrt(self.dims[0]),
            page_size=self.page_size,
            distances=self.distances,
            split_blocks=self.split_blocks,
            quantized=self.quantized,
            entries_per_request=self.per_request,
            parts=self.parts,
        )

    @property
    def config(self) -> DecodeConfig:
        dims = (round_up(dim, 64) for dim in self.dims)
        return DecodeConfig(*dims, self.stages, ctas_per_sm=1, num_sms=self.num_ctas, min_share=2)

    def plan(self, lengths: Any, starts: Any) -> DecodePlan:
        return plan_decode(self.spec, self.config, lengths, starts if self.is_packed else None)

    def run(
        self,
        decode: Callable,
        q: Any,
        k: Any,
        v: Any,
        lengths: Any,
        starts: Any,
        table: Any = None,
        scales: Any = None,
    ) -> Any:
        plan, options = self.plan(lengths, starts), {} if scales is None else {"scales": scales}
        return decode(self.spec, self.config, q, k, v, plan, table, **options)

    def arrays(self) -> tuple[Any, ...]:
        """q, k, v, lengths and starts. Keys that do not exist are NaN."""
        rng, requests = np.random.default_rng(0), len(self.lengths)
        (n, heads), (h, hv) = self.heads, self.dims
        q = rng.normal(size=(self.num_tokens, n, h))
        if self.quantized:  # rows are divided by powers of two that differ
            q *= np.exp2(-(np.arange(q[..., 0].size) % 5)).reshape(*q.shape[:2], 1)
        k, v = (rng.normal(size=(requests, self.capacity, heads, d)) for d in (h, hv))
        missing = np.arange(self.capacity) >= np.array(self.lengths)[:, None]
        for x in (k, v):
            x[missing] = np.nan
        q, k, v = (np.asarray(jnp.asarray(x, self.dtype)) for x in (q, k, v))
        return q, k, v, np.array(self.lengths, np.int32), self.starts

    def in_8_bits(self, x: np.ndarray, rise: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys in 8 bits, their scales `[B, S, K]`, which differ by 2^9 and rise by 2^rise in 64 keys, and what both
        stand for.

        Where keys are NaN, scales are anything, and the numbers NaN if they may be.
        """
        assert self.quantized is not None
        missing, largest = np.isnan(x).any(-1), {"int8": 127, "float8_e4m3fn": 448}[self.quantized]
        sizes = np.random.default_rng(x.shape[-1]).integers(-6, 3, x.shape[:3])
        sizes += rise * np.arange(self.capacity)[:, None] // 64
        scale = (np.exp2(sizes) * 5 / largest).astype(jnp.bfloat16)
        numbers = np.nan_to_num(x.astype(np.float32)) * largest / 5
        numbers = np.clip(np.round(numbers), -largest, largest).astype(self.quantized)
        whole = numbers.astype(np.float64) * scale.astype(np.float64)[..., None]
        garbage = [np.nan, 1e30, -np.inf]
        scale[missing] = np.resize(np.array(garbage, scale.dtype), scale[missing].shape)
        numbers[missing] = -128 if self.quantized == "int8" else np.nan
        return numbers, scale, whole

    def paged(self, x: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """The keys of all requests in pages, of which the i-th of all is `pages[i]`."""
        assert self.page_size is not None
        result = np.empty((pages.size, self.page_size, *x.shape[2:]), x.dtype)
        result[pages.reshape(-1)] = x.reshape(result.shape)
        return result


def dense(case: Case, q: Any, k: Any, v: Any) -> tuple[np.ndarray, np.ndarray]:
    """out [tokens, N, Hv] and lse [tokens, N] in float64, by the definition."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    (n, heads), least, most = case.heads, *case.distances
    out = np.zeros((case.num_tokens, n, case.dims[1]))
    lse = np.full((case.num_tokens, n), -np.inf)
    for r, (length, start, end) in enumerate(
        zip(case.lengths, case.starts, case.starts[1:], strict=False)
    ):
        length = max(0, min(length, case.capacity))
        for token in range(start, end):
            distance = np.arange(length) - (length - end + token)
            attends = np.ones(length, bool)
            attends &= True if least is None else distance >= least
            attends &= True if most is None else distance <= most
            for head in range(n if attends.any() else 0):
                keys, values = (x[r, :length][attends, head * heads // n] for x in (k, v))
                s = keys @ q[token, head] * case.spec.scale
                lse[token, head] = np.log(np.exp(s - s.max()).sum()) + s.max()
                out[token, head] = np.exp(s - lse[token, head]) @ values
    return out, lse


def check(
    case: Case, decode: Callable, jit: Callable = interpreter.jit, rtol: float = 1e-7
) -> None:
    """Compare a kernel, interpreted or by `jax.jit`, with the definition; `rtol` is that of lse beside 2e-5."""
    q, k, v, *rest = case.arrays()
    wholes, table, scales = (k, v), None, None
    if case.quantized:
        numbers, scales, wholes = zip(*map(case.in_8_bits, (k, v), (0, 3)), strict=True)
        k, v = numbers
    truth, truth_lse = dense(case, q, *wholes)
    if case.page_size:
        shape = len(case.lengths), case.capacity // case.page_size
        pages = np.random.default_rng(1).permutation(math.prod(shape)).astype(np.int32)
        k, v = (case.paged(x, pages) for x in (k, v))
        scales = scales and [case.paged(x, pages) for x in scales]
        table = pages.reshape(shape)
        for row, length in zip(table, case.lengths, strict=True):
            row[-(-length // case.page_size) :] = (1 << 30, -5)[length % 2]  # no pages at all
    by_head = scales and Scales(*(np.ascontiguousarray(np.moveaxis(x, 2, 1)) for x in scales))
    # JAX would know the method of an equal case, and have it from before a bug was planted.
    out, lse = jit(lambda *args: case.run(decode, *args))(q, k, v, *rest, table, by_head)
    exists = np.isfinite(truth_lse)
    np.testing.assert_array_equal(np.asarray(lse)[~exists], -np.inf)
    np.testing.assert_array_equal(np.asarray(out, np.float32)[~exists], 0)
    np.testing.assert_allclose(np.asarray(lse)[exists], truth_lse[exists], rtol=rtol, atol=2e-5)
    if not exists.any():
        return
    error = np.linalg.norm(np.asarray(out, np.float64) - truth) / np.linalg.norm(truth)
    assert error < (4e-3 if case.dtype == jnp.bfloat16 else 6e-4)


CASES = {
    "splits": Case((256, 70)),
    "two_splits_of_a_cta": Case((256, 250), num_ctas=5),
    "two_heads_of_a_request": Case((500,), capacity=512),
    "one_cta": Case((130, 64), num_ctas=1),
    "more_ctas_than_blocks": Case((100,), num_ctas=7),
    "empty": Case((200, 0, 70), heads=(2, 1)),
    "all_empty": Case((0, 0)),
    "too_long": Case((300, 1 << 30), capacity=100),
    "negative": Case((-5, 70, -(2**31))),
    "short": Case((40, 7), capacity=40),
    "mha": Case((100,), heads=(3, 3)),
    "group_12": Case((150, 64), heads=(12, 1)),
    "group_20": Case((150,), heads=(20, 1), distances=FULL),
    "queries_2": Case((130, 1), queries=2, q_len=2),
    "queries_8": Case((140,), queries=8, q_len=8, heads=(8, 1)),
    "two_entries": Case((140, 3), queries=11, q_len=6, heads=(8, 1), per_request=2),
    "two_entries_window": Case(
        (250, 90), queries=9, q_len=5, page_size=32, distances=DistanceRange(-69, 0), per_request=2
    ),
    "two_parts": Case((150, 0, 64), heads=(160, 2), parts=2),
    "h128_float16": Case((150,), dims=(128, 128), dtype=jnp.float16),
    "h256_hv64": Case((90,), dims=(256, 64)),
    "h64_hv192": Case((90,), dims=(64, 192)),
    "h80": Case((90,), dims=(80, 40)),
    "pages_16": Case((256, 33, 130), page_size=16),  # unused pages of a block are -5, and 2^30
    "pages_24": Case((120, 50), capacity=120, page_size=24),
    "pages_128": Case((200, 129), page_size=128),
    "window": Case((250, 90, 3), queries=3, q_len=3, distances=DistanceRange(-69, 0)),
    "window_pages": Case((250, 90), page_size=32, distances=DistanceRange(-99, 0)),
    "future": Case((130, 3), queries=2, q_len=2, distances=DistanceRange(-40, 5)),
    "past": Case((130, 3), queries=2, q_len=2, distances=DistanceRange(None, -4)),
    "full": Case((130, 64), queries=2, q_len=2, distances=FULL),
    "packed": Case((100, 13, 0, 250), queries=(1, 13, 0, 5), q_len=4, num_ctas=9),
    "packed_full": Case((100, 13), queries=(1, 11), q_len=8, distances=FULL),
    "fixed_splits": Case((256, 70, 0, 200), split_blocks=1, num_ctas=4),
    "fixed_splits_packed": Case(
        (100, 13, 0, 250), queries=(1, 13, 0, 5), q_len=4, split_blocks=2, page_size=32
    ),
    "fixed_splits_window": Case((250, 90), distances=DistanceRange(-99, 0), split_blocks=1),
    "fixed_splits_of_two_entries": Case(
        (250, 3), queries=6, q_len=3, split_blocks=1, per_request=2
    ),
    "packed_parts": Case((100, 13), queries=(1, 3), heads=(72, 1), parts=2, num_ctas=5),
    "packed_pages": Case((70, 130), queries=(9, 3), q_len=2, page_size=64),
}


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
STREAMING = fa.Causal() & (fa.Prefix(3) | fa.Window(70))


# Masks and scores, of several blocks and splits: those of `tests/support/cached_features.py` have one block.
MODS = ["soft_cap", "alibi", "streaming", "images", "bias", "masked_scores", "dense", "tree"]


def mods_of(name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """One of `MODS`, on queries and keys of this shape, (B, N, T, S)."""
    batch, heads, queries, keys = shape
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 3, (batch, keys)))
    return {
        "soft_cap": {"score": fa.soft_cap(5.0)},
        "alibi": {"score": fa.alibi(np.resize(SLOPES, heads))},
        "streaming": {"mask": STREAMING},
        "images": {"mask": fa.Causal() & fa.Segments(ids[:, -queries:], kv_ids=ids)},
        "bias": {"score": fa.bias(rng.normal(size=shape).astype(jnp.bfloat16))},
        "masked_scores": {"score": fa.bias(np.where(ids == 2, 0, -1e9)[:, None, None])},
        "dense": {"mask": rng.random((batch, 1, 1, keys)) < 0.5},
        "tree": {
            "mask": fa.Tree(
                jnp.asarray(np.tile(np.resize([1, 3, 5, 13], queries), (batch, 1)), "uint32")
            ),
            "score": fa.soft_cap(9.0),
        },
    }[name]


FP8, INT8 = "float8_e4m3fn", "int8"
OF_8_BITS = {
    "splits": Case((256, 250), num_ctas=5, quantized=FP8),
    "int8": Case((256, 70), quantized=INT8, dims=(128, 128)),
    "empty": Case((200, 0, 70), heads=(2, 1), quantized=INT8),
    "all_empty": Case((0, 0), quantized=FP8),
    "too_long": Case((300, 1 << 30), capacity=104, quantized=FP8),
    "group_12": Case((150, 64), heads=(12, 1), quantized=FP8, distances=FULL),
    "queries_4": Case((140,), queries=4, q_len=4, heads=(8, 1), quantized=INT8),
    "two_entries": Case((140, 3), queries=5, q_len=3, per_request=2, quantized=FP8),
    "two_parts": Case((140, 70), heads=(80, 2), parts=2, page_size=16, quantized=INT8),
    "h128_float16": Case((150,), dims=(128, 128), dtype=jnp.float16, quantized=FP8),
    "h256_hv64": Case((90,), dims=(256, 64), quantized=FP8),
    "h64_hv192": Case((90,), dims=(64, 192), quantized=INT8),
    "h256": Case((90,), dims=(256, 256), quantized=FP8),  # V is loaded after the scores
    "pages_16": Case((256, 33), page_size=16, quantized=FP8),
    "pages_24": Case((120, 50), capacity=120, page_size=24, heads=(3, 3), quantized=INT8),
    "pages_128": Case((200, 129), page_size=128, quantized=INT8),
    "window": Case(
        (250, 90, 3), queries=3, q_len=3, distances=DistanceRange(-69, 0), quantized=FP8
    ),
    "packed_pages": Case((70, 130), queries=(9, 3), q_len=2, page_size=32, quantized=FP8),
}
