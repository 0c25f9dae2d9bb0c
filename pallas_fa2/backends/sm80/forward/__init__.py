"""The forward: FlashAttention-2, Algorithm 1."""
