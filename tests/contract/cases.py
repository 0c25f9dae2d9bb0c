"""The cases that every implementation must pass, and their masks in NumPy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from tests.support import masks


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    batch: int = 1
    q_len: int = 64
    kv_len: int = 64
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    value_dim: int | None = None
    dtype: Any = jnp.bfloat16
    mask: Callable | None = None  # case -> (our mask, boolean array)
    score: Callable | None = None  # case -> (our score, scores -> other scores and their slope)
    scale: float | None = None
    asks_first: bool = False  # of the mask, for all heads: what otherwise saves too little
    rise: float = 0.0  # keys grow by 2^rise from the first to the last, and with them row maxima

    def __str__(self) -> str:
        return self.name

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        values = self.value_dim or self.head_dim
        b, t, s = self.batch, self.q_len, self.kv_len
        return (
            (b, t, self.q_heads, self.head_dim),
            (b, s, self.kv_heads, self.head_dim),
            (b, s, self.kv_heads, values),
            (b, t, self.q_heads, values),
        )

    def inputs(self) -> list[np.ndarray]:
        """query, key, value, and the cotangents of out and lse."""
        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(shape, np.float32) for shape in self.shapes]
        growth = np.exp2(np.linspace(0.0, self.rise, self.kv_len, dtype=np.float32))
        arrays[1] *= growth[:, None, None]
        dlse = rng.standard_normal((self.batch, self.q_heads, self.q_len), np.float32)
        return [*(x.astype(self.dtype) for x in arrays), dlse]


def positions(case: Case) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(case.q_len)[:, None], np.arange(case.kv_len)[None, :]


def everywhere(case: Case, mask: np.ndarray) -> np.ndarray:
    return np.broadcast_to(mask, (case.batch, case.q_heads, case.q_len, case.kv_len))


def causal(case: Case) -> tuple[Any, np.ndarray]:
    q, k = positions(case)
    return fa.Causal(), everywhere(case, k <= q)


def causal_end(case: Case) -> tuple[Any, np.ndarray]:
    q, k = positions(case)
    return masks.causal_end, everywhere(case, k <= q + case.kv_len - case.q_len)


def window(case: Case) -> tuple[Any, np.ndarray]:
    q, k = positions(case)
    return fa.Causal() & fa.Window(10), everywhere(case, (k <= q) & (k >= q - 10))


def _ids(case: Case, length: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, 4, (case.batch, length)), -1).astype(np.int32)


def documents(case: Case) -> tuple[Any, np.ndarray]:
    q_ids, k_ids = _ids(case, case.q_len, 0), _ids(case, case.kv_len, 1)
    dense = (q_ids[:, :, None] == k_ids[:, None, :])[:, None]
    return fa.Segments(jnp.asarray(q_ids), jnp.asarray(k_ids)), everywhere(case, dense)


def packed(case: Case) -> tuple[Any, np.ndarray]:
    """Causal documents, the same for queries and keys."""
    ids, (q, k) = _ids(case, case.q_len, 0), positions(case)
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    return fa.Causal() & fa.Segments(jnp.asarray(ids)), everywhere(case, same & (k <= q))


def one_after_another(case: Case) -> tuple[Any, np.ndarray]:
    """The documents of `packed`, by the start of each token's document."""
    ids = _ids(case, case.q_len, 0)
    starts = np.stack([np.searchsorted(x, x) for x in ids])
    return fa.Causal() & fa.Documents(jnp.asarray(starts, jnp.int32)), packed(case)[1]


def reach(case: Case) -> tuple[Any, np.ndarray]:
    """Every head sees as far back as its own number says."""
    reach = 20.0 * np.arange(1, case.q_heads + 1)
    mask = fa.mask_fn(lambda q, k, c: (q.index - k.index).astype(jnp.float32) < c.reach)
    q, k = positions(case)
    dense = q - k < reach[:, None, None]
    return mask(heads={"reach": jnp.asarray(reach, jnp.float32)}), everywhere(case, dense[None])


