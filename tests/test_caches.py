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
from jax.sharding import AxisType, SingleDeviceSharding

import pallas_fa2 as fa
from pallas_fa2 import caches
from pallas_fa2.ir.quantized import quantize
from tests.support import compile_gate, interpreter
from tests.support.tiers import slow

B, S, PAGE, K, H, HV = 3, 12, 4, 2, 4, 6
LENGTHS = np.array([0, 5, 11], np.int32)
TABLE = np.array([[7, 1, 0], [2, 9, 3], [4, 5, 6]], np.int32)
RNG = np.random.default_rng(0)
POOL = RNG.standard_normal((2, 10, PAGE, K, H)).astype("f")
SLOTS = RNG.standard_normal((2, B, S, K, H)).astype("f")


def _random(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype("f")


def _contiguous(lengths: Any = LENGTHS) -> fa.Cache:
    return fa.Cache(jnp.asarray(SLOTS[0]), jnp.asarray(SLOTS[1]), jnp.asarray(lengths))


def _paged(lengths: Any = LENGTHS, table: Any = TABLE) -> fa.Pages:
    arrays = map(jnp.asarray, (POOL[0], POOL[1], table, lengths))
    return fa.Pages(*arrays)


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


def _append(cache: Any, x: np.ndarray, **options: Any) -> Any:
    return interpreter.run(
        lambda cache, x, options: cache.append(x, -x, **options), cache, x, options
    )


def _assert_equal(cache: Any, expected: Any) -> None:
    actual = [np.asarray(x) for x in (cache.key, cache.value, cache.lengths)]
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)


CACHES = pytest.mark.parametrize("make", [_contiguous, _paged], ids=["cache", "pages"])


@CACHES
@pytest.mark.parametrize("tokens", [1, 4, 12])
def test_tokens_are_appended_to_each_sequence(make: Any, tokens: int) -> None:
    """Traced lengths that exceed the capacity: tokens beyond it are dropped, and the lengths tell."""
    x = _random(B, tokens, K, H)
    cache = _append(make(), x)
    _assert_equal(cache, _expected(make(), list(x)))
    assert np.array_equal(cache.lengths > cache.capacity, LENGTHS + tokens > S)


@CACHES
def test_of_padded_rows_the_last_tokens_are_appended(make: Any) -> None:
    x, new = _random(B, 3, K, H), np.array([2, 0, 1], np.int32)
    expected = [x[b, 3 - n :] for b, n in enumerate(new)]
    _assert_equal(_append(make(), x, new=new), _expected(make(), expected))


@CACHES
@pytest.mark.parametrize(
    "starts", [[0, 1, 4, 5], [0, 0, 0, 0], [0, 5, 5, 7], [0, 0, 6, 7]], ids=str
)
def test_packed_tokens_go_to_their_requests(make: Any, starts: list[int]) -> None:
    x = _random(7, K, H)
    cache = _append(make(), x, queries=fa.Packed(np.array(starts, np.int32)))
    rows = [x[a:b] for a, b in itertools.pairwise(starts)]
    _assert_equal(cache, _expected(make(), rows))


@CACHES
@pytest.mark.parametrize("lengths", [[-5, 2**31 - 1, S], [-(2**31), -1, 10**6]], ids=str)
def test_traced_garbage_writes_nothing(make: Any, lengths: list[int]) -> None:
    cache = make(np.array(lengths, np.int32))
    after = _append(cache, _random(B, 1, K, H))
    _assert_equal(after, (cache.key, cache.value, np.asarray(cache.lengths) + np.int32(1)))


@pytest.mark.parametrize("new, starts", [(9, [0, 9, 9, 9]), (-2, [3, 1, 9, 9])])
def test_traced_counts_are_those_of_rows_that_exist(new: int, starts: list[int]) -> None:
    """A length never counts a slot that was not written: it would be read as a key."""
    x = _random(B, 2, K, H)
    after = _append(_contiguous(), x, new=np.full(B, new, np.int32))
    np.testing.assert_array_equal(after.lengths - LENGTHS, np.clip(new, 0, 2))
    rows = x[0]
    after = _append(_contiguous(), rows, queries=fa.Packed(np.array(starts, np.int32)))
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
    after = _append(pages, np.ones((1, 1, 1, 8), np.float32))  # beyond the capacity
    assert not np.asarray(after.key).any()


