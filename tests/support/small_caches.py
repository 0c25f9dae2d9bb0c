"""Small caches of three sequences, contiguous and in pages, of 32 bits and of 8."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from tests.support import interpreter

B, S, PAGE, K, H, HV = 3, 12, 4, 2, 4, 6
LENGTHS = np.array([0, 5, 11], np.int32)
TABLE = np.array([[7, 1, 0], [2, 9, 3], [4, 5, 6]], np.int32)
RNG = np.random.default_rng(0)
POOL = RNG.standard_normal((2, 10, PAGE, K, H)).astype("f")
SLOTS = RNG.standard_normal((2, B, S, K, H)).astype("f")
TOKEN = jnp.zeros((B, 1, K, H))


def random_tokens(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("f")


def contiguous(lengths: Any = LENGTHS) -> fa.Cache:
    return fa.Cache(jnp.asarray(SLOTS[0]), jnp.asarray(SLOTS[1]), jnp.asarray(lengths))


def paged(lengths: Any = LENGTHS, table: Any = TABLE) -> fa.Pages:
    arrays = map(jnp.asarray, (POOL[0], POOL[1], table, lengths))
    return fa.Pages(*arrays)


def append(cache: Any, x: np.ndarray, **options: Any) -> Any:
    return interpreter.run(
        lambda cache, x, options: cache.append(x, -x, **options), cache, x, options
    )


def empty(dtype: str, lengths: Any = LENGTHS) -> fa.Cache:
    cache = fa.Cache.zeros(B, S, kv_heads=K, head_dim=H, dtype=dtype)
    return dataclasses.replace(cache, lengths=jnp.asarray(lengths))


def empty_pages(dtype: str, lengths: Any = LENGTHS) -> fa.Pages:
    pool, scales = jnp.zeros((10, PAGE, K, H), dtype), jnp.zeros((10, K, PAGE), jnp.bfloat16)
    arrays = map(jnp.asarray, (pool, pool, TABLE, lengths))
    return fa.Pages(*arrays, scales, scales)


QUANTIZED = {"cache": empty, "pages": empty_pages}
