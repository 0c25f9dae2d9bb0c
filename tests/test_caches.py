"""Caches against arrays that NumPy writes token by token: what is appended, where, and what is never touched."""

import dataclasses
import itertools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2 import caches
from tests.support.small_caches import (
    HV,
    LENGTHS,
    PAGE,
    QUANTIZED,
    TABLE,
    TOKEN,
    B,
    H,
    K,
    S,
    append,
    contiguous,
    paged,
    random_tokens,
)


def _expected(cache: Any, new: list[np.ndarray]) -> Any:
    """The arrays with `new[b]`, `[tokens, K, H]`, behind sequence b, and the value's negative; beyond S are none."""
    key, value, lengths = np.array(cache.key), np.array(cache.value), np.array(cache.lengths)
    for b, tokens in enumerate(new):
        for token in tokens:
            n = lengths[b]
            lengths[b] += 1
            if n >= S:
                continue
            slot = (b, n) if isinstance(cache, fa.Cache) else (TABLE[b, n // PAGE], n % PAGE)
            key[slot], value[slot] = token, -token
    return key, value, lengths


def _assert_equal(cache: Any, expected: Any) -> None:
    actual = [np.asarray(x) for x in (cache.key, cache.value, cache.lengths)]
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)


CACHES = pytest.mark.parametrize("make", [contiguous, paged], ids=["cache", "pages"])


@CACHES
@pytest.mark.parametrize("tokens", [1, 4, 12])
def test_tokens_are_appended_to_each_sequence(make: Any, tokens: int) -> None:
    """Traced lengths that exceed the capacity: tokens beyond it are dropped, and the lengths tell."""
    x = random_tokens(B, tokens, K, H)
    cache = append(make(), x)
    _assert_equal(cache, _expected(make(), list(x)))
    assert np.array_equal(cache.lengths > cache.capacity, LENGTHS + tokens > S)


@CACHES
def test_of_padded_rows_the_last_tokens_are_appended(make: Any) -> None:
    x, new = random_tokens(B, 3, K, H), np.array([2, 0, 1], np.int32)
    expected = [x[b, 3 - n :] for b, n in enumerate(new)]
    _assert_equal(append(make(), x, new=new), _expected(make(), expected))


@CACHES
@pytest.mark.parametrize(
    "starts", [[0, 1, 4, 5], [0, 0, 0, 0], [0, 5, 5, 7], [0, 0, 6, 7]], ids=str
)
def test_packed_tokens_go_to_their_requests(make: Any, starts: list[int]) -> None:
    x = random_tokens(7, K, H)
    cache = append(make(), x, queries=fa.Packed(np.array(starts, np.int32)))
    rows = [x[a:b] for a, b in itertools.pairwise(starts)]
    _assert_equal(cache, _expected(make(), rows))


@CACHES
@pytest.mark.parametrize("lengths", [[-5, 2**31 - 1, S], [-(2**31), -1, 10**6]], ids=str)
def test_traced_garbage_writes_nothing(make: Any, lengths: list[int]) -> None:
    cache = make(np.array(lengths, np.int32))
    after = append(cache, random_tokens(B, 1, K, H))
    _assert_equal(after, (cache.key, cache.value, np.asarray(cache.lengths) + np.int32(1)))


@pytest.mark.parametrize("new, starts", [(9, [0, 9, 9, 9]), (-2, [3, 1, 9, 9])])
def test_traced_counts_are_those_of_rows_that_exist(new: int, starts: list[int]) -> None:
    """A length never counts a slot that was not written: it would be read as a key."""
    x = random_tokens(B, 2, K, H)
    after = append(contiguous(), x, new=np.full(B, new, np.int32))
    np.testing.assert_array_equal(after.lengths - LENGTHS, np.clip(new, 0, 2))
    rows = x[0]
    after = append(contiguous(), rows, queries=fa.Packed(np.array(starts, np.int32)))
    counts = np.diff(np.maximum.accumulate(np.clip(starts, 0, len(rows))))
    np.testing.assert_array_equal(after.lengths - LENGTHS, counts)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32"])
def test_integers_may_be_narrower_than_what_they_are_compared_with(dtype: str) -> None:
    pool = jnp.zeros((70_000, 1, 1, 8))
    table, lengths = np.array([[100, 2]], dtype), np.array([100], dtype)
    pages = fa.Pages(pool, pool, table, np.array([2], dtype))
    assert np.asarray(caches.as_int32(pages.table)).tolist() == [[100, 2]]
    cache = fa.Cache(*(jnp.zeros((1, 70_000, 1, 8)),) * 2, lengths)
    assert np.asarray(caches.clamp_lengths(cache)).tolist() == [100]
    starts = caches.clamp_starts(fa.Packed(np.array([0, 100], dtype)), 70_000).starts
    assert np.asarray(starts).tolist() == [0, 100]
    after = append(pages, np.ones((1, 1, 1, 8), np.float32))  # beyond the capacity
    assert not np.asarray(after.key).any()


def test_pages_out_of_range_are_not_written() -> None:
    for entry in (-1, 10, 2**31 - 1, -(2**31)):
        cache = paged(table=np.full_like(TABLE, entry))
        after = append(cache, random_tokens(B, 2, K, H))
        _assert_equal(after, (cache.key, cache.value, LENGTHS + 2))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_empty_pages_own_their_arrays(dtype: str) -> None:
    """They can be donated, and so can those of another layer that were made for the same table."""
    table = jnp.array([[0, -1], [3, -1]])
    layers = [
        fa.Pages.zeros(4, 8, kv_heads=K, head_dim=H, value_dim=HV, table=table, dtype=dtype)
        for _ in range(2)
    ]
    assert layers[0].capacity == 16 and layers[0].lengths.tolist() == [0, 0]
    tokens = jnp.ones((2, 3, K, H)), jnp.ones((2, 3, K, HV))
    x = [t.astype("float32" if dtype == "int8" else dtype) for t in tokens]
    step = jax.jit(lambda layers: [cache.append(*x) for cache in layers], donate_argnums=0)
    assert [cache.lengths.tolist() for cache in step(layers)] == [[3, 3]] * 2
    assert table.tolist() == [[0, -1], [3, -1]] and not table.is_deleted()


def test_a_table_that_nobody_has_filled_names_no_page() -> None:
    pages = fa.Pages.zeros(4, 8, kv_heads=K, head_dim=H, table=np.full((2, 2), -1), dtype="float32")
    x = jnp.ones((2, 3, K, H))
    with pytest.raises(ValueError, match="entry 0 of sequence 0 is -1"):
        pages.append(x, x)
    after = jax.jit(lambda pages: pages.append(x, x))(pages)  # where nobody knows the table
    assert not np.any(after.key) and not np.any(after.value)


def test_values_may_have_another_head_dim() -> None:
    cache = fa.Cache.zeros(2, 8, kv_heads=3, head_dim=4, value_dim=6)
    assert cache.key.shape == (2, 8, 3, 4) and cache.value.shape == (2, 8, 3, 6)
    assert cache.key.dtype == jnp.bfloat16 and cache.capacity == 8
    one = [jnp.ones((2, 1, 3, d), jnp.bfloat16) for d in (4, 6)]
    after = cache.append(*one)
    assert float(after.value.sum()) == 2 * 3 * 6


@CACHES
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_a_donated_cache_is_written_in_place(make: Any, packed: bool) -> None:
    """No copy of the cache in the program, and every array of it is an alias of its input."""
    x = jnp.ones((3, K, H) if packed else (B, 1, K, H))
    queries = fa.Packed(jnp.array([0, 1, 2, 3], jnp.int32)) if packed else None

    @jax.jit(donate_argnames="cache")
    def step(cache: Any, x: Any, queries: Any) -> Any:
        for _ in range(2):  # layers
            cache = cache.append(x, x, queries=queries)
        return cache

    cache = make()
    compiled = step.lower(cache, x, queries).compile()
    shape = ",".join(map(str, cache.key.shape))
    copies = re.findall(rf"f32\[{shape}\][^ ]* copy\(.*", compiled.as_text())
    assert not copies
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= cache.key.nbytes + cache.value.nbytes
    where = cache.key.unsafe_buffer_pointer()
    assert step(cache, x, queries).key.unsafe_buffer_pointer() == where


def test_a_step_that_attends_copies_no_cache() -> None:
    """A decode step of several layers, each with a cache of its own."""
    caches = [contiguous(), paged()] * 2
    q, x = jnp.ones((B, 1, 2 * K, H)), jnp.ones((B, 1, K, H))

    @jax.jit(donate_argnames="caches")
    def step(caches: Any, q: Any, x: Any) -> Any:
        after = []
        for cache in caches:
            cache = cache.append(x, x)
            q = fa.cached_attention(q, cache, implementation="reference")
            after.append(cache)
        return q, after

    text = step.lower(jax.tree.map(jnp.copy, caches), q, x).compile().as_text()
    for cache in caches[:2]:
        shape = ",".join(map(str, cache.key.shape))
        assert not re.findall(rf"f32\[{shape}\][^ ]* copy\(.*", text)


def test_caches_are_pytrees_of_their_arrays() -> None:
    for cache in (contiguous(), paged(), *(make("int8") for make in QUANTIZED.values())):
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(cache)]
        fields = [x.name for x in dataclasses.fields(cache) if getattr(cache, x.name) is not None]
        assert names == [f".{name}" for name in fields]
        assert len(fields) == len(dataclasses.fields(cache)) - (2 if cache.k_scale is None else 0)
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x, cache), cache)
    jax.tree.map(lambda x: None, paged())  # no check stands in the way of other leaves
    assert paged().page_size == 4 and paged().capacity == S


