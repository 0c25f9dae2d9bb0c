"""A user's functions of two tokens as masks: what they may be, and the data that they read."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.parse_call import parse_call
from tests.support.masks import (
    PAIRS,
    B,
    I,
    J,
    N,
    S,
    T,
    check,
    column,
    dense,
    integers,
    of_all_kinds,
    row,
)


def test_a_function_reads_data_of_every_kind():
    q_own, k_own = integers(5, B, T), integers(5, B, S, seed=1)
    head, param = integers(9, N, seed=2), integers(5, 3, seed=3)
    mask = of_all_kinds(
        tokens={"both": np.array([3], np.int32)},
        q_tokens={"own": q_own},
        k_tokens={"own": k_own},
        heads={"head": head},
        params={"param": param},
        pairs={"pair": PAIRS},
    )
    limit = head.reshape(1, N, 1, 1) + param[1]
    check(mask, (6 + column(q_own) * row(k_own) > limit) ^ PAIRS)


def test_one_side_may_override_the_data_of_both():
    x = integers(3, S)
    mask = fa.mask_fn(lambda q, k: q.x == k.x)(tokens={"x": x}, q_tokens={"x": x[:T] + 1})
    check(mask, (x[:T, None] + 1) == x[None])


def test_data_may_be_added_in_steps_to_copies():
    plain = fa.mask_fn(lambda q, k, c: (q.x == k.x) & (k.index < c.n))
    x = integers(3, S)
    half = plain(k_tokens={"x": x}, params={"n": jnp.int32(5)})
    check(half(q_tokens={"x": x[:T]}), (x[:T, None] == x[None]) & (J < 5))
    check(half(q_tokens={"x": x[:T]}, params={"n": jnp.int32(7)}), (x[:T, None] == x) & (J < 7))
    of_both = half(q_tokens={"x": x[:T] + 1})(tokens={"x": x})
    assert of_both.data().q_tokens["x"] is of_both.data().k_tokens["x"]
    with pytest.raises(AttributeError, match="no such token data"):
        dense(plain)


def test_a_float_or_boolean_field_of_a_token():
    x, flag = np.linspace(0, 1, T, dtype=np.float32), integers(2, S).astype(bool)
    mask = fa.mask_fn(lambda q, k: (q.x > 0.5) & k.flag)(q_tokens={"x": x}, k_tokens={"flag": flag})
    check(mask, (x[:, None] > 0.5) & flag[None])


def test_a_parameter_may_be_a_python_number():
    check(fa.mask_fn(lambda q, k, c: k.index < c.n)(params={"n": 3}), (J < 3) & (I >= 0))


class Rule:
    def method(self, q, k):
        return q.index > k.index

    def method_with_context(self, q, k, c):
        return q.index > k.index

    def __call__(self, q, k):
        return q.index > k.index


CALLABLES = {
    "default": lambda q, k, n=0: q.index > k.index + n,
    "default after the context": lambda q, k, c, n=0: q.index > k.index + n,
    "keyword": lambda q, k, *, n=0: q.index > k.index + n,
    "any": lambda *args: args[0].index > args[1].index,
    "partial": functools.partial(lambda n, q, k: q.index > k.index + n, 0),
    "partial by name": functools.partial(lambda q, k, n: q.index > k.index + n, n=0),
    "wrapped": functools.wraps(Rule().method)(lambda *args: Rule().method(*args)),
    "method": Rule().method,
    "method with context": Rule().method_with_context,
    "object": Rule(),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_any_callable_of_two_tokens_is_a_mask(name):
    check(fa.mask_fn(CALLABLES[name]), I > J)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda q, k: q.doc == k.index, r"q\.doc: no such .* \(it has index, length, x\); declare"),
        (lambda q, k: q.doc == k.index, r"declare it with tokens=\{'doc': array\}"),
        (lambda q, k: k.x == q.x, r"k\.x: no such token data \(it has index, length\); declare"),
        (lambda q, k, c: c.table > 0, r"c\.table: no such data \(there is slope\); declare it"),
        (lambda q, k, c: c.table > 0, r"declare it with heads=, params= or pairs="),
    ],
)
def test_errors_about_undeclared_data_list_the_declared(fn, message):
    mask = fa.mask_fn(fn)(q_tokens={"x": integers(3, T)}, heads={"slope": integers(3, N)})
    with pytest.raises(AttributeError, match=message):
        dense(mask)


@pytest.mark.parametrize(
    ("fn", "cure"),
    [
        (lambda q, k: q.index >= k.index and q.index < 9, r"write &, \| and ~"),
        (lambda q, k: (q if q.index > 3 else k).index > 2, r"jnp\.where"),
        (lambda q, k: 0 <= q.index <= 5, "a chain of comparisons"),
        (lambda q, k: q >= k, r"write [qk]\.index for its position"),
        (lambda q, k: q - k < 3, r"write q\.index"),
        (lambda q, k: q == k, r"write q\.index"),
        (lambda q, k: (q.index >= k.index) | (not q), r"write q\.index"),
        (lambda q, k: q**2 > 3, r"write q\.index"),
        (lambda q, k: 1 / q > 3, r"write q\.index"),
        (lambda q, k: jnp.abs(q) > 3, r"write q\.index"),
        (lambda q, k: int(q.index) > 3, r"by int\(\).*\.astype"),
        (lambda q, k: len(range(q.index)) > 3, r"range\(\)"),
        (lambda q, k: np.sqrt(q.index) > 3, r"NumPy"),
        (lambda q, k: None, None),
    ],
)
def test_errors_of_python_in_a_function_name_it_and_the_remedy(fn, cure):
    if cure is None:
        cure, fn_of_score = "must return its result, but it returns None", lambda s, q, k: None
    else:
        fn_of_score = lambda s, q, k: jnp.where(fn(q, k), s, 0)

    def attends(q, k):
        return fn(q, k)

    x = jax.ShapeDtypeStruct((1, 8, 2, 8), jnp.float32)
    with pytest.raises(TypeError, match=f"attends.*{cure}"):
        parse_call(x, x, x, mask=attends)

    def weighs(s, q, k):
        return fn_of_score(s, q, k)

    with pytest.raises(TypeError, match=f"weighs.*{cure}"):
        parse_call(x, x, x, score=weighs)


HOW = [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy, copy.copy]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "make",
    [
        lambda: by_word(tokens={"word": jnp.arange(8)}),
        lambda: halved,
        lambda: by_word(tokens={"word": jnp.arange(8)}) & fa.Causal(),
    ],
    ids=["mask", "score", "pair"],
)
def test_a_decorated_function_can_be_pickled_and_copied(make, how):
    before = make()
    after = how(before)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    jax.tree.map(np.testing.assert_array_equal, after, before)


@fa.mask_fn
def by_word(q, k):
    return q.word == k.word


@fa.score_fn
def halved(s, q, k):
    return s / 2


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "make",
    [
        lambda: fa.Causal() & ~fa.Window(3),
        lambda: fa.Window(jnp.int32(3)) | fa.Prefix(2),
        lambda: fa.Segments(jnp.arange(8)),
        lambda: fa.Documents(jnp.zeros(8, jnp.int32), longest=8),
        lambda: fa.Lengths(kv=jnp.array([3])),
        lambda: fa.Chunked(4),
        lambda: fa.Dense(jnp.ones((8, 8), bool)),
        lambda: fa.mask_fn(by_image)(tokens={"image": jnp.arange(8)}),
        lambda: fa.alibi(2),
        lambda: fa.bias(jnp.ones((8, 8))),
        lambda: fa.soft_cap(30.0),
        lambda: fa.score_fn(doubled),
    ],
)
def test_masks_and_scores_can_be_pickled_and_copied(make, how):
    before = make()
    after = how(before)
    assert repr(after) == repr(before)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    jax.tree.map(np.testing.assert_array_equal, after, before)


def by_image(q, k):
    return q.image == k.image


def doubled(s, q, k):
    return 2 * s
