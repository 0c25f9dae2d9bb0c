"""Decoding, FlashAttention-2's Algorithm 1 of few queries over splits of a cache: what kernels of all architectures
share."""
