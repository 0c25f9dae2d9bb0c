"""Who computes which tile, and in which order: on the host, for every backend."""