def test_pages_out_of_range_are_not_written() -> None:
    for entry in (-1, 10, 2**31 - 1, -(2**31)):
        cache = _paged(table=np.full_like(TABLE, entry))
        after = _append(cache, _random(B, 2, K, H))
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
    caches = [_contiguous(), _paged()] * 2
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
    for cache in (_contiguous(), _paged(), *(make("int8") for make in QUANTIZED.values())):
        names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(cache)]
        fields = [x.name for x in dataclasses.fields(cache) if getattr(cache, x.name) is not None]
        assert names == [f".{name}" for name in fields]
        assert len(fields) == len(dataclasses.fields(cache)) - (2 if cache.k_scale is None else 0)
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x, cache), cache)
    jax.tree.map(lambda x: None, _paged())  # no check stands in the way of other leaves
    assert _paged().page_size == 4 and _paged().capacity == S


# Caches of 8 bits.


def _empty(dtype: str, lengths: Any = LENGTHS) -> fa.Cache:
    cache = fa.Cache.zeros(B, S, kv_heads=K, head_dim=H, dtype=dtype)
    return dataclasses.replace(cache, lengths=jnp.asarray(lengths))


def _empty_pages(dtype: str, lengths: Any = LENGTHS) -> fa.Pages:
    pool, scales = jnp.zeros((10, PAGE, K, H), dtype), jnp.zeros((10, K, PAGE), jnp.bfloat16)
    arrays = map(jnp.asarray, (pool, pool, TABLE, lengths))
    return fa.Pages(*arrays, scales, scales)


QUANTIZED = {"cache": _empty, "pages": _empty_pages}
OF_8_BITS = pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
LAYOUTS = pytest.mark.parametrize("layout", QUANTIZED)
LARGEST = {"float8_e4m3fn": 448, "int8": 127}


