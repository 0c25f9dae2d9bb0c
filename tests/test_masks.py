"""Masks against boolean arrays made in NumPy."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from tests.support.masks import (
    CAUSAL,
    COMPOSED,
    POSITIONAL,
    SEGMENTS,
    WITH_DATA,
    A,
    B,
    C,
    I,
    J,
    N,
    S,
    T,
    check,
    column,
    integers,
)


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


@pytest.mark.parametrize("name", WITH_DATA)
def test_masks_of_data(name):
    mask, expected = WITH_DATA[name]
    check(mask, expected)


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