def lengths(case: Case) -> tuple[Any, np.ndarray]:
    """Rows and keys past the lengths; the first batch entry has no key at all."""
    q_n = np.linspace(case.q_len // 2, case.q_len, case.batch).astype(np.int32)
    k_n = np.linspace(0, case.kv_len // 2, case.batch).astype(np.int32)
    q, k = positions(case)
    dense = (q < q_n[:, None, None]) & (k < k_n[:, None, None])
    return fa.Lengths(jnp.asarray(q_n), jnp.asarray(k_n)), everywhere(case, dense[:, None])


def holes(case: Case) -> tuple[Any, np.ndarray]:
    dense = np.random.default_rng(2).random((case.batch, 1, case.q_len, case.kv_len)) < 0.3
    return fa.Dense(jnp.asarray(dense)), everywhere(case, dense)


@fa.mask_fn
def _dilated(q: Any, k: Any) -> Any:
    return (abs(q.index - k.index) % 3 == 0) | (k.index < 2)


@fa.mask_fn
def _extremes(q: Any, k: Any) -> Any:
    return k.index >= jnp.maximum(jnp.maximum(q.before, -q.after), q.least)


def extremes(case: Case) -> tuple[Any, np.ndarray]:
    """A mask that ptxas up to 13.3 computes without the minus (see `thread_values.defeat_minmax_fusion`)."""
    before, after, least = np.random.default_rng(4).integers(0, 100, (3, case.q_len), np.int32)
    tokens = {"before": before, "after": -after, "least": least}
    mask = _extremes(q_tokens=jax.tree.map(jnp.asarray, tokens))
    first = np.maximum(np.maximum(before, after), least)
    return mask, everywhere(case, positions(case)[1] >= first[:, None])


def dilated(case: Case) -> tuple[Any, np.ndarray]:
    q, k = positions(case)
    return _dilated, everywhere(case, (abs(q - k) % 3 == 0) | (k < 2))


@fa.mask_fn
def _grid(q: Any, k: Any) -> Any:
    rows, columns = q.index // 16 - k.index // 16, q.index % 16 - k.index % 16
    return (abs(rows) <= 3) & (abs(columns) <= 5) & (q.id <= k.id + 1)


def grid(case: Case) -> tuple[Any, np.ndarray]:
    """Neighbours on a grid, in documents near each other."""
    q_ids, k_ids = _ids(case, case.q_len, 0), _ids(case, case.kv_len, 1)
    q, k = positions(case)
    near = (abs(q // 16 - k // 16) <= 3) & (abs(q % 16 - k % 16) <= 5)
    dense = near & (q_ids[:, :, None] <= k_ids[:, None, :] + 1)
    mask = _grid(q_tokens={"id": jnp.asarray(q_ids)}, k_tokens={"id": jnp.asarray(k_ids)})
    return mask, everywhere(case, dense[:, None])


@fa.mask_fn
def _scattered(q: Any, k: Any) -> Any:
    return ((q.index // 64 * 3 + k.index // 64) % 5 == 0) | ((q.index - k.index) % 150 == 149)


def scattered(case: Case) -> tuple[Any, np.ndarray]:
    """Blocks of 64 keys that are not neighbors."""
    q, k = positions(case)
    dense = ((q // 64 * 3 + k // 64) % 5 == 0) | ((q - k) % 150 == 149)
    return _scattered, everywhere(case, dense)


@fa.mask_fn
def _clusters(q: Any, k: Any) -> Any:
    return (q.cluster == k.cluster) & (q.place >= k.place)


def clusters(case: Case) -> tuple[Any, np.ndarray]:
    """Tokens sorted by their cluster: two arrays of keys, beside which the output has half of its room."""
    cluster, place = _ids(case, case.q_len, 0), np.random.default_rng(5).permutation(case.q_len)
    tokens = {"cluster": jnp.asarray(cluster), "place": jnp.asarray(place, jnp.int32)}
    same = (cluster[:, :, None] == cluster[:, None, :])[:, None]
    return _clusters(tokens=tokens), everywhere(case, same & (place[:, None] >= place))


def _cap(s: Any, cap: float) -> tuple[Any, Any]:
    tanh = np.tanh(s / s.dtype.type(cap))
    return cap * tanh, 1 - tanh**2


def capped(case: Case) -> tuple[Any, Callable]:
    return fa.soft_cap(2.0), lambda s: _cap(s, 2.0)


def linear_bias(case: Case) -> tuple[Any, Callable]:
    q, k = positions(case)
    slopes = 2.0 ** (-8.0 * np.arange(1, case.q_heads + 1) / case.q_heads)
    penalty = slopes[:, None, None] * np.abs(q - k)
    return fa.alibi(case.q_heads), lambda s: (s - penalty.astype(s.dtype), 1)


def biased_and_capped(case: Case) -> tuple[Any, Callable]:
    rng = np.random.default_rng(3)
    bias = rng.standard_normal((1, case.q_heads, case.q_len, case.kv_len)).astype(np.float32)
    return (fa.bias(jnp.asarray(bias)), fa.soft_cap(3.0)), lambda s: _cap(s + bias, 3.0)


def additive(case: Case) -> tuple[Any, Callable]:
    """Padding on both sides as a bias that hides by -1e10: rows without a key are not even finite apart in
    float32, and the first block of the others is hidden."""
    q, k = positions(case)
    start, end = case.kv_len // 2, case.q_len - 9
    keep = (q >= k) & (k >= start) & (q < end)
    score = fa.bias(jnp.asarray(np.where(keep, 0.0, -1e10), jnp.float32))
    return score, lambda s: (np.where(keep, s, -np.inf), 1)


ODD_LENGTHS = (1, 3, 63, 111, 1000)
bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32

# What the Hopper kernels run. Every head dim, both alignments, odd lengths, T != S, groups.
PLAIN = [
    Case("full", 2, 128, 128),
    Case("causal", 2, 128, 128, mask=causal),
    *(Case(f"full_{t}", 1, t, t, 1, 1) for t in ODD_LENGTHS),
    *(Case(f"causal_{t}", 1, t, t, 1, 1, mask=causal) for t in ODD_LENGTHS),
    Case("more_keys", 1, 63, 200),
    Case("more_queries", 1, 200, 63),
    Case("causal_more_keys", 1, 63, 200, mask=causal),
    Case("causal_more_queries", 1, 200, 63, mask=causal),
    Case("causal_end_more_keys", 1, 63, 200, mask=causal_end),
    Case("causal_end_more_queries", 1, 200, 63, mask=causal_end),
    Case("causal_end_one_query", 2, 1, 130, mask=causal_end),
    Case("grouped", 2, 100, 100, 6, 2, mask=causal),
    Case("multi_query", 1, 100, 130, 4, 1),
    *(Case(f"h{h}", 1, 130, 130, 2, 1, h) for h in (128, 256)),
    *(Case(f"h{h}_causal", 1, 200, 200, 2, 1, h, mask=causal) for h in (128, 256)),
    *(Case(f"h{h}_causal_end", 1, 70, 200, 2, 1, h, mask=causal_end) for h in (128, 256)),
    *(Case(f"h{h}_narrow", 1, 70, 70, 2, 1, h, mask=causal) for h in (8, 104, 160)),
    Case("h72", 1, 139, 200, 2, 1, 72),
    Case("h96_causal", 1, 70, 70, 2, 1, 96, mask=causal),
    Case("h96", 1, 200, 260, 2, 1, 96, dtype=f16),
    Case("h80_causal_end", 1, 130, 200, 2, 1, 80, mask=causal_end),
    Case("h192", 1, 130, 130, 2, 1, 192, dtype=f16),
    Case("h192_causal", 1, 200, 200, 2, 1, 192, mask=causal),
    Case("hv_smaller", 1, 70, 70, 2, 1, 192, 128, mask=causal),
    Case("hv_smaller_grouped", 1, 139, 200, 2, 1, 192, 128, mask=causal_end),
    Case("hv_much_smaller", 1, 130, 130, 2, 1, 128, 40),
    # The output leaves in pieces, of which some do not exist.
    Case("hv_a_third", 1, 64, 64, 2, 1, 192, 64, mask=causal),
    Case("rising_7_hv_a_quarter", 1, 64, 128, 1, 1, 256, 64, rise=7),
    Case("rising_7_h_a_quarter", 1, 64, 128, 1, 1, 64, 256, rise=7),
    Case("hv_larger", 1, 70, 70, 2, 2, 64, 96),
    Case("float16", 1, 130, 130, 2, 1, 64, dtype=f16, mask=causal),
    Case("float16_h128", 1, 130, 130, 2, 1, 128, dtype=f16),
    # Lengths that are no multiples of 8, beyond one tile; rows of another entry follow.
    *(
        Case(f"odd_h{h}", 2, t, s, 1, 1, h, mask=mask)
        for h, t, s, mask in (
            (64, 139, 261, causal_end),
            (96, 139, 139, causal),
            (128, 261, 139, None),
            (256, 139, 101, None),
            (200, 101, 139, causal),
        )
    ),
    Case("rising_7_h80", 1, 130, 260, 1, 1, 80, dtype=f16, mask=causal_end, rise=7),
    Case("rising_7_h136", 1, 66, 130, 1, 1, 136, 72, dtype=f16, mask=causal_end, rise=7),
    Case("rising_7_hv_smaller", 1, 130, 260, 1, 1, 192, 128, mask=causal_end, rise=7),
    Case("scaled", 1, 70, 70, scale=0.5, mask=causal),
    Case("sharp", 1, 70, 70, scale=3.0),
    # Scores that rise by 30 (in base 2) within a block of keys, and by 300.
    *(
        Case(f"rising_{rise}_h{h}", 1, t, 260, 1, 1, h, dtype=dtype, mask=mask, rise=rise)
        for rise in (4, 7)
        for h, t, dtype, mask in (
            (64, 260, bf16, causal),
            (64, 70, f16, None),
            (128, 130, bf16, causal_end),
            (256, 70, bf16, None),
        )
    ),
]

# What the Hopper kernels run with masks. Some rows and keys take part in nothing.
MASKED = [
    *(Case(f"window_h{h}", 2, 200, 200, 2, 1, h, mask=window) for h in (64, 128)),
    Case("window_h96", 1, 130, 130, 1, 1, 96, mask=window),
    *(Case(f"packed_h{h}", 2, 300, 300, 2, 1, h, mask=packed) for h in (64, 96, 128, 256)),
    Case("documents_in_a_row", 2, 300, 300, 2, 1, 128, mask=one_after_another),
    Case("packed_hv_smaller", 2, 139, 139, 2, 1, 192, 128, mask=packed),
    Case("packed_h192", 1, 130, 130, 2, 1, 176, mask=packed),
    Case("packed_h136", 1, 130, 130, 2, 1, 136, 72, mask=packed),
    Case("documents_h64", 2, 200, 330, 2, 1, 64, mask=documents),
    Case("documents_h128", 2, 330, 139, 4, 2, 128, dtype=f16, mask=documents),
    *(Case(f"lengths_h{h}", 2, 200, 330, 2, 1, h, mask=lengths) for h in (64, 128, 256)),
    Case("clusters_h128", 2, 139, 139, 2, 1, 128, mask=clusters),
    Case("rising_clusters_h128", 1, 260, 260, 1, 1, 128, dtype=f16, mask=clusters, rise=7),
    Case("dilated_h128", 1, 130, 330, 2, 2, 128, mask=dilated),
    *(Case(f"extremes_h{h}", 1, 130, 139, 1, 1, h, mask=extremes) for h in (64, 128)),
    *(Case(f"holes_h{h}", 2, 130, 330, 4, 2, h, mask=holes) for h in (64, 128)),
    # Beyond H = 128 they are asked before, even by one head.
    Case("holes_h256", 1, 130, 200, 1, 1, 256, mask=holes),
    Case("holes_hv_smaller", 2, 139, 261, 2, 1, 192, 128, dtype=f16, mask=holes),
    Case("rising_holes_h64", 1, 130, 260, 1, 1, 64, mask=holes, rise=7),
    *(Case(f"grid_h{h}", 2, 300, 300, 4, 2, h, mask=grid, asks_first=True) for h in (64, 128, 256)),
    *(
        Case(f"scattered_h{h}", 1, 200, 460, 2, 1, h, mask=scattered, asks_first=True)
        for h in (64, 128)
    ),
    Case("rising_scattered_h128", 1, 130, 460, 2, 1, 128, mask=scattered, asks_first=True, rise=7),
    Case("grid_h96", 2, 200, 331, 2, 1, 96, dtype=f16, mask=grid, asks_first=True),
    Case("grid_hv_smaller", 1, 139, 139, 2, 2, 192, 128, mask=grid, asks_first=True),
    *(
        Case(f"rising_grid_h{h}", 1, 130, 260, 2, 1, h, mask=grid, asks_first=True, rise=7)
        for h in (64, 128, 256)
    ),
    # Blocks of which a mask hides nothing: none has been asked about.
    *(
        Case(f"rising_extremes_h{h}", 1, 130, 260, 2, 1, h, mask=extremes, asks_first=True, rise=7)
        for h in (64, 128, 256)
    ),
    Case("grid_asked_again", 2, 139, 330, 2, 1, 128, mask=grid),
    Case("reach_h64", 1, 300, 300, 4, 2, 64, mask=reach),
    Case("reach_h128_multi_query", 1, 200, 200, 4, 1, 128, mask=reach),
    *(
        Case(f"rising_documents_h{h}", 1, 130, 260, 1, 1, h, mask=documents, rise=7)
        for h in (64, 128, 256)
    ),
    # A score function besides takes another kernel than a mask alone.
    Case("capped_h96", 1, 130, 130, 2, 1, 96, mask=packed, score=capped),
    Case("capped_hv_smaller", 1, 139, 139, 2, 1, 192, 128, mask=packed, score=capped),
    *(Case(f"additive_h{h}", 1, 300, 261, 2, 1, h, score=additive) for h in (64, 128)),
    Case("additive_causal_h64", 1, 300, 261, 2, 1, 64, mask=causal, score=additive),
]

# What reference and blockwise support besides.
GENERAL = [
    *(
        Case(f"{mask.__name__}_{t}x{s}", 2, t, s, 4, 2, 16, dtype=f32, mask=mask)
        for mask in (window, documents, lengths, holes, dilated)
        for t, s in ((70, 70), (33, 90), (90, 33))
    ),
    *(
        Case(
            f"{score.__name__}_{mask.__name__}",
            2,
            70,
            50,
            4,
            2,
            16,
            dtype=f32,
            mask=mask,
            score=score,
        )
        for score in (capped, linear_bias, biased_and_capped)
        for mask in (causal, lengths)
    ),
    *(
        Case(f"additive_{t}x{s}", 2, t, s, 4, 2, 16, dtype=dtype, score=additive, mask=mask)
        for t, s, dtype, mask in (
            (70, 70, f32, None),
            (90, 33, f32, causal),
            (700, 600, bf16, None),
            (64, 64, f16, causal),
        )
    ),
    Case("documents_bfloat16", 2, 70, 70, 4, 2, 32, mask=documents, score=capped),
    Case("float32", 2, 130, 130, 4, 2, 40, 24, dtype=f32, mask=causal),
    Case("float32_full", 2, 130, 90, 4, 2, 40, dtype=f32),
    Case("odd_head_dim", 1, 30, 30, 2, 1, 5, 7, dtype=f32),
    Case("negative_scale", 1, 30, 30, dtype=f32, scale=-0.3),
]
