"""Checks of the fields of masks: errors that name the field, and numbers and arrays of any kind."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from tests.support.masks import (
    IDS,
    KV_IDS,
    PAIRS,
    SEGMENTS,
    A,
    I,
    J,
    K,
    S,
    T,
    check,
    dense,
    integers,
    of_all_kinds,
)


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
        (
            lambda: (fa.Causal(), fa.SlidingWindow(3)),
            r"mask must be a mask .*it is tuple; combine masks with &, as in Causal\(\) & Sliding",
        ),
    ],
    ids=["class", "joined class", "tuple", "array", "longest", "function", "tuple of masks"],
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


def test_dense_names_the_batch_that_data_need():
    mask = fa.Causal() & fa.Segments(IDS)
    with pytest.raises(
        ValueError, match=r"batch= \(= \(\)\) and heads= \(= 1\) of dense.* batch=\(B"
    ):
        mask.dense(9)
    assert mask.dense(9, batch=(2,)).shape == (2, 1, 9, 9)


def test_causal_with_arguments_is_an_error_that_names_align():
    with pytest.raises(TypeError, match=r"Causal must be made without arguments, .*align=\"end\""):
        fa.Causal("end")
    with pytest.raises(TypeError, match="without arguments"):
        fa.Causal(align="start")


def test_an_ambiguous_array_of_three_axes_is_an_error():
    both = fa.Dense(np.ones((4, 2, 3), bool))
    with pytest.raises(
        ValueError, match=r"^mask must say .*\[\*B, T, S\] .* or \[N, T, S\] with N = 4"
    ):
        both.dense(2, 3, batch=(4,), heads=4)
    assert both.dense(2, 3, batch=(2,), heads=4).shape == (2, 4, 2, 3)
    assert fa.Dense(np.ones((4, 1, 2, 3), bool)).dense(2, 3, batch=(4,), heads=4).all()
