"""Masks and scores from the literature, as a user writes them: about three lines each.

Each is a function of T tokens and N heads; the data are random, from fixed seeds. `mask_gallery` draws
and times them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa


def parts(t: int, count: int) -> np.ndarray:
    """The number of the part that each token is in; their lengths are random."""
    ends = np.sort(np.random.default_rng(0).choice(np.arange(1, t), count - 1, replace=False))
    return np.searchsorted(ends, np.arange(t), side="right").astype(np.int32)


def ends_of_subtrees(t: int) -> np.ndarray:
    """Of each node of a random tree in depth-first order, where its descendants end."""
    rng, ends, path = np.random.default_rng(0), np.full(t, t, np.int32), [0]
    for node in range(1, t):
        for _ in range(min(rng.geometric(0.5) - 1, len(path) - 1)):
            ends[path.pop()] = node
        path.append(node)
    return ends


def full(t: int, n: int) -> None:
    """Encoders."""


def causal(t: int, n: int) -> fa.Mask:
    """Decoders."""
    return fa.Causal()


def sliding_window(t: int, n: int) -> fa.Mask:
    """Mistral 7B (arXiv:2310.06825)."""
    return fa.SlidingWindow(t // 8)


def prefix_lm(t: int, n: int) -> fa.Mask:
    """T5 (arXiv:1910.10683): the prompt sees all of itself."""
    return fa.Causal() | fa.Prefix(jnp.array([t // 3]))


def packed_documents(t: int, n: int) -> fa.Mask:
    """Several documents in one row."""
    return fa.Causal() & fa.Segments(jnp.asarray(parts(t, 8)))


def padded(t: int, n: int) -> fa.Mask:
    """Rows of a batch that are shorter than others."""
    return fa.Causal() & fa.Lengths(kv=jnp.array([t * 5 // 8]))


def chunked(t: int, n: int) -> fa.Mask:
    """Local layers of Llama 4."""
    return fa.Causal() & fa.Chunked(t // 4)


def frames(t: int, n: int) -> fa.Mask:
    """Video: all of the same frame and of those before."""
    return fa.mask_fn(lambda q, k: q.index // (t // 8) >= k.index // (t // 8))


def dilated(t: int, n: int) -> fa.Mask:
    """LongNet (arXiv:2307.02486): within a segment, every fourth token."""
    return fa.Causal() & fa.Chunked(t // 2) & (lambda q, k: (q.index - k.index) % 4 == 0)


def image_text(t: int, n: int) -> fa.Mask:
    """Transfusion (arXiv:2408.11039): causal, but the tokens of one image see each other."""
    part, token = parts(t, 12), np.arange(t, dtype=np.int32)
    image = np.where(part % 3 == 1, np.searchsorted(part, part), token)  # of text, its own number
    mask = fa.mask_fn(lambda q, k: (q.index >= k.index) | (q.image == k.image))
    return mask(tokens={"image": image})


def sink_and_window(t: int, n: int) -> fa.Mask:
    """StreamingLLM (arXiv:2309.17453): the first tokens, and a window."""
    return fa.Causal() & (fa.Window(t // 8) | fa.Prefix(4))


def routing(t: int, n: int) -> fa.Mask:
    """Routing Transformer (arXiv:2003.05997): clusters of tokens, here sorted by their cluster."""
    cluster = np.random.default_rng(0).integers(0, 8, t, dtype=np.int32)
    order = np.argsort(cluster, stable=True).astype(np.int32)
    mask = fa.mask_fn(lambda q, k: (q.cluster == k.cluster) & (q.place >= k.place))
    return mask(tokens={"cluster": cluster[order], "place": order})


def random_ids(t: int, n: int) -> fa.Mask:
    """The same clusters of tokens that are not sorted: no tile is without a pair."""
    return fa.Causal() & fa.Segments(jax.random.randint(jax.random.key(0), (t,), 0, 8))


def big_bird(t: int, n: int) -> fa.Mask:
    """BigBird (arXiv:2007.14062): blocks that are global, near or random."""
    block = t // 16

    def visible(q: Any, k: Any) -> Any:
        i, j = q.index // block, k.index // block
        return (j == 0) | (i == 0) | (abs(i - j) <= 1) | ((i * 7 + j * 5) % 11 == 0)

    return fa.mask_fn(visible)


def longformer(t: int, n: int) -> fa.Mask:
    """Longformer (arXiv:2004.05150): a window; some tokens see all and are seen by all."""
    world = fa.mask_fn(lambda q, k: q.is_global | k.is_global)
    return fa.Window(t // 16) | world(tokens={"is_global": np.arange(t) % (t // 3) == 5})


def strided(t: int, n: int) -> fa.Mask:
    """Sparse Transformer, fixed (arXiv:1904.10509): a chunk, and the ends of those before."""
    summary = fa.mask_fn(lambda q, k: k.index % (t // 8) >= t // 8 - 4)
    return fa.Causal() & (fa.Chunked(t // 8) | summary)


def tree(t: int, n: int) -> fa.Mask:
    """SpecInfer (arXiv:2305.09781): a token sees its ancestors; tokens in depth-first order."""
    mask = fa.mask_fn(lambda q, k: (k.index <= q.index) & (q.index < k.end))
    return mask(tokens={"end": ends_of_subtrees(t)})


def natten(t: int, n: int) -> fa.Mask:
    """Neighborhood attention (arXiv:2204.07143): squares of an image, row by row,
    cut at its edges."""
    row, near = round(t**0.5), round(t**0.5) // 8
    rows = fa.mask_fn(lambda q, k: abs(q.index // row - k.index // row) <= near)
    return rows & (lambda q, k: abs(q.index % row - k.index % row) <= near)


def window_by_head(t: int, n: int) -> fa.Mask:
    """Every head looks back twice as far as the one before."""
    mask = fa.mask_fn(lambda q, k, c: q.index - k.index <= c.reach)
    return fa.Causal() & mask(heads={"reach": t >> np.arange(n, 0, -1, dtype=np.int32)})


def array(t: int, n: int) -> fa.Mask:
    """Any boolean array, at the cost of its memory."""
    return fa.Dense(jax.random.bernoulli(jax.random.key(0), shape=(t, t)))


MASKS: dict[str, Callable[[int, int], fa.Mask | None]] = {
    f.__name__: f
    for f in (
        *(full, causal, sliding_window, prefix_lm, packed_documents, padded, chunked, frames),
        *(dilated, image_text, sink_and_window, routing, random_ids, big_bird, longformer),
        *(strided, tree, natten, window_by_head, array),
    )
}


def soft_cap(t: int, n: int) -> fa.Score:
    """Gemma 2 (arXiv:2408.00118)."""
    return fa.soft_cap(30.0)


def alibi(t: int, n: int) -> fa.Score:
    """ALiBi (arXiv:2108.12409)."""
    return fa.alibi(n)


def distance(q: Any, k: Any) -> Any:
    return abs(q.index - k.index).astype(jnp.float32)


def buckets(t: int, n: int) -> fa.Score:
    """T5's relative position bias (arXiv:1910.10683), of three buckets of distances."""

    def biased(s: Any, q: Any, k: Any, c: Any) -> Any:
        d = distance(q, k)
        return s + jnp.where(d < 8, c.near, jnp.where(d < 128, c.middle, c.far))

    heads = np.linspace(-1, 1, n, dtype=np.float32)
    return fa.score_fn(biased)(heads={"near": heads, "middle": heads / 2, "far": -heads})


