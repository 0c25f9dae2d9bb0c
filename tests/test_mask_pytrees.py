"""Masks as pytrees: arguments of jit, vmap and scan."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.parse_call import parse_call
from tests.support.masks import (
    CAUSAL,
    COMPOSED,
    IDS,
    KV_IDS,
    POSITIONAL,
    SEGMENTS,
    WITH_DATA,
    A,
    B,
    C,
    I,
    J,
    S,
    T,
    column,
    dense,
    integers,
    row,
)

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
    "make",
    [lambda n: fa.Lengths(kv=n), lambda n: fa.Lengths(q=n), fa.Prefix],
    ids=["kv", "q", "prefix"],
)
def test_numbers_that_are_data_do_not_recompile(make):
    x = jnp.ones((1, 4, 1, 8))
    assert len({parse_call(x, x, x, mask=make(n))[0] for n in (1, 2, np.int64(3))}) == 1
