"""The calls whose first use `benchmarks.first_call` times, and the process that makes one of them.

    python -m benchmarks.first_call_cases forward        # prints a line of JSON

q, k and v are bfloat16, `[1, 4096, 16, 128]`, and every mask is causal. The model's step is that of a small Llama: an
embedding, 16 equal layers in a scan whose forward is computed again in the backward (`jax.checkpoint`), cross entropy
and gradient descent. It has the same code with cuDNN's attention.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

START = time.monotonic()

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa

LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Those that are timed; a test has smaller ones, and implementations that a CPU runs."""

    length: int = 4096
    heads: int = 16
    kv_heads: int = 4  # of the model
    head_dim: int = 128
    layers: int = 16
    hidden: int = 5632
    vocabulary: int = 32000
    ours: Any = "fused"  # an error where no fused kernel serves a call
    rival: Any = "cudnn"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class Problem(NamedTuple):
    """A function, its arguments in NumPy, and which of its results are compared with those of other processes."""

    function: Callable
    arguments: tuple
    compared: Callable = lambda results: results


def draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)


def arrays(sizes: Sizes) -> tuple[np.ndarray, ...]:
    """Return q, k, v and the gradient of the output, `[1, T, N, H]`."""
    rng = np.random.default_rng(0)
    shape = 1, sizes.length, sizes.heads, sizes.head_dim
    return tuple(draw(rng, *shape) for _ in range(4))


def with_gradients(attention: Callable) -> Callable:
    """Return a function of (dout, *arrays) that returns the output and the gradients of all floating-point arrays."""

    def run(dout: jax.Array, *args: jax.Array) -> tuple:
        out, pull = jax.vjp(attention, *args)
        return out, *(x for x in pull(dout) if x.dtype == dout.dtype)

    return run


def forward(sizes: Sizes) -> Problem:
    attention = functools.partial(fa.flash_attention, mask=fa.Causal(), implementation=sizes.ours)
    return Problem(attention, arrays(sizes)[:3])


def backward(sizes: Sizes) -> Problem:
    problem = forward(sizes)
    return Problem(with_gradients(problem.function), (arrays(sizes)[3], *problem.arguments))


def documents(sizes: Sizes) -> Problem:
    """Return a call on eight documents, whose ids are data."""

    def attention(q: Any, k: Any, v: Any, ids: Any) -> jax.Array:
        mask = fa.Causal() & fa.Segments(ids)
        return fa.flash_attention(q, k, v, mask=mask, implementation=sizes.ours)

    ids = np.arange(sizes.length, dtype=np.int32)[None] // (sizes.length // 8)
    *qkv, dout = arrays(sizes)
    return Problem(with_gradients(attention), (dout, *qkv, ids))