@pytest.mark.parametrize(
    "message, cache, tokens, options",
    [
        ("at most 12 tokens, the cache's capacity, but would have", contiguous(), jnp.zeros((B, 2, K, H)), {}),
        ("at most 12 tokens", paged(), jnp.zeros((B, 2, K, H)), {}),
        (r"entry 1 of sequence 1 is 10", paged(table=np.where(TABLE == 9, 10, TABLE)), TOKEN, {}),
        (r"entry 2 of sequence 2 is -1", paged(table=np.where(TABLE == 6, -1, TABLE)), TOKEN, {}),
        (r"key must have shape \[B, T, K, H\].*key\[:, None\]", contiguous(), TOKEN[:, 0], {}),
        (r"heads \(2, 4\), but it has shape \(3, 1, 2, 5\)", contiguous(), jnp.zeros((B, 1, K, 5)), {}),
        (r"with the cache's 3 sequences", contiguous(), TOKEN[:2], {}),
        (r"dtype must be the cache's, float32, but it is bfloat16", contiguous(), TOKEN.astype(jnp.bfloat16), {}),
        (r"new must be 0 to T = 1", contiguous(), TOKEN, {"new": jnp.array([0, 2, 0])}),
        (r"new must have shape \[B\] = \[3\]", contiguous(), TOKEN, {"new": jnp.array([0, 1])}),
        (r"new must be an array of integers", contiguous(), TOKEN, {"new": 1}),
        (r"key must have shape \[tokens, K, H\] for packed", contiguous(), TOKEN, {"queries": fa.Packed(jnp.array([0, 1, 2, 3]))}),
        (r"new must be left out", contiguous(), TOKEN[:, 0], {"queries": fa.Packed(jnp.array([0, 1, 2, 3])), "new": jnp.ones(3, jnp.int32)}),
        (r"starts must begin with 0", contiguous(), TOKEN[:, 0], {"queries": fa.Packed(jnp.array([0, 1, 2, 4]))}),
    ],
)  # fmt: skip
def test_known_mistakes_are_errors(message: str, cache: Any, tokens: Any, options: dict) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        cache.append(tokens, tokens, **options)


