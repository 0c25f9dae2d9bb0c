"""Kernels by mma.sync, for every compute capability from 8.0 on."""