def _rounded(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers in 8 bits of tokens `[..., H]`, and their scales."""
    scale = (np.abs(x).max(-1) / np.float32(LARGEST[dtype])).astype(jnp.bfloat16)
    ratio = np.clip(x / scale.astype("f")[..., None], -LARGEST[dtype], LARGEST[dtype])
    return (np.round(ratio) if dtype == "int8" else ratio).astype(dtype), scale


@OF_8_BITS
@LAYOUTS
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_tokens_are_appended_in_8_bits(layout: str, dtype: str, packed: bool) -> None:
    """Each token of each head by its own scale, where its numbers are; nothing else is written."""
    tokens = np.exp2(RNG.integers(-9, 9, (B, 3, K, 1))).astype("f") * _random(B, 3, K, H)
    x, options = tokens, {"new": np.array([2, 0, 1], np.int32)}
    if packed:
        x = np.concatenate([tokens[0, 1:], tokens[2, 2:], tokens[1, :1]])
        options = {"queries": fa.Packed(np.array([0, 2, 2, 3], np.int32))}
    cache = QUANTIZED[layout](dtype)
    after = _append(cache, x, **options)
    numbers, scales = _rounded(tokens, dtype)
    written = [(0, 0, 1), (0, 1, 2), (2, 11, 2)]  # sequence, position, token of its row
    for name, negative in (("key", False), ("value", True)):
        expected = np.zeros_like(np.asarray(cache.key, "f"))
        expected_scales = np.zeros_like(np.asarray(cache.k_scale, "f"))
        for b, i, t in written:
            slot = (b, i) if layout == "cache" else (TABLE[b, i // PAGE], i % PAGE)
            expected[slot] = numbers[b, t].astype("f") * (-1 if negative else 1)
            expected_scales[slot[0], :, slot[1]] = scales[b, t]
        np.testing.assert_array_equal(np.asarray(getattr(after, name), "f"), expected)
        found = np.asarray(getattr(after, f"{name[0]}_scale"), "f")
        np.testing.assert_array_equal(found, expected_scales)
        assert getattr(after, name).dtype == dtype


def test_on_a_gpu_tokens_are_divided_by_the_scales_that_are_stored() -> None:
    """XLA's compiler for GPUs leaves out conversions to bfloat16 and back."""
    place = SingleDeviceSharding(compile_gate.h200s(1)[0])
    x = jax.ShapeDtypeStruct((2, 3, 64), jnp.bfloat16, sharding=place)
    compiled = jax.jit(lambda x: quantize(x, jnp.int8)).lower(x).compile()
    assert "reduce-precision(" in compiled.as_text()


@OF_8_BITS
def test_what_8_bits_stand_for(dtype: str) -> None:
    """Within half a step of the largest element of a token and head, whatever its size; zeros are zeros."""
    sizes = np.float32([1e-30, 3e-4, 1, 7e4, 1e30, 0, 1e-38])
    x = sizes[:, None, None] * RNG.uniform(0.1, 1, (1, 7, K, H)).astype("f")
    cache = fa.Cache.zeros(1, 8, kv_heads=K, head_dim=H, dtype=dtype)
    plain = _append(cache, x).dequantize(jnp.float32)
    assert plain.key.dtype == jnp.float32 and plain.k_scale is None
    off = np.abs(np.asarray(plain.key)[:, :7] - x)
    step = 2**-7 if dtype == "int8" else 2**-4
    assert (off <= step * np.abs(x).max(-1, keepdims=True) + 1e-38).all()
    np.testing.assert_array_equal(plain.key[0, 5], 0)
    np.testing.assert_array_equal(plain.key, -plain.value)
    assert cache.dequantize(jnp.float32).key.dtype == jnp.float32
    assert _contiguous().dequantize().key.dtype == jnp.float32  # it stands for itself


@OF_8_BITS
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tokens_that_are_not_finite_stay_so(dtype: str, value: float) -> None:
    x = np.ones((1, 1, K, H), "f")
    x[0, 0, 1, 2] = value
    cache = fa.Cache.zeros(1, 8, kv_heads=K, head_dim=H, dtype=dtype)
    plain = np.asarray(_append(cache, x).dequantize(jnp.float32).key)
    assert not np.isfinite(plain[0, 0, 1, 2]) and np.isfinite(plain[0, 0, 0]).all()


@OF_8_BITS
@LAYOUTS
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_a_donated_cache_of_8_bits_is_written_in_place(
    layout: str, dtype: str, packed: bool
) -> None:
    x = jnp.ones((3, K, H) if packed else (B, 1, K, H), jnp.bfloat16)
    queries = fa.Packed(jnp.array([0, 1, 2, 3], jnp.int32)) if packed else None
    cache = jax.eval_shape(lambda: QUANTIZED[layout](dtype))

    def step(cache: Any, x: Any, queries: Any) -> Any:
        return cache.append(x, x, queries=queries)

    compiled = jax.jit(step, donate_argnames="cache").lower(cache, x, queries).compile()
    sizes = [x.size * x.dtype.itemsize for x in (cache.key, cache.k_scale)]
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * sum(sizes)
    for x in (cache.key, cache.k_scale):
        shape = ",".join(map(str, x.shape))
        assert not re.findall(rf"\[{shape}\][^ ]* (?:copy|transpose)\(.*", compiled.as_text())


@LAYOUTS
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit], ids=str)
def test_heads_of_a_cache_of_8_bits_stay_divided_over_gpus(
    kind: AxisType, layout: str, packed: bool
) -> None:
    """Nothing is gathered, and nothing runs in a loop."""
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), ("x",), axis_types=(kind,))
    cache = jax.eval_shape(lambda: QUANTIZED[layout]("int8"))
    x = jax.ShapeDtypeStruct((3, K, H) if packed else (B, 1, K, H), jnp.bfloat16)
    queries = fa.Packed(jax.ShapeDtypeStruct((B + 1,), jnp.int32)) if packed else None

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # heads of tokens are behind the tokens, those of scales before them
        axis = x.ndim - 2 if x.ndim > 2 else None
        spec = jax.P(*("x" if i == axis else None for i in range(x.ndim)))
        return x.update(sharding=jax.NamedSharding(mesh, spec))

    def step(cache: Any, x: Any, queries: Any) -> Any:
        return cache.append(x, x, queries=queries)

    with jax.set_mesh(mesh):
        args = jax.tree.map(place, (cache, x, queries))
        text = jax.jit(step, donate_argnames="cache").lower(*args).compile().as_text()
    assert not re.search("all-gather|all-to-all|all-reduce|collective-permute| while[(]", text)