@pytest.mark.parametrize(
    "table, lengths, options, message",
    [
        ([[0, 1], [0, 2]], [3, 3], {}, r"page 0 for sequences 0 and 1, .* slot 3 "),
        ([[0, 1], [2, 0]], [1, 6], {}, r"page 0 for sequences 0 and 1, .* slot 1 "),
        ([[3, 1], [0, 3]], [2, 5], {"new": [0, 1]}, r"page 3 for sequences 1 and 0, .* slot 1 "),
        ([[5, 5], [0, 2]], [4, 0], {"new": [1, 1]}, r"page 5 for sequence 0 twice, .* slot 0 "),
        ([[0, 1], [4, 1]], [4, 5], {"starts": [0, 2, 2]}, r"page 1 for sequences 0 and 1, .* slot 0 "),
    ],
)  # fmt: skip
def test_a_known_page_with_tokens_of_others_is_not_written(
    table: list, lengths: list, options: dict, message: str
) -> None:
    cache = paged(np.array(lengths, np.int32), np.array(table, np.int32))
    token = jnp.zeros((2, 1, K, H))
    if "starts" in options:
        token, arrays = token[:, 0], {"queries": fa.Packed(jnp.array(options["starts"]))}
    else:
        arrays = {name: jnp.array(x) for name, x in options.items()}
    remedy = "copy the page to one of its own for sequence"
    with pytest.raises(ValueError, match=f"append: Pages.table names {message}.*{remedy}"):
        cache.append(token, token, **arrays)
    jax.eval_shape(lambda cache: cache.append(token, token, **arrays), cache)  # where it is traced


