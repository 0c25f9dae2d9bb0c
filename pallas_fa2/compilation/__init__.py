"""Launches are lowered once, their kernels compiled in threads and kept on disk (docs/user/first-call.md)."""
