"""Appends to and attends to caches whose lengths, tables and starts are garbage, on a GPU.

    compute-sanitizer --tool memcheck python -m tests.support.bad_caches hopper pages

`tests/test_memcheck.py` runs it. Data are traced, so that no call is refused.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives import launch, thread_ops
from pallas_fa2.backends.common.primitives.layouts import THREADS

BATCH, CAPACITY, PAGE, HEADS, KV_HEADS, DIM = 3, 256, 16, 8, 2, 64
PAGES = BATCH * CAPACITY // PAGE
LEAST, MOST = -(2**31), 2**31 - 1
LENGTHS = [-7, CAPACITY + 1, MOST], [CAPACITY, LEAST, 90]
KERNELS = "hopper", "hopper int8", "ampere"
CASES = "lengths", "pages", "packed", "masks"


def random(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)


class Tokens(NamedTuple):
    """Keys and values `[shape, K, H]`, and their scales, if they have 8 bits."""

    key: jax.Array
    value: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @classmethod
    def make(cls, shape: tuple[int, int], kernel: str) -> "Tokens":
        key, value = (random(*shape, KV_HEADS, DIM) for _ in range(2))
        if "int8" not in kernel:
            return cls(key, value)
        ones = jnp.ones((shape[0], KV_HEADS, shape[1]), jnp.bfloat16)
        return cls(key.astype(jnp.int8), value.astype(jnp.int8), ones, jnp.copy(ones))


def cache(lengths: list[int], kernel: str) -> fa.Cache:
    key, value, *scales = Tokens.make((BATCH, CAPACITY), kernel)
    return fa.Cache(key, value, jnp.array(lengths, I32), *scales)


def pages(table: Any, lengths: list[int], kernel: str) -> fa.Pages:
    key, value, *scales = Tokens.make((PAGES, PAGE), kernel)
    return fa.Pages(key, value, jnp.asarray(table, I32), jnp.array(lengths, I32), *scales)


def calls(kernel: str, case: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield caches, and what `attend` takes beside them."""
    table = np.arange(PAGES).reshape(BATCH, -1)
    if case == "lengths":
        for lengths in LENGTHS:
            yield cache(lengths, kernel), {}
        yield cache(LENGTHS[0], kernel), {"mask": fa.SlidingWindow(70)}
    elif case == "pages":
        for lengths, entry in itertools.product(LENGTHS, (-1, PAGES, LEAST, MOST)):
            yield pages(np.where(table % 5 == 3, table, entry), lengths, kernel), {}
    elif case == "packed":
        garbage = np.where(table % 5 == 3, table, MOST)
        for starts in ([0, 9, 2, 700], [-4, 2**30, LEAST, 3]):
            data = {"starts": jnp.array(starts, I32)}
            yield pages(garbage, LENGTHS[1], kernel), data
            yield cache(LENGTHS[0], kernel), data
    else:
        kv_ids = jnp.asarray(np.arange(CAPACITY)[None].repeat(BATCH, 0) // 50, I32)
        yield cache(LENGTHS[0], kernel), {"mask": fa.Segments(kv_ids[:, -1:], kv_ids=kv_ids)}
        yield cache(LENGTHS[1], kernel), {"mask": fa.Prefix(4) | fa.Window(40)}
        yield cache(LENGTHS[0], kernel), {"mask": fa.Causal(), "split_size": 128}


def attend(kernel: str, kv: Any, *, starts: Any = None, **options: Any) -> None:
    """Append tokens and attend to them, in one program."""
    rows = (BATCH, 2) if starts is None else (8,)
    query, *new = (random(*rows, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    options["implementation"] = kernel.split()[0]

    def run(query: Any, new: Any, kv: Any, starts: Any) -> Any:
        queries = None if starts is None else fa.Packed(starts)
        kv = kv.append(*new, queries=queries)
        return fa.cached_attention(query, kv, queries=queries, **options), kv

    execute(run, query, new, kv, starts)


def execute(fn: Callable, *arguments: Any) -> None:
    jax.block_until_ready(jax.jit(fn)(*arguments))


def read_beyond(x: jax.Array, index: jax.Array) -> jax.Array:
    """Read an element of device memory past the end: what the sanitizer is to find."""

    def run(refs: tuple, _: Any) -> None:
        x, index, out = refs
        threads = thread_ops.thread_indices()
        thread_ops.scatter(out, threads, threads + x[index[0]])

    out = jax.ShapeDtypeStruct((THREADS,), I32)
    return launch.build_kernel("read_beyond", run, [], out, {"cta": 1}, 1)(x, index)


def main(kernel: str, case: str) -> None:
    if kernel == "planted":
        x = jnp.zeros(128, I32)
        execute(read_beyond, x, jnp.full(1, 2**26, I32))
        return
    for kv, options in calls(kernel, case):
        attend(kernel, kv, **options)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
