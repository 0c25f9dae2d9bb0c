"""FlashAttention-2's tiles in XLA operations, for every device."""
