"""Masks against boolean arrays made in NumPy; and masks as pytrees."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.ir.arrays import K_AXIS, Q_AXIS, default_positions
from pallas_fa2.parse_call import parse_call
from tests.support.masks import causal_end

B, N, K = 2, 4, 2
T, S = 9, 14
I, J = np.arange(T)[:, None], np.arange(S)[None]


def dense(mask, q_len=T, kv_len=S, **positions):
    """The mask as `[B, N, T, S]`."""
    q = jax.ShapeDtypeStruct((B, q_len, N, 16), jnp.float32)
    k = jax.ShapeDtypeStruct((B, kv_len, K, 16), jnp.float32)
    spec, operands = parse_call(q, k, k, mask=mask, **positions)
    index = [
        default_positions(length, axis) if explicit is None else explicit
        for length, axis, explicit in (
            (q_len, Q_AXIS, operands.q_index),
            (kv_len, K_AXIS, operands.k_index),
        )
    ]
    visible = spec.mask.on_leading_axes(*index, operands.mask)
    return jnp.broadcast_to(visible, (B, K, N // K, q_len, kv_len)).reshape(B, N, q_len, kv_len)


def check(mask, expected, **positions):
    actual = np.asarray(dense(mask, *expected.shape[-2:], **positions))
    np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


def integers(high, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.int32)


def column(x):
    """Data of queries, `[B, T]` or `[B]`, against `[B, N, T, S]`."""
    return x.reshape(B, 1, -1, 1)


def row(x):
    return x.reshape(B, 1, 1, -1)


POSITIONAL = {
    "causal": (fa.Causal(), lambda i, j, t, s: j <= i),
    "causal to the end": (causal_end, lambda i, j, t, s: j <= i + s - t),
    "window": (fa.Window(3), lambda i, j, t, s: abs(i - j) <= 3),
    "window to the left": (fa.Window(3, 0), lambda i, j, t, s: (j <= i) & (i - j <= 3)),
    "window to the right": (fa.Window(0, right=2), lambda i, j, t, s: (j >= i) & (j - i <= 2)),
    "window without a left end": (fa.Window(-1, 0), lambda i, j, t, s: j <= i),
    "window without a right end": (fa.Window(2, None), lambda i, j, t, s: i - j <= 2),
    "window without ends": (fa.Window(None, -1), lambda i, j, t, s: (i >= 0) & (j >= 0)),
    "window of data without a left end": (
        fa.Window(np.int32(-1), np.int32(1)),
        lambda i, j, t, s: j - i <= 1,
    ),
    "sliding window": (fa.SlidingWindow(3), lambda i, j, t, s: (j <= i) & (i - j < 3)),
    "sliding window of data": (
        fa.SlidingWindow(jnp.int32(3)),
        lambda i, j, t, s: (j <= i) & (i - j < 3),
    ),
    "window of itself": (fa.Window(0), lambda i, j, t, s: i == j),
    "endless window to the left": (
        fa.Window(2**31 - 1, 0),
        lambda i, j, t, s: j <= i,
    ),
    "endless window to the right": (
        fa.Window(3, 2**31 - 1),
        lambda i, j, t, s: i - j <= 3,
    ),
    "query length": (fa.Lengths(q=4), lambda i, j, t, s: (i < 4) & (j >= 0)),
    "key length": (fa.Lengths(kv=5), lambda i, j, t, s: (j < 5) & (i >= 0)),
    "lengths": (fa.Lengths(4, 5), lambda i, j, t, s: (i < 4) & (j < 5)),
    "no lengths": (fa.Lengths(), lambda i, j, t, s: (i >= 0) & (j >= 0)),
    "prefix": (fa.Prefix(3), lambda i, j, t, s: (j < 3) & (i >= 0)),
    "chunks": (fa.Chunked(4), lambda i, j, t, s: i // 4 == j // 4),
}


@pytest.mark.parametrize("q_len, kv_len", [(9, 14), (14, 9), (1, 7)])
@pytest.mark.parametrize("name", POSITIONAL)
def test_masks_of_positions(name, q_len, kv_len):
    mask, define = POSITIONAL[name]
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    check(mask, define(i, j, q_len, kv_len))


@pytest.mark.parametrize("name", ["causal", "window", "chunks", "key length", "prefix"])
def test_masks_read_explicit_positions(name):
    mask, define = POSITIONAL[name]
    q_index, k_index = integers(30, B, T), integers(30, S, seed=1)
    expected = define(column(q_index), k_index[None], T, S)
    check(mask, expected, q_positions=q_index, kv_positions=k_index)
    check(mask, define(column(q_index), J, T, S), q_positions=q_index)
    check(mask, define(I, k_index[None], T, S), kv_positions=k_index)


IDS, KV_IDS = integers(3, B, T), integers(3, B, S, seed=1)
SQUARE = integers(3, B, S, seed=2)
Q_LENGTHS, KV_LENGTHS = np.array([9, 4], np.int32), np.array([0, 11], np.int32)
PAIRS = integers(2, B, N, T, S, seed=3).astype(bool)

WITH_DATA = {
    "segments": (fa.Segments(SQUARE), column(SQUARE) == row(SQUARE)),
    "segments of both sides": (fa.Segments(IDS, KV_IDS), column(IDS) == row(KV_IDS)),
    "shared segments": (fa.Segments(IDS[0], kv_ids=KV_IDS), IDS[0][:, None] == row(KV_IDS)),
    "documents": (fa.Documents(IDS), column(IDS) <= J),
    "documents with ends": (
        fa.Documents(IDS, IDS[0] + 4),
        (column(IDS) <= J) & ((IDS[0] + 4)[:, None] > J),
    ),
    "query lengths": (fa.Lengths(q=Q_LENGTHS), (column(Q_LENGTHS) > I) & (J >= 0)),
    "key lengths": (fa.Lengths(kv=KV_LENGTHS), (row(KV_LENGTHS) > J) & (I >= 0)),
    "lengths": (fa.Lengths(Q_LENGTHS, KV_LENGTHS), (column(Q_LENGTHS) > I) & (row(KV_LENGTHS) > J)),
    "one length": (fa.Lengths(5, jnp.int32(6)), (I < 5) & (J < 6)),
    "prefixes": (fa.Prefix(KV_LENGTHS), (row(KV_LENGTHS) > J) & (I >= 0)),
    "array window": (fa.Window(np.int32(2), jnp.int32(5)), (I - J <= 2) & (J - I <= 5)),
    "symmetric array window": (fa.Window(jnp.int32(2)), abs(I - J) <= 2),
    "dense": (fa.Dense(PAIRS), PAIRS),
    "dense of one head": (fa.Dense(PAIRS[:, :1]), PAIRS[:, :1]),
    "dense of one row": (fa.Dense(PAIRS[:, :, :1]), PAIRS[:, :, :1].repeat(T, 2)),
    "dense of one column": (fa.Dense(PAIRS[..., :1]), PAIRS[..., :1].repeat(S, 3)),
    "dense without batch": (fa.Dense(PAIRS[0]), PAIRS[0]),
    "dense of pairs alone": (fa.Dense(PAIRS[0, 0]), PAIRS[0, 0]),
    "array": (PAIRS, PAIRS),
    "jax array": (jnp.asarray(PAIRS), PAIRS),
    "function": (lambda q, k: q.index + k.index > 8, I + J > 8),
    "function of a context": (
        lambda q, k, c: q.index > k.length - q.length,
        np.where(J < 0, 0, I) > 5,
    ),
}


@pytest.mark.parametrize("name", WITH_DATA)
def test_masks_of_data(name):
    mask, expected = WITH_DATA[name]
    check(mask, expected)


@fa.mask_fn
def of_all_kinds(q, k, c):
    return (q.both + k.both + q.own * k.own > c.head + c.param[1]) ^ c.pair


CAUSAL, SEGMENTS = J <= I, column(IDS) == row(KV_IDS)
A, C = fa.Causal(), fa.Segments(IDS, KV_IDS)

COMPOSED = {
    "and": (A & C, CAUSAL & SEGMENTS),
    "or": (A | C, CAUSAL | SEGMENTS),
    "not": (~A, ~CAUSAL),
    "not of data": (~C, ~SEGMENTS),
    "nested": (~(A & ~C) | (fa.Prefix(2) & A), ~(CAUSAL & ~SEGMENTS) | ((J < 2) & CAUSAL)),
    "precedence": (A & C | fa.Prefix(2), (CAUSAL & SEGMENTS) | (J < 2)),
    "chain": (A & C & fa.Window(4) & ~fa.Window(1), CAUSAL & SEGMENTS & (I - J <= 4) & (I - J > 1)),
    "with a function": (A & (lambda q, k: k.index > 1), CAUSAL & (J > 1)),
    "with an array": (C | PAIRS, SEGMENTS | PAIRS),
    "with a function first": ((lambda q, k: k.index > 1) & A, CAUSAL & (J > 1)),
    "with an array first": (PAIRS | C, SEGMENTS | PAIRS),
    "with a jax array first": (jnp.asarray(PAIRS) & C, SEGMENTS & PAIRS),
    "of two sides": (C & fa.Dense(PAIRS) | fa.Lengths(kv=KV_LENGTHS),
                     SEGMENTS & PAIRS | (row(KV_LENGTHS) > J)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
def test_masks_compose(name):
    check(*COMPOSED[name])


@pytest.mark.parametrize(
    "use", [lambda: A and C, lambda: A or C, lambda: not A, lambda: 1 if A & C else 0]
)
def test_a_mask_has_no_truth_value(use):
    with pytest.raises(TypeError, match=r"no truth value; combine masks with &, \| and ~"):
        use()


def test_a_mask_is_printed_with_its_code_and_the_shapes_of_its_data():
    assert repr(fa.Causal() & ~fa.Window(3)) == "(Causal() & ~Window(left=3, right=3))"
    assert repr(C | A) == "(Segments(ids=int32[2,9], kv_ids=int32[2,14]) | Causal())"


def test_attention_is_over_the_visible_keys():
    """With equal scores all visible keys have the same weight, which one-hot values show."""
    q, k = jnp.zeros((B, T, N, 8)), jnp.zeros((B, S, N, 8))
    v = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, N, S))
    out = fa.flash_attention(q, k, v, mask=A & C | fa.Prefix(1))
    visible = np.broadcast_to(CAUSAL & SEGMENTS | (J < 1), (B, N, T, S))
    expected = visible / np.sum(visible, -1, keepdims=True)
    chex.assert_trees_all_close(out, np.moveaxis(expected, 1, 2).astype(np.float32), atol=1e-6)


ALL = {
    **{name: mask for name, (mask, _) in (POSITIONAL | COMPOSED).items()},
    **{name: mask for name, (mask, _) in WITH_DATA.items() if isinstance(mask, fa.Mask)},
    "of a function": fa.mask_fn(lambda q, k, c: q.x + k.x > c.p)(
        tokens={"x": integers(5, 1)}, params={"p": jnp.int32(3)}
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_flatten_and_unflatten_are_inverse(name):
    leaves, tree = jax.tree.flatten(ALL[name])
    back = jax.tree.unflatten(tree, leaves)
    assert jax.tree.structure(back) == tree
    assert repr(back) == repr(ALL[name])
    assert all(x is y for x, y in zip(jax.tree.leaves(back), leaves, strict=True))


@pytest.mark.parametrize("leaf", [0, None, "x", object()], ids=["0", "None", "x", "object"])
@pytest.mark.parametrize("mask", [C, A & C, fa.Window(jnp.int32(2), 3)], ids=repr)
def test_the_tree_does_not_depend_on_its_leaves(mask, leaf):
    """JAX flattens trees of axes, shardings and placeholders as it does trees of arrays."""
    tree = jax.tree.structure(mask)
    of_other = jax.tree.unflatten(tree, [leaf] * tree.num_leaves)
    assert tree.flatten_up_to(of_other) == [leaf] * tree.num_leaves


@pytest.mark.parametrize("name", ["segments of both sides", "lengths", "array window", "dense"])
def test_a_mask_is_an_argument_of_jit(name):
    mask, expected = WITH_DATA[name]
    actual = jax.jit(dense)(mask)
    np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


def test_no_retrace_while_only_the_data_change():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def visible(mask):
        return dense(mask)

    for seed in range(3):
        ids = integers(3, B, S, seed=seed)
        window = np.int32(seed)
        actual = visible(fa.Segments(ids[:, :T], ids) & (A | fa.Window(window)))
        expected = (column(ids[:, :T]) == row(ids)) & ((J <= I) | (abs(I - J) <= window))
        np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


def test_a_new_python_number_is_a_new_mask_under_jit():
    visible = jax.jit(dense)
    for left in (1, 2):
        actual = visible(fa.Window(left))
        np.testing.assert_array_equal(actual, np.broadcast_to(abs(I - J) <= left, actual.shape))


def test_vmap_over_the_data_of_a_mask():
    ids = integers(3, 3, B, T), integers(3, 3, B, S, seed=1)
    lengths = integers(S, 3, B, seed=2)
    mask = fa.Segments(*ids) & A | fa.Lengths(kv=lengths)
    actual = jax.vmap(dense)(mask)
    for n in range(3):
        segments = column(ids[0][n]) == row(ids[1][n])
        expected = segments & CAUSAL | (row(lengths[n]) > J)
        np.testing.assert_array_equal(actual[n], np.broadcast_to(expected, actual[n].shape))


def test_vmap_over_some_of_the_data_of_a_mask():
    ids, lengths = (IDS, KV_IDS), integers(S, 3, B, seed=2)
    mask = fa.Segments(*ids) & fa.Lengths(kv=lengths)
    axes = jax.tree.map(lambda x: 0 if x is lengths else None, mask)
    actual = jax.vmap(dense, in_axes=(axes,))(mask)
    for n in range(3):
        expected = SEGMENTS & (row(lengths[n]) > J)
        np.testing.assert_array_equal(actual[n], np.broadcast_to(expected, actual[n].shape))


def test_a_window_for_each_layer_in_a_scan():
    windows = jnp.array([0, 3, 20], jnp.int32)
    _, actual = jax.lax.scan(lambda c, left: (c, dense(fa.Window(left, 0))), 0, windows)
    for n, left in enumerate((0, 3, 20)):
        expected = (J <= I) & (I - J <= left)
        np.testing.assert_array_equal(actual[n], np.broadcast_to(expected, actual[n].shape))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fa.Chunked(0), r"Chunked\.size must be .*1 to 2\^31 - 1, but it is 0; "),
        (lambda: fa.Chunked(-3), r"Chunked\.size must .* but it is -3; "),
        (lambda: fa.Window(2**31), r"Window\.left must .*-2\^31 to 2\^31 - 1, .* 2147483648; "),
        (lambda: fa.Window(1, -(2**40)), r"Window\.right must .* but it is -1099511627776; "),
        (
            lambda: fa.Window(-2, 0),
            r"Window\.left must be .*-1 or None for all of them, but it is -2; ",
        ),
        (lambda: fa.Window(0, -3), r"Window\.right must be .* but it is -3; "),
        (lambda: fa.Window(np.int64(-2), 0), r"Window\.left must be .* but it is -2; "),
        (lambda: fa.SlidingWindow(np.int64(0)), r"SlidingWindow\.size must .* but it is 0; "),
        (lambda: fa.SlidingWindow(0), r"SlidingWindow\.size must .* 1 to 2\^31 - 1, but it is 0; "),
        (lambda: fa.Lengths(q=10**10), r"Lengths\.q must .* but it is 10000000000; "),
        (lambda: fa.Lengths(kv=10**10), r"Lengths\.kv must .* but it is 10000000000; "),
        (lambda: fa.Prefix(10**10), r"Prefix\.length must .* but it is 10000000000; "),
    ],
)
def test_integers_beyond_int32_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make, field",
    [
        (lambda: fa.SlidingWindow(None), "SlidingWindow.size"),
        (lambda: fa.SlidingWindow(2.5), "SlidingWindow.size"),
        (lambda: fa.Chunked("4"), "Chunked.size"),
        (lambda: fa.Window(1.5), "Window.left"),
    ],
)
def test_non_integers_are_errors(make, field):
    with pytest.raises(TypeError, match=f"{field} must be an integer or an array of integers, but"):
        make()


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: fa.Documents.from_cu_seqlens([3, 6, 16], 16), ValueError),
        (lambda: fa.Documents.from_cu_seqlens([0, 6, 5], 16), ValueError),
        (lambda: fa.Documents.from_cu_seqlens([0, 6, 20], 16), ValueError),
        (lambda: fa.Documents.from_cu_seqlens([0.0, 6.0], 16), TypeError),
        (lambda: fa.Documents.from_lengths([6, 11], 16), ValueError),
        (lambda: fa.Documents.from_lengths([-1, 11], 16), ValueError),
        (lambda: fa.Documents.from_lengths([1.0], 16), TypeError),
        (lambda: fa.Documents.from_positions([0.0, 1.0]), TypeError),
    ],
)
def test_documents_longer_than_their_row_are_errors(make, error):
    with pytest.raises(
        error, match=r"^Documents\.from_\w+: (cu_seqlens|lengths|positions) must .*; "
    ):
        make()


@pytest.mark.parametrize(
    "mask",
    [
        fa.Segments(np.arange(T) + 2**33, np.arange(S)),
        fa.mask_fn(lambda q, k: q.x == k.index)(q_tokens={"x": np.arange(T, dtype=np.int64) << 30}),
    ],
    ids=["segments", "function"],
)
def test_arrays_beyond_int32_are_errors(mask):
    """JAX would cut their upper bits off, and documents 2^32 apart would be one."""
    with pytest.raises(ValueError, match=r"must hold integers that fit int32.*; renumber"):
        dense(mask)


def test_int64_arrays_within_int32_are_supported():
    check(fa.Segments(IDS.astype(np.int64), KV_IDS.astype(np.int64)), SEGMENTS)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.uint32, np.int64])
def test_lengths_and_windows_may_be_any_integers(dtype):
    """A position is compared with the largest that there is where they are larger still."""
    most = np.iinfo(dtype).max
    check(
        fa.Lengths(kv=np.array([most, 3], dtype)),
        np.where(J < np.array([most, 3]).reshape(2, 1, 1, 1), I >= 0, False),
    )
    check(fa.Prefix(dtype(4)), (J < 4) & (I >= 0))
    check(fa.Window(dtype(most), dtype(2)), J - I <= 2)
    check(
        fa.Window(jnp.asarray(3, dtype if most < 2**32 else None), 2), (I - J <= 3) & (J - I <= 2)
    )


FLOATS = np.ones((T, S), np.float32)


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: FLOATS,
            r"mask must be boolean, but it has dtype float32; pass mask\.astype\(bool",
        ),
        (lambda: A & FLOATS, r"mask must be boolean, but it has dtype float32"),
        (lambda: fa.Dense(FLOATS), r"Dense\(array=float32\[9,14\]\) must return a boolean"),
        (lambda: lambda q, k: q.index - k.index, r"must return a boolean .* returns int32\[\]"),
        (lambda: "causal", r"mask must be a mask object, a function .* but it is str"),
        (lambda: FLOATS & A, r"mask must be boolean, but it has dtype float32"),
        (lambda: True & A, r"mask must be a mask object, a function .* but it is bool"),
        (lambda: A & fa.soft_cap(2.0), r"mask must be a mask .* it is Score; .*score="),
        (lambda: A | None, r"mask must be a mask object, a function .* but it is NoneType"),
    ],
)
def test_masks_that_are_not_boolean_are_errors(make, message):
    with pytest.raises(TypeError, match=message):
        dense(make())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: fa.Causal, r"but it is the class Causal; write Causal\(\)"),
        (lambda: fa.Causal & A, r"but it is the class Causal; write Causal\(\)"),
        (lambda: fa.Window((4, 0)), r"Window\.left must be one number .* write Window\(4, 0\)"),
        (
            lambda: fa.Chunked(jnp.int32(4)),  # pyright: ignore[reportArgumentType]
            r"Chunked\.size must be an integer, but it is int32\[\]; .* mask_fn\(",
        ),
        (
            lambda: fa.Documents(IDS, longest=jnp.int32(4)),  # pyright: ignore[reportArgumentType]
            r"Documents\.longest must be an integer, but it is int32\[\]; leave it out",
        ),
        (
            lambda: lambda b, h, q, k: q.index >= k.index,
            r"must take \(q, k\) or \(q, k, c\), but <lambda> takes \(b, h, q, k\); .*heads=",
        ),
    ],
    ids=["class", "joined class", "tuple", "array", "longest", "function"],
)
def test_common_mistakes_are_errors_with_a_remedy(make, message):
    with pytest.raises(TypeError, match=message):
        dense(make())


@pytest.mark.parametrize(
    "mask, expected",
    [
        (fa.Chunked(np.int64(4)), fa.Chunked(4)),
        (fa.Lengths(kv=[3, 14]), fa.Lengths(kv=np.array([3, 14]))),
        (fa.Prefix([3, 5]), fa.Prefix(np.array([3, 5]))),
        (fa.Segments(IDS.tolist(), KV_IDS.tolist()), fa.Segments(IDS, KV_IDS)),
        (fa.Documents(IDS.tolist(), IDS.tolist()), fa.Documents(IDS, IDS)),
        (fa.Dense(np.asarray(PAIRS).tolist()), fa.Dense(PAIRS)),
    ],
    ids=["chunked", "lengths", "prefix", "segments", "documents", "dense"],
)
def test_lists_are_arrays_and_numpy_integers_may_be_static(mask, expected):
    chex.assert_trees_all_equal(dense(mask), dense(expected))
    assert [np.shape(x) for x in jax.tree.leaves(mask)] == [
        np.shape(x) for x in jax.tree.leaves(expected)
    ]


@pytest.mark.parametrize(
    "mask, message",
    [
        (fa.Segments(KV_IDS, KV_IDS), r"Segments\(.*q_tokens\['segment'\] .* T = 9 .*\(2, 14\)"),
        (fa.Documents(KV_IDS), r"Documents\(.*q_tokens\['start'\] .* T = 9 .*\(2, 14\)"),
        (fa.Segments(IDS), r"Segments\(.*k_tokens\['segment'\] .* S = 14 .*\(2, 9\)"),
        (fa.Lengths(kv=integers(3, 3)), r"Lengths\(.*entries\['kv'\] .* \(2,\).*\(3,\)"),
        (A & fa.Dense(PAIRS[..., 1:]), r"^mask must have .* S = 14.*\(2, 4, 9, 13\)"),
        (of_all_kinds(heads={"head": integers(3, K)}), r"heads\['head'\] .* N = 4 .*\(2,\)"),
    ],
    ids=["queries", "starts", "keys", "lengths", "pairs", "heads"],
)
def test_data_of_a_wrong_shape_are_named(mask, message):
    with pytest.raises(ValueError, match=message):
        dense(mask)


def test_causal_with_arguments_is_an_error_that_names_align():
    with pytest.raises(TypeError, match=r"Causal must be made without arguments, .*align=\"end\""):
        fa.Causal("end")
    with pytest.raises(TypeError, match="without arguments"):
        fa.Causal(align="start")


STARTS = np.array([0, 0, 2, 2, 2, 5, 5, 5, 5])
SAME_DOCUMENT = STARTS[:, None] == STARTS


@pytest.mark.parametrize(
    "documents",
    [
        lambda: fa.Documents.from_lengths([2, 3, 4], 9),
        lambda: fa.Documents.from_lengths([2, 0, 3], 9),  # what follows is one of its own
        lambda: fa.Documents.from_cu_seqlens(jnp.array([0, 2, 5, 9]), 9),
        lambda: fa.Documents.from_cu_seqlens([0, 2, 2, 5, 9, 9], 9, longest=4),
        lambda: fa.Documents.from_positions([0, 1, 0, 1, 2, 0, 1, 2, 3]),
        lambda: fa.Segments(STARTS),
    ],
)
def test_documents_from_lengths_limits_and_positions(documents):
    np.testing.assert_array_equal(documents().dense(9)[0], SAME_DOCUMENT)
    np.testing.assert_array_equal(
        (fa.Causal() & documents()).dense(9)[0], SAME_DOCUMENT & np.tri(9, dtype=bool)
    )


def test_longest_limits_the_distance_of_keys():
    starts, distance = np.zeros(9, np.int32), np.abs(np.subtract.outer(range(9), range(9)))
    for longest in (1, 3, 9):
        mask_array = fa.Documents(starts, longest=longest).dense(9)[0]
        np.testing.assert_array_equal(mask_array, distance < longest)


def test_documents_of_each_batch_entry_also_under_jit():
    def dense(make, data):
        return jax.jit(lambda data: make(data).dense(9, batch=(2,)))(data)[:, 0]

    expected = np.stack([SAME_DOCUMENT, np.ones((9, 9), bool)])
    lengths = jnp.array([[2, 3, 4], [9, 0, 0]])
    np.testing.assert_array_equal(
        dense(lambda n: fa.Documents.from_lengths(n, 9), lengths), expected
    )
    positions = jnp.array([[0, 1, 0, 1, 2, 0, 1, 2, 3], range(9)])
    np.testing.assert_array_equal(dense(fa.Documents.from_positions, positions), expected)


def test_padding_of_segments_is_masked():
    ids = np.array([4, 4, -1, 7, -1])
    for padding in (-1, 4, 7):
        expected = (ids[:, None] == ids) & (ids != padding)
        np.testing.assert_array_equal(fa.Segments(ids, padding=padding).dense(5)[0], expected)
    np.testing.assert_array_equal(fa.Segments(ids).dense(5)[0], ids[:, None] == ids)


def test_data_of_batch_entries():
    mask = fa.mask_fn(lambda q, k, c: k.index < c.limit)(entries={"limit": jnp.array([1, 4])})
    mask_array = mask.dense(3, 5, batch=(2,))
    np.testing.assert_array_equal(mask_array[:, 0, 0], [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])


def test_an_ambiguous_array_of_three_axes_is_an_error():
    both = fa.Dense(np.ones((4, 2, 3), bool))
    with pytest.raises(
        ValueError, match=r"^mask must say .*\[\*B, T, S\] .* or \[N, T, S\] with N = 4"
    ):
        both.dense(2, 3, batch=(4,), heads=4)
    assert both.dense(2, 3, batch=(2,), heads=4).shape == (2, 4, 2, 3)
    assert fa.Dense(np.ones((4, 1, 2, 3), bool)).dense(2, 3, batch=(4,), heads=4).all()


@pytest.mark.parametrize(
    "make",
    [lambda n: fa.Lengths(kv=n), lambda n: fa.Lengths(q=n), fa.Prefix],
    ids=["kv", "q", "prefix"],
)
def test_numbers_that_are_data_do_not_recompile(make):
    x = jnp.ones((1, 4, 1, 8))
    assert len({parse_call(x, x, x, mask=make(n))[0] for n in (1, 2, np.int64(3))}) == 1
