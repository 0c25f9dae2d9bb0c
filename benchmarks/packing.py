"""The order of packed documents by which devices compute equally much, where each has the next T/n tokens."""

import numpy as np

LONGEST = 16_384  # tokens of a document that a packer lets through


def pairs(lengths: np.ndarray, shards: int) -> np.ndarray:
    """Return how many pairs of a query and a key before it each of the shards computes, given documents in their
    order."""
    ends = np.cumsum(lengths)
    borders = np.arange(1, shards + 1) * (ends[-1] // shards)
    # The pairs of the first `border` tokens: those of whole documents, and of the first part of one.
    last = np.searchsorted(ends, borders)
    before = np.concatenate([[0], np.cumsum(lengths * (lengths + 1) // 2)])
    part = borders - (ends - lengths)[last]
    return np.diff(before[last] + part * (part + 1) // 2, prepend=0)


def balanced_order(lengths: np.ndarray, shards: int, tries: int = 4000) -> np.ndarray:
    """Return a permutation of the tokens that moves whole documents, for little work of the shard that has most.

    Two documents at a time are exchanged, and stay so if that shard then has no more.
    """
    rng = np.random.default_rng(0)
    order = np.arange(len(lengths))
    most = pairs(lengths, shards).max()
    for i, j in rng.integers(len(lengths), size=(tries, 2)):
        order[[i, j]] = order[[j, i]]
        now = pairs(lengths[order], shards).max()
        if now <= most:
            most = now
        else:
            order[[i, j]] = order[[j, i]]
    starts = np.cumsum(lengths) - lengths
    return np.concatenate([np.arange(starts[d], starts[d] + lengths[d]) for d in order])