def kerple(t: int, n: int) -> fa.Score:
    """KERPLE, logarithmic (arXiv:2205.09921): learned sizes and rates."""
    score = fa.score_fn(lambda s, q, k, c: s - c.size * jnp.log1p(c.rate * distance(q, k)))
    rates = np.geomspace(1 / 64, 1, n, dtype=np.float32)
    return score(heads={"size": 1 / (1 + rates), "rate": rates})


def sandwich(t: int, n: int) -> fa.Score:
    """A term of Sandwich (arXiv:2212.10356), which falls and rises with the distance."""
    score = fa.score_fn(lambda s, q, k, c: s + c.size * jnp.cos(c.turn * distance(q, k)))
    turns = np.geomspace(1 / 256, 1 / 4, n, dtype=np.float32)
    return score(heads={"size": np.ones(n, np.float32), "turn": turns})


def temperature(t: int, n: int) -> fa.Score:
    """A learned temperature for every head, as of normalized queries (arXiv:2010.04245)."""
    score = fa.score_fn(lambda s, q, k, c: s * c.temperature)
    return score(heads={"temperature": np.linspace(0.5, 2, n, dtype=np.float32)})


def log_length(t: int, n: int) -> fa.Score:
    """Scalable softmax (arXiv:2501.19399): scores grow with the logarithm of what is seen."""
    score = fa.score_fn(lambda s, q, k, c: s * c.rate * jnp.log(q.index.astype(s.dtype) + 1))
    return score(params={"rate": jnp.float32(0.4)})


def forgetting(t: int, n: int) -> fa.Score:
    """Forgetting Transformer (arXiv:2503.02130): a gate a token, here one for all heads."""
    log_gates = -jax.random.exponential(jax.random.key(0), (t,)) / 256
    score = fa.score_fn(lambda s, q, k: s + (q.total - k.total))
    return score(tokens={"total": jnp.cumsum(log_gates)})


def token_bias(t: int, n: int) -> fa.Score:
    """A learned number for every key, such as how much it was attended to before."""
    score = fa.score_fn(lambda s, q, k: s + k.bias)
    return score(k_tokens={"bias": jax.random.normal(jax.random.key(0), (t,))})


def dense_bias(t: int, n: int) -> fa.Score:
    """Any array of scores, at the cost of its memory."""
    return fa.bias(jax.random.normal(jax.random.key(0), (t, t)))


SCORES: dict[str, Callable[[int, int], fa.Score]] = {
    f.__name__: f
    for f in (
        *(soft_cap, alibi, buckets, kerple, sandwich, temperature, log_length, forgetting),
        *(token_bias, dense_bias),
    )
}