def scores(sizes: Sizes) -> Problem:
    """Return a call with ALiBi, a soft cap and a bias of each head, all heads' being equal."""

    def attention(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        score = fa.alibi(sizes.heads), fa.bias(bias), fa.soft_cap(50.0)
        return fa.flash_attention(q, k, v, mask=fa.Causal(), score=score, implementation=sizes.ours)

    one_head = draw(np.random.default_rng(1), 1, 1, sizes.length, sizes.length)
    bias = np.repeat(one_head, sizes.heads, axis=1)
    *qkv, dout = arrays(sizes)
    return Problem(with_gradients(attention), (dout, *qkv, bias))


def normalize(x: jax.Array) -> jax.Array:
    full = x.astype(jnp.float32)
    mean_square = jnp.square(full).mean(-1, keepdims=True)
    return (full * jax.lax.rsqrt(mean_square + 1e-5)).astype(x.dtype)


def llama(sizes: Sizes, attention: Callable) -> Problem:
    """Return a training step of a model, given its attention of q, k and v; the losses are compared."""
    width, kv_width = sizes.width, sizes.kv_heads * sizes.head_dim

    @jax.checkpoint
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        h = normalize(x)
        q, k, v = ((h @ w[n]).reshape(*h.shape[:2], -1, sizes.head_dim) for n in "qkv")
        x = x + attention(q, k, v).reshape(x.shape) @ w["out"]
        h = normalize(x)
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    def loss(weights: dict[str, Any], tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(layer, weights["embedding"][tokens[:, :-1]], weights["layers"])
        logits = (normalize(x) @ weights["embedding"].T).astype(jnp.float32)
        of_next = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - of_next).mean()

    def step(weights: dict[str, Any], tokens: jax.Array) -> tuple:
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        descend = lambda w, dw: w - LEARNING_RATE * dw
        return value, jax.tree.map(descend, weights, gradients)

    shapes = {
        "q": (width, width),
        "k": (width, kv_width),
        "v": (width, kv_width),
        "out": (width, width),
        "gate": (width, sizes.hidden),
        "up": (width, sizes.hidden),
        "down": (sizes.hidden, width),
    }
    rng = np.random.default_rng(0)
    # Rows of unit length keep activations near 1. Drawn once for all layers: a billion numbers take ten seconds.
    one_layer = {n: draw(rng, *shape) * _bfloat16(shape[0] ** -0.5) for n, shape in shapes.items()}
    layers = {n: np.repeat(x[None], sizes.layers, axis=0) for n, x in one_layer.items()}
    embedding = draw(rng, sizes.vocabulary, width) * _bfloat16(width**-0.5)
    tokens = rng.integers(sizes.vocabulary, size=(1, sizes.length + 1), dtype=np.int32)
    weights = {"embedding": embedding, "layers": layers}
    return Problem(step, (weights, tokens), lambda results: results[0])


def _bfloat16(x: float) -> np.ndarray:
    return np.asarray(x, jnp.bfloat16)


def our_llama(sizes: Sizes) -> Problem:
    return llama(sizes, forward(sizes).function)


def rival_llama(sizes: Sizes) -> Problem:
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=sizes.rival
    )
    return llama(sizes, attention)


CASES: dict[str, Callable[[Sizes], Problem]] = {
    "forward": forward,
    "backward": backward,
    "documents": documents,
    "scores": scores,
    "llama": our_llama,
    "llama_cudnn": rival_llama,
}


def first_call(problem: Problem, arguments: tuple) -> tuple[dict[str, float], Any]:
    """Return the seconds of each step of the first call of a new program, and its results.

    The kernels are compiled beside tracing and lowering, and what is left of that when the program is lowered counts as
    lowering.
    """

    def program(*args: Any) -> Any:  # one that JAX has not seen
        return problem.function(*args)

    times = [time.monotonic()]

    def lap(x: Any) -> Any:
        times.append(time.monotonic())
        return x

    traced = lap(jax.jit(program).trace(*arguments))
    compiled = lap(lap(traced.lower()).compile())
    results = lap(jax.block_until_ready(compiled(*arguments)))
    names = "trace", "lower", "compile", "run"
    seconds = {n: b - a for n, a, b in zip(names, times[:-1], times[1:], strict=True)}
    return seconds | {"total": times[-1] - times[0]}, results


def measure(name: str, sizes: Sizes) -> dict[str, Any]:
    """Return the seconds of the first call of a case in this process, of a second program with it, and what it
    computed.

    Before these, the device is initialized and a program of one operation runs: that is XLA's own start.
    """
    imported = time.monotonic()
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.float32(0)))
    device = time.monotonic()
    problem = CASES[name](sizes)
    arguments = jax.block_until_ready(jax.device_put(problem.arguments))
    first, results = first_call(problem, arguments)
    compared = [np.asarray(x) for x in jax.tree.leaves(problem.compared(results))]
    del results
    second, _ = first_call(problem, arguments)
    return {
        "import": imported - START,
        "device": device - imported,
        "first": first,
        "second": second,
        "norms": [float(np.linalg.norm(x.astype(np.float64).ravel())) for x in compared],
        "digest": hashlib.sha256(b"".join(x.tobytes() for x in compared)).hexdigest()[:12],
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    print(json.dumps(measure(parser.parse_args(argv).case, Sizes())))


if __name__ == "__main__":
    main()
