"""Coverage by a mask's code: it must never be claimed where it does not hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_fa2 as fa
from pallas_fa2.ir.coverage import batch_entries_without_self_attention, mask_covers_every_token
from pallas_fa2.parse_call import parse_call
from tests.support.masks import causal_end

IDS = jnp.zeros((2, 24), jnp.int32)


@fa.mask_fn
def image_text(q, k):
    return (q.index >= k.index) | ((q.image == k.image) & (q.image >= 0))


def says(mask, kv_len=24, **options):
    q = jax.ShapeDtypeStruct((2, 24, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, kv_len, 4, 64), jnp.bfloat16)
    return mask_covers_every_token(parse_call(q, k, k, mask=mask, **options)[0])


@pytest.mark.parametrize(
    "mask",
    [
        fa.Causal(),
        causal_end & fa.Window(3),
        fa.Causal() & fa.Segments(IDS),
        fa.Causal() & fa.Documents(IDS),
        fa.Documents(IDS, IDS, longest=1),
        fa.mask_fn(lambda q, k: k.index <= lax.max(q.index, q.a))(tokens={"a": IDS}),
        fa.Prefix(10) | fa.Causal(),
        fa.Chunked(5),
        image_text(tokens={"image": IDS}),
        fa.mask_fn(lambda q, k: abs(q.index - k.index) % 3 == 0),
        fa.mask_fn(lambda q, k: (q.index + 0 == k.index - 0) & (q.index // 3 <= k.index // 3)),
        fa.mask_fn(lambda q, k: q.index & k.index == k.index),  # tried
    ],
    ids=str,
)
def test_every_token_attends_to_itself(mask):
    assert says(mask)


@pytest.mark.parametrize(
    "mask", [fa.Segments(IDS, IDS), image_text(tokens={"image": IDS})], ids=["segments", "tokens"]
)
def test_every_token_attends_to_itself_with_a_mask_as_argument_of_jit(mask):
    proved = []
    jax.jit(lambda mask: proved.append(says(mask)))(mask)
    assert proved == [True]


@pytest.mark.parametrize(
    "mask",
    [
        ~fa.Causal(),
        fa.Lengths(jnp.array([3, 5])),
        fa.Segments(IDS, IDS + 1),
        fa.mask_fn(lambda q, k: k.index >= lax.max(q.index, q.a))(tokens={"a": IDS}),
        fa.mask_fn(lambda q, k: k.index > lax.min(q.index, q.a))(tokens={"a": IDS}),
        fa.mask_fn(lambda q, k: k.index >= q.a)(tokens={"a": IDS}),
        fa.Window(jnp.int32(5)),
        fa.Causal() & fa.Prefix(3),
        fa.mask_fn(lambda q, k: q.index - k.index > 0),
        fa.mask_fn(lambda q, k: lax.fori_loop(0, 3, lambda i, x: x - 1, q.index - k.index) >= -1),
        fa.mask_fn(lambda q, k: q.a == k.a)(tokens={"a": np.full(24, np.nan, np.float32)}),
    ],
    ids=str,
)
def test_masks_that_may_not_cover_every_token(mask):
    assert not says(mask)


def test_different_lengths_and_explicit_positions_are_different_tokens():
    assert not says(fa.Window(3), kv_len=30)
    assert not says(fa.Window(3), q_positions=jnp.arange(24) + 5)


@pytest.mark.parametrize("kv_len", [7, 60])
def test_different_lengths_are_covered_by_witnesses(kv_len):
    shift = kv_len - 24
    seen = fa.mask_fn(lambda q, k: q.index + shift >= k.index)
    assert says(seen, kv_len) == (kv_len > 24)  # the first queries would be without a key
    assert says(fa.mask_fn(lambda q, k: (q.index + k.index) >= 0), kv_len)
    assert says(fa.mask_fn(lambda q, k: q.index >= k.index), kv_len) == (kv_len < 24)
    near = fa.mask_fn(lambda q, k: q.index + shift - k.index <= 3)
    assert says(near, kv_len) == (kv_len < 24)
    assert not says(fa.Segments(IDS, jnp.zeros((2, kv_len), jnp.int32)), kv_len)


def in_doubt(mask, kv_len=24, **options):
    q = jax.ShapeDtypeStruct((2, 24, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, kv_len, 2, 64), jnp.bfloat16)
    proved = jax.jit(
        lambda mask: batch_entries_without_self_attention(
            *parse_call(q, k, k, mask=mask, **options)
        )
    )
    return np.asarray(proved(mask)).tolist()


reach = fa.mask_fn(lambda q, k, c: q.index - k.index <= c.reach)
tree = fa.mask_fn(lambda q, k: (k.index <= q.index) & (q.index < k.end))
keep = fa.mask_fn(lambda q, k, c: c.keep)
FIRST_OF_TWO = jnp.array([[[[True]]], [[[False]]]])


@pytest.mark.parametrize(
    "mask, expected",
    [
        (fa.Causal() & reach(heads={"reach": jnp.array([0, 3, 1, 2])}), [0, 0]),
        (fa.Causal() & reach(heads={"reach": jnp.array([0, 3, -1, 2])}), [1, 1]),
        (tree(tokens={"end": jnp.arange(24) + 1}), [0, 0]),
        (tree(tokens={"end": jnp.arange(24).at[:23].add(1)}), [1, 1]),
        (fa.Lengths(jnp.array([24, 23])), [0, 1]),
        (fa.Segments(IDS, IDS.at[1, 5].set(1)), [0, 1]),
        (keep(pairs={"keep": FIRST_OF_TWO & jnp.ones((2, 1, 1, 24), bool)}), [0, 1]),
        (keep(pairs={"keep": FIRST_OF_TWO & jnp.ones((2, 1, 24, 1), bool)}), [0, 1]),
        (keep(pairs={"keep": FIRST_OF_TWO}), [0, 1]),
        (fa.Dense(jnp.ones((24, 24), bool)), [1, 1]),  # not looked at
    ],
    ids=str,
)
def test_data_show_whether_every_token_attends_to_itself(mask, expected):
    assert in_doubt(mask) == expected


def test_tokens_at_different_positions_may_be_unattended():
    there = jnp.arange(24)
    assert in_doubt(fa.Window(3), kv_len=30) == [1, 1]
    assert in_doubt(fa.Window(3), q_positions=there, kv_positions=there) == [0, 0]
    shifted = jnp.stack([there + 3, there + 4])
    assert in_doubt(fa.Window(3), q_positions=shifted, kv_positions=there) == [0, 1]
