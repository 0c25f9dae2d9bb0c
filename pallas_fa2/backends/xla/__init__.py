"""FlashAttention-2 in XLA operations, for every device."""
