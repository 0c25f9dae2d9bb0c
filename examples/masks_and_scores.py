"""Masks and scores from the literature in about three lines each.

    python examples/masks_and_scores.py    # lists them, and what masks save on an H100

Each is a function of T tokens and N heads; the data are random with fixed seeds. `mask_gallery` draws and times them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa


def document_ids(t: int, count: int) -> np.ndarray:
    """Return the document of each of t tokens, `[t]`, for `count` documents of random lengths."""
    ends = np.sort(np.random.default_rng(0).choice(np.arange(1, t), count - 1, replace=False))
    return np.searchsorted(ends, np.arange(t), side="right").astype(np.int32)


def subtree_ends(t: int) -> np.ndarray:
    """Return the index after the last descendant of each node of a random tree in depth-first order, `[t]`."""
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
    """T5 (arXiv:1910.10683): the prompt attends to itself in both directions."""
    return fa.Causal() | fa.Prefix(jnp.array([t // 3]))


def packed_documents(t: int, n: int) -> fa.Mask:
    """Several documents in one row."""
    return fa.Causal() & fa.Segments(jnp.asarray(document_ids(t, 8)))


def padded(t: int, n: int) -> fa.Mask:
    """Batch entries that are shorter than others."""
    return fa.Causal() & fa.Lengths(kv=jnp.array([t * 5 // 8]))


def chunked(t: int, n: int) -> fa.Mask:
    """Local layers of Llama 4."""
    return fa.Causal() & fa.Chunked(t // 4)


def frames(t: int, n: int) -> fa.Mask:
    """Video: a token attends to its own frame and to those before."""
    return fa.mask_fn(lambda q, k: q.index // (t // 8) >= k.index // (t // 8))


def dilated(t: int, n: int) -> fa.Mask:
    """LongNet (arXiv:2307.02486): every fourth token of a segment."""
    return fa.Causal() & fa.Chunked(t // 2) & (lambda q, k: (q.index - k.index) % 4 == 0)


def image_text(t: int, n: int) -> fa.Mask:
    """Transfusion (arXiv:2408.11039): causal, but the tokens of one image attend to each other."""
    document, token = document_ids(t, 12), np.arange(t, dtype=np.int32)
    # A text token has an id of its own, its index; an image has that of its first token.
    image = np.where(document % 3 == 1, np.searchsorted(document, document), token)
    mask = fa.mask_fn(lambda q, k: (q.index >= k.index) | (q.image == k.image))
    return mask(tokens={"image": image})


def sink_and_window(t: int, n: int) -> fa.Mask:
    """StreamingLLM (arXiv:2309.17453): the first tokens, and a window."""
    return fa.Causal() & (fa.Window(t // 8) | fa.Prefix(4))


def routing(t: int, n: int) -> fa.Mask:
    """Routing Transformer (arXiv:2003.05997): clusters of tokens, here sorted by their cluster."""
    cluster = np.random.default_rng(0).integers(0, 8, t, dtype=np.int32)
    order = np.argsort(cluster, stable=True).astype(np.int32)
    mask = fa.mask_fn(lambda q, k: (q.cluster == k.cluster) & (q.time >= k.time))
    return mask(tokens={"cluster": cluster[order], "time": order})


def random_ids(t: int, n: int) -> fa.Mask:
    """The same clusters of unsorted tokens: no tile is empty."""
    return fa.Causal() & fa.Segments(jax.random.randint(jax.random.key(0), (t,), 0, 8))


def big_bird(t: int, n: int) -> fa.Mask:
    """BigBird (arXiv:2007.14062): blocks that are global, near or random."""
    block = t // 16

    def visible(q: Any, k: Any) -> Any:
        i, j = q.index // block, k.index // block
        return (j == 0) | (i == 0) | (abs(i - j) <= 1) | ((i * 7 + j * 5) % 11 == 0)

    return fa.mask_fn(visible)


def longformer(t: int, n: int) -> fa.Mask:
    """Longformer (arXiv:2004.05150): a window, and tokens that attend to all and to which all attend."""
    global_tokens = fa.mask_fn(lambda q, k: q.is_global | k.is_global)
    return fa.Window(t // 16) | global_tokens(tokens={"is_global": np.arange(t) % (t // 3) == 5})


def strided(t: int, n: int) -> fa.Mask:
    """Sparse Transformer, fixed (arXiv:1904.10509): a chunk, and the last tokens of those before."""
    summary = fa.mask_fn(lambda q, k: k.index % (t // 8) >= t // 8 - 4)
    return fa.Causal() & (fa.Chunked(t // 8) | summary)


def tree(t: int, n: int) -> fa.Mask:
    """SpecInfer (arXiv:2305.09781): a token attends to its ancestors; tokens are in depth-first order."""
    mask = fa.mask_fn(lambda q, k: (k.index <= q.index) & (q.index < k.end))
    return mask(tokens={"end": subtree_ends(t)})


def natten(t: int, n: int) -> fa.Mask:
    """Neighborhood attention (arXiv:2204.07143): square windows on an image in row-major order."""
    row, near = round(t**0.5), round(t**0.5) // 8
    rows = fa.mask_fn(lambda q, k: abs(q.index // row - k.index // row) <= near)
    return rows & (lambda q, k: abs(q.index % row - k.index % row) <= near)


def window_by_head(t: int, n: int) -> fa.Mask:
    """Windows of which each head has one twice as long as the head before."""
    mask = fa.mask_fn(lambda q, k, c: q.index - k.index <= c.reach)
    return fa.Causal() & mask(heads={"reach": t >> np.arange(n, 0, -1, dtype=np.int32)})


def array(t: int, n: int) -> fa.Mask:
    """A boolean array, which takes O(T S) memory."""
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
    """T5's relative position bias (arXiv:1910.10683) with three buckets of distances."""

    def add_bias(s: Any, q: Any, k: Any, c: Any) -> Any:
        d = distance(q, k)
        return s + jnp.where(d < 8, c.near, jnp.where(d < 128, c.middle, c.far))

    heads = np.linspace(-1, 1, n, dtype=np.float32)
    return fa.score_fn(add_bias)(heads={"near": heads, "middle": heads / 2, "far": -heads})


