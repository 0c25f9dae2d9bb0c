"""Asynchronous copies and operands of the mma.sync kernels."""
