"""Decoding by mma.sync: FlashAttention-2, Algorithm 1, of few queries over splits of a cache."""
