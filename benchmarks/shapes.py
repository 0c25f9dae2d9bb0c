"""The named shapes that benchmarks, tests and tuning share."""

import dataclasses

# Forward + backward over the forward: the backward has five matrix products, the forward two.
BOTH = 3.5


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention problem: batch B, queries T, keys S, heads N and K, head dim H.

    With fewer queries than keys, a causal mask lets the last query see every key (prefill).
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def forward_flops(self) -> float:
        """Two matrix products over the pairs that see each other.

        Causal pairs are an area, half a square where T = S, as every paper counts them.
        """
        t, s = self.q_len, self.kv_len
        pairs = float(t * s)
        if self.causal:
            pairs = t * (s - t / 2) if t <= s else s * s / 2
        return 4 * self.batch * self.q_heads * self.head_dim * pairs


def _square(head_dim: int, length: int, causal: bool) -> Shape:
    """16,384 tokens and N * H = 2048, as in the papers on FlashAttention."""
    heads = 2048 // head_dim
    return Shape(16384 // length, length, length, heads, heads, head_dim, causal)


# The curves that `benchmarks.plot` draws.
SWEEP = {
    f"d{head_dim}_s{length}_{'c' if causal else 'f'}": _square(head_dim, length, causal)
    for head_dim in (64, 128, 256)
    for length in (512, 1024, 2048, 4096, 8192, 16384)
    for causal in (True, False)
}

SHAPES = SWEEP | {
    "llama8b_8k": Shape(2, 8192, 8192, 32, 8, 128, True),
    "mqa_4k": Shape(4, 4096, 4096, 16, 1, 128, True),
    "phi3_4k": Shape(4, 4096, 4096, 32, 32, 96, True),
    "d128_s3000_c": Shape(5, 3000, 3000, 16, 16, 128, True),
    "d128_s3000_f": Shape(5, 3000, 3000, 16, 16, 128, False),
    "d128_s4097_c": Shape(4, 4097, 4097, 16, 16, 128, True),
    "d128_s4097_f": Shape(4, 4097, 4097, 16, 16, 128, False),
    "d128_q2048_k8192_c": Shape(8, 2048, 8192, 16, 16, 128, True),
    "d128_q2048_k8192_f": Shape(8, 2048, 8192, 16, 16, 128, False),
}