@pytest.mark.parametrize(
    "table, lengths, new",
    [
        ([[0, 1], [0, 2]], [4, 4], [1, 1]),  # a prefix in page 0
        ([[0, 1], [0, 2]], [3, 3], [1, 0]),  # sequence 1 has no token where one is written
        ([[0, 1], [2, 1]], [3, 3], [1, 1]),  # page 1 has no tokens yet
        ([[0, -1], [2, -1]], [3, 3], [1, 1]),
    ],
)
def test_pages_may_be_shared_where_no_token_is_lost(table: list, lengths: list, new: list) -> None:
    cache = paged(np.array(lengths, np.int32), np.array(table, np.int32))
    token = jnp.ones((2, 1, K, H))
    cache = cache.append(token, token, new=jnp.array(new))
    assert cache.lengths.tolist() == [n + more for n, more in zip(lengths, new, strict=True)]


def test_a_known_overflow_counts_the_tokens_that_are_new() -> None:
    cache = contiguous()
    cache.append(TOKEN, TOKEN, new=jnp.array([1, 1, 1]))
    two = jnp.zeros((B, 2, K, H))
    after = cache.append(two, two, new=jnp.array([2, 2, 1]))
    assert after.lengths.tolist() == [2, 7, 12]


SIZES = {"batch": 2, "capacity": 8, "kv_heads": 2, "head_dim": 8, "value_dim": 4}


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("batch", -1, "must be an integer of at least 0, .* but it is -1; "),
        ("batch", 2.0, "must be an integer of at least 0, .* but it is 2.0; "),
        ("batch", (2, 3), r"must be an integer .* but it is \(2, 3\); .*jax.vmap"),
        ("capacity", -1, "must be an integer of at least 0, .* but it is -1; "),
        ("capacity", "8", "must be an integer .* but it is '8'; "),
        ("capacity", None, "must be an integer .* but it is None; "),
        ("kv_heads", 0, "must be an integer of at least 1, .* but it is 0; "),
        ("kv_heads", True, "must be an integer .* but it is True; "),
        ("head_dim", 0, "must be an integer of at least 1, .* but it is 0; "),
        ("value_dim", -4, "must be an integer of at least 1, .* but it is -4; "),
        ("dtype", jnp.uint8, "must be .*float8_e4m3fn or int8.* but it is uint8; "),
        ("dtype", jnp.float8_e5m2, "must be .* but it is float8_e5m2; "),
        ("dtype", jnp.int32, "must be .* but it is int32; "),
        ("dtype", bool, "must be .* but it is bool; "),
        ("dtype", jnp.complex64, "must be .* but it is complex64; "),
        ("dtype", "half precision", "must be .* but it is 'half precision'; "),
        ("dtype", None, "must be .* but it is None; "),
    ],
)
def test_arguments_of_an_empty_cache(name: str, value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"Cache.zeros: {name} {message}"):
        fa.Cache.zeros(**{**SIZES, name: value})


@pytest.mark.parametrize(
    "name, value", [("num_pages", -1), ("page_size", 2.0), ("kv_heads", 0), ("dtype", None)]
)
def test_errors_about_empty_pages_name_their_arguments(name: str, value: Any) -> None:
    sizes = {"num_pages": 4, "page_size": 8, "kv_heads": 2, "head_dim": 8, name: value}
    with pytest.raises((ValueError, TypeError), match=f"Pages.zeros: {name} must be .* {value}; "):
        fa.Pages.zeros(**sizes, table=jnp.zeros((1, 2), jnp.int32))


@pytest.mark.parametrize("dtype", ["float16", jnp.float32, jnp.dtype("bfloat16"), "int8"])
def test_an_empty_cache_of_any_kind_of_sizes_and_dtype(dtype: Any) -> None:
    sizes = {name: np.int64(size) for name, size in SIZES.items()}
    cache = fa.Cache.zeros(**sizes, dtype=dtype)
    assert cache.key.shape == (2, 8, 2, 8) and cache.value.shape == (2, 8, 2, 4)
    assert cache.key.dtype == jnp.dtype(dtype) and (cache.k_scale is None) == (dtype != "int8")
    assert fa.Cache.zeros(0, 0, kv_heads=1, head_dim=1).capacity == 0


def test_an_empty_cache_of_a_batch_that_is_a_symbol() -> None:
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b"), jnp.int32)
    export = jax.export.export(
        jax.jit(lambda x: fa.Cache.zeros(x.shape[0], 4, kv_heads=1, head_dim=8).key)
    )
    assert export(x).out_avals[0].shape[1:] == (4, 1, 8)


def test_lengths_that_would_wrap_around_are_refused() -> None:
    cache = fa.Cache.zeros(1, 300, kv_heads=1, head_dim=8)
    cache = dataclasses.replace(cache, lengths=jnp.array([250], jnp.uint8))
    token = jnp.ones((1, 20, 1, 8), jnp.bfloat16)
    with pytest.raises(
        TypeError, match=r"lengths' dtype must hold .* 300, but it is uint8.*use int32"
    ):
        cache.append(token, token)
