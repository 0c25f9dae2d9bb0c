"""How many threads NumPy has for a product of matrices, in the processes to come."""

import os


def use_one() -> None:
    """Give NumPy one thread in each process that imports it from now on. It has one for each core, which spin until the
    next product: a fifth of all CPU time where each core has a worker of its own, and most of it with 12 workers of 16
    threads."""
    for library in ("OPENBLAS", "MKL", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