@pytest.mark.parametrize(
    "message, changes",
    [
        (r"k_scale must be bfloat16\[3, 2, 12\]", {"k_scale": None}),
        (r"v_scale must be bfloat16\[3, 2, 12\].*float32\[3, 2, 12\]", {"v_scale": jnp.ones((B, K, S))}),
        (r"k_scale must be bfloat16\[3, 2, 12\]", {"k_scale": jnp.ones((B, S, K), jnp.bfloat16)}),
        (r"must have one dtype where they have 8 bits", {"value": jnp.zeros((B, S, K, H), jnp.float8_e4m3fn)}),
        (r"k_scale must be None where key and value have 32 bits", {"key": jnp.zeros((B, S, K, H)), "value": jnp.zeros((B, S, K, H))}),
        (r"must be floats of 16 bits or more, or both float8_e4m3fn or int8", {"key": jnp.zeros((B, S, K, H), jnp.float8_e5m2)}),
    ],
)  # fmt: skip
def test_scales_fit_the_cache(message: str, changes: dict) -> None:
    cache = dataclasses.replace(_empty("int8"), **changes)
    for call in (
        lambda: cache.append(TOKEN, TOKEN),
        cache.dequantize,
        lambda: fa.cached_attention(TOKEN, cache),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_what_is_appended_in_8_bits_are_floats() -> None:
    token = TOKEN.astype(jnp.int8)
    with pytest.raises(
        TypeError, match="key must be bfloat16, float16 or float32 for a cache of 8"
    ):
        _empty("int8").append(token, token)


TOKEN = jnp.zeros((B, 1, K, H))


@pytest.mark.parametrize(
    "message, cache, tokens, options",
    [
        ("at most 12 tokens, the cache's capacity, but would have", _contiguous(), jnp.zeros((B, 2, K, H)), {}),
        ("at most 12 tokens", _paged(), jnp.zeros((B, 2, K, H)), {}),
        (r"entry 1 of sequence 1 is 10", _paged(table=np.where(TABLE == 9, 10, TABLE)), TOKEN, {}),
        (r"entry 2 of sequence 2 is -1", _paged(table=np.where(TABLE == 6, -1, TABLE)), TOKEN, {}),
        (r"key must have shape \[B, T, K, H\].*key\[:, None\]", _contiguous(), TOKEN[:, 0], {}),
        (r"heads \(2, 4\), but it has shape \(3, 1, 2, 5\)", _contiguous(), jnp.zeros((B, 1, K, 5)), {}),
        (r"with the cache's 3 sequences", _contiguous(), TOKEN[:2], {}),
        (r"dtype must be the cache's, float32, but it is bfloat16", _contiguous(), TOKEN.astype(jnp.bfloat16), {}),
        (r"new must be 0 to T = 1", _contiguous(), TOKEN, {"new": jnp.array([0, 2, 0])}),
        (r"new must have shape \[B\] = \[3\]", _contiguous(), TOKEN, {"new": jnp.array([0, 1])}),
        (r"new must be an array of integers", _contiguous(), TOKEN, {"new": 1}),
        (r"key must have shape \[tokens, K, H\] for packed", _contiguous(), TOKEN, {"queries": fa.Packed(jnp.array([0, 1, 2, 3]))}),
        (r"new must be left out", _contiguous(), TOKEN[:, 0], {"queries": fa.Packed(jnp.array([0, 1, 2, 3])), "new": jnp.ones(3, jnp.int32)}),
        (r"starts must begin with 0", _contiguous(), TOKEN[:, 0], {"queries": fa.Packed(jnp.array([0, 1, 2, 4]))}),
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
    cache = _paged(np.array(lengths, np.int32), np.array(table, np.int32))
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
    cache = _paged(np.array(lengths, np.int32), np.array(table, np.int32))
    token = jnp.ones((2, 1, K, H))
    cache = cache.append(token, token, new=jnp.array(new))
    assert cache.lengths.tolist() == [n + more for n, more in zip(lengths, new, strict=True)]


def test_a_known_overflow_counts_the_tokens_that_are_new() -> None:
    cache = _contiguous()
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
