"""The backward: FlashAttention-2, Algorithm 2."""