def kerple(t: int, n: int) -> fa.Score:
    """KERPLE, logarithmic (arXiv:2205.09921): learned sizes and rates."""
    score = fa.score_fn(lambda s, q, k, c: s - c.size * jnp.log1p(c.rate * distance(q, k)))
    rates = np.geomspace(1 / 64, 1, n, dtype=np.float32)
    return score(heads={"size": 1 / (1 + rates), "rate": rates})


def sandwich(t: int, n: int) -> fa.Score:
    """A term of Sandwich (arXiv:2212.10356), which is periodic in the distance."""
    score = fa.score_fn(lambda s, q, k, c: s + c.size * jnp.cos(c.turn * distance(q, k)))
    turns = np.geomspace(1 / 256, 1 / 4, n, dtype=np.float32)
    return score(heads={"size": np.ones(n, np.float32), "turn": turns})


def temperature(t: int, n: int) -> fa.Score:
    """A learned temperature for every head, as for normalized queries (arXiv:2010.04245)."""
    score = fa.score_fn(lambda s, q, k, c: s * c.temperature)
    return score(heads={"temperature": np.linspace(0.5, 2, n, dtype=np.float32)})


def log_length(t: int, n: int) -> fa.Score:
    """Scalable softmax (arXiv:2501.19399): scores grow with the logarithm of the number of keys."""
    score = fa.score_fn(lambda s, q, k, c: s * c.rate * jnp.log(q.index.astype(s.dtype) + 1))
    return score(params={"rate": jnp.float32(0.4)})


def forgetting(t: int, n: int) -> fa.Score:
    """Forgetting Transformer (arXiv:2503.02130): a gate for each token, here the same for all heads."""
    log_gates = -jax.random.exponential(jax.random.key(0), (t,)) / 256
    score = fa.score_fn(lambda s, q, k: s + (q.total - k.total))
    return score(tokens={"total": jnp.cumsum(log_gates)})


def token_bias(t: int, n: int) -> fa.Score:
    """A learned bias for every key, such as how much attention it has received."""
    score = fa.score_fn(lambda s, q, k: s + k.bias)
    return score(k_tokens={"bias": jax.random.normal(jax.random.key(0), (t,))})


def dense_bias(t: int, n: int) -> fa.Score:
    """An array that is added to the scores, which takes O(T S) memory."""
    return fa.bias(jax.random.normal(jax.random.key(0), (t, t)))


SCORES: dict[str, Callable[[int, int], fa.Score]] = {
    f.__name__: f
    for f in (
        *(soft_cap, alibi, buckets, kerple, sandwich, temperature, log_length, forgetting),
        *(token_bias, dense_bias),
    )
}


def main(tokens: int = 4096, heads: int = 4) -> None:
    """Print what each mask and score is, and the share of tiles that the kernels of an H100 compute under a mask."""
    x = jax.ShapeDtypeStruct((1, tokens, heads, 128), jnp.bfloat16)
    print(f"tiles computed of {tokens} tokens, under the masks:")
    for name, make in MASKS.items():
        share = fa.explain(x, x, x, mask=make(tokens, heads), device="9.0").share
        print(f"{name:17} {share:6.1%}  {make.__doc__}")
    print("scores:")
    for name, make in SCORES.items():
        print(f"{name:25} {make.__doc__}")


if __name__ == "__main__":
    main()
