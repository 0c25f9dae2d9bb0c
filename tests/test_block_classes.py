"""Classes of tiles against the masks themselves, as boolean arrays made in NumPy."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.ir.block_classes import (
    EMPTY,
    FULL,
    PARTIAL,
    block_classes,
    block_classes_all_heads,
    data_independent_classes,
)
from tests.support import compile_gate
from tests.support.masks import causal_end
from tests.support.tiles import (
    EDGE,
    RAGGED,
    B,
    N,
    assert_sound,
    dense,
    describe_shapes,
    documents,
    exact,
    integers,
    k_side,
    q_side,
    table,
    token_data,
)

# As RAGGED, these have 6 x 4 tiles, so that few shapes are compiled.
TALL, SQUARE, EVEN = (61, 45, 11, 12), (48, 48, 8, 12), (96, 64, 16, 16)


def ready_made(q_len, kv_len):
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    q_lengths, kv_lengths = (integers(B, high=n, seed=7) for n in (q_len, kv_len))
    pairs = integers(B, N, q_len, kv_len, high=40, seed=8) > 0
    pairs[:, :, :20, 16:] = False
    ids = np.stack([documents(max(q_len, kv_len), seed=s) for s in range(B)])
    q_ids, k_ids = ids[:, :q_len], ids[:, :kv_len]
    starts, ends = (
        np.stack([np.searchsorted(x, x, s)[:q_len] for x in ids]) for s in ("left", "right")
    )
    return {
        "causal": (fa.Causal(), j <= i),
        "causal to the end": (causal_end, j <= i + kv_len - q_len),
        "window": (fa.Window(9, 2), (i - j <= 9) & (j - i <= 2)),
        "window of itself": (fa.Window(0), i == j),
        "endless window": (fa.Window(9, EDGE), i - j <= 9),
        "array window": (fa.Window(np.int32(9)), abs(i - j) <= 9),
        "segments": (fa.Segments(q_ids, k_ids), q_side(q_ids) == k_side(k_ids)),
        "documents": (fa.Documents(starts), q_side(starts) <= j),
        "documents with ends": (
            fa.Documents(starts, ends),
            (q_side(starts) <= j) & (q_side(ends) > j),
        ),
        "lengths": (
            fa.Lengths(q_lengths, kv_lengths),
            (q_side(q_lengths[:, None]) > i) & (k_side(kv_lengths[:, None]) > j),
        ),
        "length": (fa.Lengths(kv=17), (j < 17) & (i >= 0)),
        "prefix": (fa.Prefix(17), (j < 17) & (i >= 0)),
        "prefixes": (fa.Prefix(kv_lengths), (k_side(kv_lengths[:, None]) > j) & (i >= 0)),
        "chunks": (fa.Chunked(11), i // 11 == j // 11),
        "chunks of several tiles": (fa.Chunked(32), i // 32 == j // 32),
        "dense": (fa.Dense(pairs), pairs),
        "not causal": (~fa.Causal(), j > i),
        "all": (fa.Lengths(), (i >= 0) & (j >= 0)),
        "none": (fa.Lengths(q=0), (i < 0) & (j >= 0)),
    }


@pytest.mark.parametrize("sizes", [RAGGED, TALL], ids=str)
@pytest.mark.parametrize("name", ready_made(9, 9))
def test_built_in_masks_are_classified_exactly(name, sizes):
    mask, visible = ready_made(*sizes[:2])[name]
    np.testing.assert_array_equal(table(mask, sizes), exact(visible, sizes))


WIDTH = 8


def of_positions(q, k, xp):
    """Masks of positions alone, for scalars and for arrays."""
    i, j = q.index, k.index
    rem = np.fmod if xp is np else lambda x, n: jax.lax.rem(x, jnp.int32(n))
    clamp = np.clip if xp is np else lambda x, low, high: jax.lax.clamp(low, x, high)
    return {
        "causal window": lambda: (i >= j) & (i - j < 12),
        "two-sided window": lambda: abs(i - j) <= 9,
        "chunked and causal": lambda: (i // 10 == j // 10) & (i >= j),
        "sink and window": lambda: (i >= j) & ((j < 4) | (i - j < 12)),
        "prefix": lambda: (j < 7) | (i >= j),
        "dilated": lambda: (abs(i - j) <= 20) & (abs(i - j) % 4 == 0),
        "dilated, signed": lambda: (i - j) % 3 == 0,
        "neighborhood": lambda: (
            (abs(i // WIDTH - j // WIDTH) <= 1) & (abs(i % WIDTH - j % WIDTH) <= 2)
        ),
        "negative floor division": lambda: (i - 30) // 7 >= (j - 30) // 7,
        "division by a negative": lambda: (i - 20) // -5 == (j - 20) // -5,
        "halves of chunks": lambda: j % 32 < 16,
        "negative remainder": lambda: (j - 40) % 16 < 8,
        "remainder of a negative": lambda: (i - j) % -7 > -3,
        "remainder as in C": lambda: rem(i - j, 7) == -3,
        "remainder as in C of a product": lambda: rem((i - 20) * (j - 20), 9) < -1,
        "squares": lambda: i * i >= j * j,
        "product of signs": lambda: (i - 20) * (j - 20) > 0,
        "minimum and maximum": lambda: xp.minimum(i, 30) >= xp.maximum(j, 10),
        "clip": lambda: xp.clip(i, 10, 20) >= xp.clip(j, 5, 25),
        "clamp": lambda: clamp(i, 10, 20) >= clamp(j, 5, 25),
        "choice": lambda: xp.where(i < 20, i - j, j - i) >= 0,
        "exclusive or": lambda: (i < 20) ^ (j < 20),
        "sign": lambda: xp.sign(i - j) != 1,
        "opaque": lambda: (i * i) % 7 > (j * 3) % 5,
        "half": lambda: i.astype(xp.float32) / 2 > j.astype(xp.float32),
        "overflow": lambda: i * 100_000 * j >= 0,
        "overflow of a sum": lambda: i + (EDGE - 20) > j,
        "overflow of a difference": lambda: -2_147_483_630 - i < j,
        "overflow of a negation": lambda: -(i - 2_147_483_647 - 1) > 0,
        "overflow of a distance": lambda: abs(i - 2_147_483_647 - j) > 5,
        "unsigned": lambda: q.count - k.count < 9,
        "unsigned product": lambda: q.count * 70_000_000 > k.count,
        "documents": lambda: q.doc == k.doc,
        "documents, causal": lambda: (q.doc == k.doc) & (i >= j),
        "relative to its document": lambda: (q.doc == k.doc) & (j <= i) & (i - q.start < 9),
        "text or image": lambda: (i >= j) | ((q.image == k.image) & (q.image >= 0)),
        "random ids": lambda: q.random == k.random,
        "random order": lambda: q.random - 2 >= k.random,
        "flags": lambda: q.flag & (k.flag | (i >= j)),
        "equal flags": lambda: q.flag == k.flag,
        "different flags": lambda: q.flag != k.flag,
        "floats": lambda: q.x > k.x,
        "not floats": lambda: ~(q.x <= k.x),
        "float arithmetic": lambda: (q.x * k.x - q.x) / 2 >= k.x,
        "NaN is not itself": lambda: q.x == q.x + 0,
        "NaN is not equal": lambda: q.x != k.x,
    }


NAMES = list(of_positions(SimpleNamespace(index=0), SimpleNamespace(index=0), np))


@pytest.mark.parametrize("name", NAMES)
def test_classes_are_sound(name):
    sizes = RAGGED
    q_data, k_data = token_data(sizes[0], 1), token_data(sizes[1], 2)

    def choose(q, k, xp):
        return of_positions(q, k, xp)[name]()

    mask = fa.mask_fn(lambda q, k: choose(q, k, jnp))(q_tokens=q_data, k_tokens=k_data)
    assert_sound(table(mask, sizes), exact(dense(choose, q_data, k_data), sizes))


@pytest.mark.parametrize(
    "name, share",
    [("causal window", 1), ("sink and window", 1), ("documents, causal", 1),
     ("chunked and causal", 1), ("two-sided window", 1), ("neighborhood", 1.3), ("prefix", 1),
     ("clip", 1), ("clamp", 1), ("halves of chunks", 1)],
)  # fmt: skip
def test_classes_of_common_masks_are_tight(name, share):
    sizes = EVEN
    q_data = token_data(96, 1)
    k_data = {n: x[:64] for n, x in q_data.items()}

    def choose(q, k, xp):
        return of_positions(q, k, xp)[name]()

    mask = fa.mask_fn(lambda q, k: choose(q, k, jnp))(q_tokens=q_data, k_tokens=k_data)
    actual, want = table(mask, sizes), exact(dense(choose, q_data, k_data), sizes)
    assert np.sum(actual != EMPTY) <= share * np.sum(want != EMPTY)
    assert np.sum(actual == FULL) >= np.sum(want == FULL) / share


@pytest.mark.parametrize(
    "combine",
    [
        lambda x, y: x + y <= np.inf,
        lambda x, y: ~(abs(x + y) > np.inf),
        lambda x, y: x - y <= np.inf,
        lambda x, y: x * y <= np.inf,
        lambda x, y: x * 0 + y <= np.inf,
    ],
    ids=["sum", "not a sum", "difference", "product", "zero"],
)
@pytest.mark.parametrize("signs", [(1, 1), (1, -1)], ids=["equal", "opposite"])
def test_infinities_in_a_tile_are_sound(combine, signs):
    """inf - inf and 0 inf are NaN between bounds that are not."""
    sizes = RAGGED
    x, y = (
        sign * np.linspace(-3, 3, n, dtype=np.float32)
        for n, sign in zip(sizes, signs, strict=False)
    )
    x[::9], y[::10], x[4::20], y[5::20] = -np.inf, np.inf, 0, 0
    mask = fa.mask_fn(lambda q, k: combine(q.x, k.x))(q_tokens={"x": x}, k_tokens={"x": y})
    with np.errstate(invalid="ignore"):
        assert_sound(table(mask, sizes), exact(combine(x[:, None], y[None]), sizes))


@pytest.mark.parametrize("kind", ["heads", "params", "pairs"])
def test_data_of_all_kinds_are_bounded(kind):
    sizes = RAGGED
    q_len, kv_len = sizes[:2]
    x = {"heads": integers(N, high=40), "params": np.int32(20),
         "pairs": 10 * integers(B, 1, q_len, kv_len)}[kind]  # fmt: skip
    mask = fa.mask_fn(lambda q, k, c: q.index - k.index < c.x)(**{kind: {"x": x}})
    shown = x.reshape(1, N, 1, 1) if kind == "heads" else x
    visible = np.arange(q_len)[:, None] - np.arange(kv_len)[None] < shown
    actual = table(mask, sizes)
    assert_sound(actual, exact(visible, sizes))
    if kind != "pairs":
        np.testing.assert_array_equal(actual, exact(visible, sizes))


def test_an_indexed_table_is_classified_soundly():
    sizes = RAGGED
    lookup = integers(16, seed=3)
    mask = fa.mask_fn(lambda q, k, c: c.table[k.index % 16] > 1)(params={"table": lookup})
    visible = lookup[np.arange(sizes[1]) % 16] > 1
    assert_sound(table(mask, sizes), exact(visible, sizes))


@jax.jit
def remainder(x, y):
    return x * 0 - 1


@jax.jit
def floor_divide(x, y):
    return y - x


@pytest.mark.parametrize(
    "mask, visible",
    [
        (lambda q, k: remainder(q.index, 3) < 0, lambda i, j: (i >= 0) & (j >= 0)),
        (lambda q, k: floor_divide(k.index, q.index) >= 0, lambda i, j: i >= j),
        (lambda q, k: floor_divide(k.index, 30) < 0, lambda i, j: (j > 30) & (i >= 0)),
    ],
)
def test_a_users_function_may_have_a_name_of_jax(mask, visible):
    sizes = RAGGED
    i, j = np.arange(sizes[0])[:, None], np.arange(sizes[1])[None]
    assert_sound(table(mask, sizes), exact(visible(i, j), sizes))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_inner_jaxprs_are_evaluated(wrap):
    causal = wrap(lambda i, j: i >= j)
    sizes = RAGGED
    expected = exact(np.tri(*sizes[:2], dtype=bool), sizes)
    np.testing.assert_array_equal(table(lambda q, k: causal(q.index, k.index), sizes), expected)


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped", "random"])
def test_explicit_positions_are_bounded_in_any_order(order):
    """The shards of context parallelism: global positions of the tokens that a device holds."""
    sizes = (48, 32, 8, 8)
    everything = np.arange(96, dtype=np.int32)
    chunks = everything.reshape(6, -1)
    q_index, k_index = {
        "contiguous": (everything[48:], everything[32:64]),
        "zigzag": (chunks[[0, 2, 5]].ravel(), chunks[[1, 4]].ravel()),
        "striped": (everything[::2], everything[::3]),
        "random": (np.random.default_rng(0).permutation(96)[:48],
                   np.random.default_rng(1).permutation(96)[:32]),
    }[order]  # fmt: skip
    actual = table(fa.Causal(), sizes, q_positions=q_index, kv_positions=k_index)
    np.testing.assert_array_equal(actual, exact(q_index[:, None] >= k_index[None], sizes))


def test_classes_of_all_batch_entries_and_heads_together():
    """A tile is skipped only where all skip it, and is free of masks only where all are."""
    q_len, kv_len, *blocks = sizes = SQUARE
    lengths = np.array([17, 40], np.int32)
    visible = np.arange(kv_len) < lengths.reshape(B, 1, 1, 1)
    each = exact(visible, sizes)
    actual = block_classes_all_heads(*describe_shapes(fa.Prefix(lengths), q_len, kv_len), *blocks)
    all_full, all_empty = np.all(each == FULL, (0, 1)), np.all(each == EMPTY, (0, 1))
    np.testing.assert_array_equal(
        actual, np.where(all_full, FULL, np.where(all_empty, EMPTY, PARTIAL))
    )


def test_all_tiles_are_full_without_a_mask():
    assert np.all(table(None, RAGGED) == FULL)


def test_run_time_data_are_classified_under_jit():
    q_len, kv_len, *blocks = sizes = SQUARE

    @jax.jit
    def classes(mask):
        return block_classes(*describe_shapes(mask, q_len, kv_len), *blocks)

    for seed in range(2):
        ids = documents(q_len, seed=seed)
        actual = classes(fa.Segments(ids) & fa.Causal())
        visible = (ids[:, None] == ids[None]) & np.tri(q_len, dtype=bool)
        expected = exact(visible, sizes)[:1, :1]
        np.testing.assert_array_equal(actual.reshape(1, 1, *actual.shape[-2:]), expected)


IDS, LENGTHS = np.zeros(48, np.int32), np.zeros(B, np.int32)


@pytest.mark.parametrize(
    "mask, without_data",
    [
        (fa.Causal() & fa.Window(9) & fa.Segments(IDS), fa.Causal() & fa.Window(9)),
        (fa.Chunked(16) & fa.Lengths(kv=LENGTHS), fa.Chunked(16)),
        (fa.Causal() & fa.Documents(IDS, longest=10), fa.Causal() & fa.Window(9)),
        (fa.Window(jnp.int32(3)), fa.Lengths()),
        (fa.Causal() & fa.Segments(IDS), fa.Lengths()),  # not looked at: no distance is compared
    ],
    ids=str,
)
def test_data_independent_classes_are_sound(mask, without_data):
    """Whatever they are: also where they are traced."""
    q_len, kv_len, *blocks = SQUARE
    expected = block_classes(*describe_shapes(without_data, q_len, kv_len), *blocks) != EMPTY
    table = []

    @jax.jit
    def traced(mask):
        table.append(data_independent_classes(describe_shapes(mask, q_len, kv_len)[0], *blocks))

    traced(mask)
    np.testing.assert_array_equal(table[0], np.where(expected, PARTIAL, EMPTY))


def test_explicit_positions_make_every_tile_partial():
    spec, _ = describe_shapes(fa.Window(3), 48, 48, q_positions=jnp.arange(48))
    assert np.all(data_independent_classes(spec, 8, 12) == PARTIAL)


STATIC = [None, fa.Causal(), causal_end & fa.Window(9), fa.Window(3) | fa.Chunked(8),
          lambda q, k: (q.index - k.index) % 3 == 0]  # fmt: skip


@pytest.mark.parametrize("mask", STATIC, ids=["none", "causal", "window", "chunks", "function"])
def test_a_mask_without_data_is_classified_at_trace_time(mask):
    tables = []

    @jax.jit
    def traced(x):
        tables.append(block_classes_all_heads(*describe_shapes(mask, 48, 48), 8, 12))
        return x

    traced(jnp.ones(()))
    assert isinstance(tables[0], np.ndarray)
    np.testing.assert_array_equal(
        tables[0], block_classes_all_heads(*describe_shapes(mask, 48, 48), 8, 12)
    )


@pytest.mark.parametrize(
    "context", [jax.disable_jit, jax.checking_leaks, lambda: jax.debug_nans(True)]
)
def test_a_mask_without_data_is_classified_under_disable_jit(context):
    call = describe_shapes(STATIC[2], 48, 48)
    expected = block_classes_all_heads(*call, 8, 12)
    with context():
        np.testing.assert_array_equal(block_classes_all_heads(*call, 8, 12), expected)


def test_a_mask_of_traced_data_is_classified_at_run_time():
    def traced(lengths):
        table = block_classes_all_heads(*describe_shapes(fa.Lengths(kv=lengths), 48, 48), 8, 12)
        assert isinstance(table, jax.core.Tracer)
        return table

    assert jax.eval_shape(traced, jax.ShapeDtypeStruct((B,), jnp.int32)).shape == (6, 4)


def test_classes_on_a_gpu_negate_integers_safely():
    """ptxas up to 13.3 loses the minus of max(max(a, -b), c); XLA writes |x| as max(x, -x)."""

    def separate(q, k):
        return jnp.maximum(abs(q.row - k.row), abs(q.column - k.column)) <= -k.row

    def classes(row, column):
        mask = fa.mask_fn(separate)(tokens={"row": row, "column": column})
        return block_classes_all_heads(*describe_shapes(mask, 256, 256), 64, 64)

    ids = jax.ShapeDtypeStruct((256,), jnp.int32)
    hlo = compile_gate.hlo_for_h200(classes, ids, ids)
    fused, entry = hlo.split("\nENTRY ")
    assert "multiply" in fused and "constant(-1)" in entry and "constant(-1)" not in fused
    assert not re.search(r" s32\S* (negate|abs)\(", hlo)
