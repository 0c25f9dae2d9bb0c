"""Named shapes for benchmarks, tests and tuning."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention problem: batch B, T queries, S keys, N and K heads, head dim H, and that of values if it differs.

    With fewer queries than keys, a causal mask is aligned to the last key (prefill). A window is the number of keys
    before a query's own, and causal. Documents are the lengths of those that are packed into the one row of a batch. A
    bias is an array `[1, N, T, S]` with a gradient.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None
    documents: tuple[int, ...] = ()
    soft_cap: float | None = None
    bias: bool = False
    value_dim: int | None = None

    def __post_init__(self) -> None:
        # A file of results has lists.
        object.__setattr__(self, "documents", tuple(self.documents))

    @property
    def score_bytes(self) -> float:
        """The bytes of all scores in float32."""
        return 4.0 * self.batch * self.q_heads * self.q_len * self.kv_len

    @property
    def has_mods(self) -> bool:
        """Whether there is a mask other than a causal one, or a score function."""
        return self.window is not None or any((self.documents, self.soft_cap, self.bias))

    @property
    def forward_flops(self) -> float:
        """The FLOPs of two matrix products over the pairs that attend: Q K^T and P V."""
        return self._products(keys=1, values=1)

    @property
    def both_flops(self) -> float:
        """The FLOPs with five more products: Q K^T again, dO V^T, P^T dO, dS K and dS^T Q."""
        return self._products(keys=4, values=3)

    def _products(self, keys: int, values: int) -> float:
        """Return the FLOPs of `keys` products with H and `values` products with Hv.

        Causal pairs are counted as an area, half of T² where T = S, as in all papers.
        """
        lengths = [(n, n) for n in self.documents] or [(self.q_len, self.kv_len)]
        pairs = sum(self._pairs(t, s) for t, s in lengths)
        dims = keys * self.head_dim + values * (self.value_dim or self.head_dim)
        return 2 * self.batch * self.q_heads * dims * pairs

    def _pairs(self, t: int, s: int) -> float:
        if not self.causal:
            return float(t * s)
        if self.window is not None and self.window < t:
            return (t - self.window / 2) * self.window + (t - self.window) / 2
        return t * (s - t / 2) if t <= s else s * s / 2


def _paper_shape(head_dim: int, length: int, causal: bool) -> Shape:
    """Return a shape with 16,384 tokens and N * H = 2048, as in the papers on FlashAttention."""
    heads = 2048 // head_dim
    return Shape(16384 // length, length, length, heads, heads, head_dim, causal)


def _short_documents(tokens: int) -> tuple[int, ...]:
    """Return the lengths of documents of 16 to 512 tokens, as chat messages have; the last one fills the row."""
    ends = np.cumsum(np.random.default_rng(0).integers(16, 513, tokens // 16))
    inside = ends[ends < tokens]
    return tuple(np.diff(inside, prepend=0, append=tokens).tolist())


# The curves that `benchmarks.plot` draws.
SWEEP = {
    f"d{head_dim}_s{length}_{'c' if causal else 'f'}": _paper_shape(head_dim, length, causal)
    for head_dim in (64, 128, 256)
    for length in (512, 1024, 2048, 4096, 8192, 16384)
    for causal in (True, False)
}

# Lengths of random documents; those of the third row are equal, those of the fourth short.
DOCUMENTS = {
    "docs16": (365, 392, 470, 1594, 1457, 587, 3169, 163, 1741, 588, 2556, 127, 1576, 1087, 391,
               121),
    "docs32": (631, 8141, 7679, 3879, 4139, 79, 37, 685, 2406, 1948, 2234, 1658, 738, 3426, 1683,
               1952, 694, 741, 1422, 431, 970, 1442, 125, 1812, 2778, 2598, 754, 1742, 4436, 1827,
               972, 1477),
    "docs8x2048": (2048,) * 8,
    "docs_short": _short_documents(32768),
}  # fmt: skip

# The shapes of `benchmarks.run --masks`: masks, scores, and the causal mask for comparison with an equivalent mask
# function.
MASKS = {
    "d128_s8192_c": SWEEP["d128_s8192_c"],
    **{f"window{n}": Shape(2, 8192, 8192, 16, 16, 128, True, window=n) for n in (128, 1024)},
    **{
        name: Shape(1, sum(n), sum(n), 16, 16, 128, True, documents=n)
        for name, n in DOCUMENTS.items()
    },
    **{
        f"soft_cap{n}": Shape(2, 4096, 4096, 16, 16, 128, True, soft_cap=float(n)) for n in (30, 50)
    },
    "bias": Shape(2, 4096, 4096, 16, 16, 128, False, bias=True),
}

# Shapes with fewer tokens than in the papers, which are measured and summarized separately: `benchmarks.run --short`.
# The last are vision transformers', with 14 x 14 patches and one more token.
SHORT = {
    **{
        f"d{head_dim}_s{length}_{'c' if causal else 'f'}": _paper_shape(head_dim, length, causal)
        for head_dim in (64, 128)
        for length in (128, 256)
        for causal in (True, False)
    },
    "vit_b16": Shape(64, 197, 197, 12, 12, 64, False),
    "vit_l16": Shape(64, 197, 197, 16, 16, 64, False),
}

SHAPES = {
    **SWEEP,
    "llama8b_8k": Shape(2, 8192, 8192, 32, 8, 128, True),
    "mqa_4k": Shape(4, 4096, 4096, 16, 1, 128, True),
    "phi3_4k": Shape(4, 4096, 4096, 32, 32, 96, True),
    "phi2_2k": Shape(8, 2048, 2048, 32, 32, 80, True),
    "siglip_1k": Shape(16, 1024, 1024, 16, 16, 72, False),
    "mla_4k": Shape(4, 4096, 4096, 16, 16, 192, True, value_dim=128),
    "d128_s3000_c": Shape(5, 3000, 3000, 16, 16, 128, True),
    "d128_s3000_f": Shape(5, 3000, 3000, 16, 16, 128, False),
    "d128_s4097_c": Shape(4, 4097, 4097, 16, 16, 128, True),
    "d128_s4097_f": Shape(4, 4097, 4097, 16, 16, 128, False),
    "d128_q2048_k8192_c": Shape(8, 2048, 8192, 16, 16, 128, True),
    "d128_q2048_k8192_f": Shape(8, 2048, 8192, 16, 16, 128, False),
    **MASKS,
    **SHORT,
}

# The shapes of `benchmarks.run --ampere`: what FlashAttention-2's CUDA kernels run as well, each head dim of a kernel.
AMPERE = {name: SHAPES[name] for name in (*SWEEP, "phi3_4k", "llama8b_8k", "vit_b16", *DOCUMENTS)}

# The shapes of `benchmarks.run --report`, the most telling first: each kernel, short and long, causal and full, grouped
# heads, packed documents. Few enough for minutes, and small enough for a GPU of 8 GB.
REPORT = {
    name: SHAPES[name]
    for name in (
        "d128_s4096_c",
        "d64_s4096_c",
        "d128_s4096_f",
        "d64_s4096_f",
        "d256_s4096_c",
        "phi3_4k",
        "d128_s512_c",
        "d64_s512_f",
        "vit_b16",
        "docs16",
        "llama8b_8k",
        "d128_s16384_c",
    )
}
