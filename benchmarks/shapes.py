"""The named shapes that benchmarks, tests and tuning share."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention problem: batch B, queries T, keys S, heads N and K, head dim H."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def forward_flops(self) -> float:
        """Two matrix products over all pairs, or over half of them under a causal mask."""
        pairs = self.batch * self.q_heads * self.q_len * self.kv_len
        return 4 * pairs * self.head_dim / (2 if self.causal else 1)


def _square(head_dim: int, length: int, causal: bool) -> Shape:
    """16,384 tokens and N * H = 2048, as in the papers on FlashAttention."""
    heads = 2048 // head_dim
    return Shape(16384 // length, length, length, heads, heads, head_dim, causal)


SHAPES = {
    f"d{head_dim}_s{length}_{'c' if causal else 'f'}": _square(head_dim, length, causal)
    for head_dim in (64, 128, 256)
    for length in (512, 1024, 2048, 4096, 8192, 16384)
    for causal in (True, False)
} | {"llama8b_8k": Shape(2, 8192, 8192, 32, 8, 128, True)}
