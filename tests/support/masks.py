"""Masks that tests of several modules use."""

import pallas_fa2 as fa


@fa.mask_fn
def causal_end(q, k):
    """Causal with the last query at the last key, by the mask's own code."""
    return q.index + (k.length - q.length) >= k.index
