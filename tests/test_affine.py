"""Code that is a causal mask's is known to be one, and no other code is."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_fa2 as fa
from pallas_fa2.ir.affine import distance_range
from pallas_fa2.parse_call import parse_call
from tests.support.masks import causal_end

T, S = 24, 40
IDS = jnp.zeros((2, T), jnp.int32)


def aligned(mask, q_len=T, kv_len=T, **options):
    q = jax.ShapeDtypeStruct((2, q_len, 4, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((2, kv_len, 4, 64), jnp.bfloat16)
    return parse_call(q, k, k, mask=mask, **options)[0].causal


CAUSAL = {
    "ready-made": fa.Causal(),
    "ge": lambda q, k: q.index >= k.index,
    "le": lambda q, k: k.index <= q.index,
    "gt": lambda q, k: q.index + 1 > k.index,
    "lt": lambda q, k: k.index - 1 < q.index,
    "not": lambda q, k: ~(q.index < k.index),
    "difference": lambda q, k: q.index - k.index >= 0,
    "minus": lambda q, k: -q.index <= -k.index,
    "jnp": lambda q, k: jnp.greater_equal(q.index, k.index),
    "of both the narrower": fa.Causal() & fa.mask_fn(lambda q, k: k.index <= q.index + 3),
    "of both the wider": fa.Causal() | fa.mask_fn(lambda q, k: q.index > k.index),
    "called": lambda q, k: jax.jit(lambda x, y: x >= y)(q.index, k.index),
    "with data that it does not read": fa.mask_fn(lambda q, k: q.index >= k.index)(
        tokens={"tag": IDS}
    ),
}
OTHER = {
    "none": None,
    "strict": lambda q, k: q.index > k.index,
    "transposed": lambda q, k: q.index <= k.index,
    "complement": ~fa.Causal(),
    "window": fa.Causal() & fa.Window(3),
    "prefix": fa.Causal() | fa.Prefix(3),
    "sum": lambda q, k: q.index + k.index >= 0,
    "twice": lambda q, k: q.index + q.index >= k.index + k.index,
    "equal": lambda q, k: q.index == k.index,
    "blocks": lambda q, k: q.index // 4 >= k.index // 4,
    "unsigned": lambda q, k: q.index.astype(jnp.uint32) >= k.index.astype(jnp.uint32),
    "wraps": lambda q, k: q.index + (2**31 - 1) >= k.index,
    "cast": lambda q, k: (q.index - k.index).astype(jnp.int16) >= 0,
    "number as a boolean": lambda q, k: (q.index - k.index).astype(bool),
    "data": fa.mask_fn(lambda q, k: q.tag >= k.tag)(tokens={"tag": IDS}),
    "segments": fa.Causal() & fa.Segments(IDS),
    "loop": lambda q, k: lax.fori_loop(0, 2, lambda i, x: x + i, q.index) >= k.index,
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_code_is_recognized(name):
    assert aligned(CAUSAL[name]) == "start"


@pytest.mark.parametrize("name", OTHER)
def test_other_code_is_not_recognized(name):
    assert aligned(OTHER[name]) is None


def test_the_alignment_is_recognized():
    def last(q, k):
        return q.index + (k.length - q.length) >= k.index

    assert aligned(fa.Causal(), T, S) == aligned(CAUSAL["ge"], T, S) == "start"
    assert aligned(causal_end, T, S) == aligned(last, T, S) == "end"
    assert aligned(last, S, T) == "end"
    assert aligned(lambda q, k: q.index + 3 >= k.index, T, S) is None


def test_explicit_positions_are_not_causal():
    assert aligned(fa.Causal(), q_positions=jnp.arange(T), kv_positions=jnp.arange(T)) is None


@pytest.mark.parametrize("compare", [operator.ge, operator.gt, operator.le, operator.lt])
@pytest.mark.parametrize("q_len, kv_len", [(5, 5), (5, 7), (7, 5)])
def test_recognition_equals_the_dense_definition(compare, q_len, kv_len):
    rows, columns = np.arange(q_len)[:, None], np.arange(kv_len)
    aligns = {"start": rows >= columns, "end": rows + kv_len - q_len >= columns, None: None}
    for shift in range(-3, 4):
        forms = (
            lambda i, j, n=shift: compare(i + n, j),
            lambda i, j, n=shift: compare(j, i - n),
            lambda i, j, n=shift: ~compare(j - n, i),
        )
        for form in forms:
            visible = form(rows, columns)
            alignment = aligned(lambda q, k, form=form: form(q.index, k.index), q_len, kv_len)
            same = [name for name, x in aligns.items() if name and np.array_equal(visible, x)]
            assert alignment in same if same else alignment is None


def same_token(q, k):
    return q.index == k.index


@pytest.mark.parametrize(
    "mask, distances",
    [
        (fa.Causal(), (None, 0)),
        (fa.Window(3), (-3, 3)),
        (fa.Window(None, 2), (None, 2)),
        (fa.Window(-1), (None, None)),
        (fa.SlidingWindow(4), (-3, 0)),
        (fa.Causal() & fa.Window(5) & fa.Window(3, None), (-3, 0)),
        (~fa.Causal(), (1, None)),
        (~fa.Window(3), None),
        (fa.Causal() | ~fa.Causal(), None),
        (fa.Window(3) | fa.Window(2), None),
        (fa.Causal() & fa.Prefix(3), None),
        (fa.Window(jnp.int32(3)), None),
        (same_token, None),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_the_range_of_distances_is_that_of_the_code(mask, distances):
    q = jax.ShapeDtypeStruct((2, T, 4, 64), jnp.bfloat16)
    code = parse_call(q, q, q, mask=mask)[0].mask
    assert code is not None
    assert distance_range(code) == distances
