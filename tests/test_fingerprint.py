"""Masks and scores are traced again when what they read has changed, and only then."""

import dataclasses
import functools
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2 import spec
from pallas_fa2.fingerprint import fingerprint

REACH = 3
LIMITS = {"reach": [3]}
X = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))


def near(q, k):
    return (q.index >= k.index) & (q.index - k.index < REACH)


def near_by_helper(q, k):
    return near(q, k)


def near_by_dict(q, k):
    return (q.index >= k.index) & (q.index - k.index < LIMITS["reach"][0])


class Config:
    """As users have them: the width of a window as an attribute."""

    reach = 3

    def near(self, q, k):
        return (q.index >= k.index) & (q.index - k.index < self.reach)

    def __call__(self, q, k):
        return self.near(q, k)


@dataclasses.dataclass
class Nested:
    inner: Config

    @property
    def reach(self):
        return self.inner.reach

    def near(self, q, k):
        return (q.index >= k.index) & (q.index - k.index < self.reach)


class Slotted:
    __slots__ = ("reach",)

    def near(self, q, k):
        return (q.index >= k.index) & (q.index - k.index < self.reach)


def by_global():
    def change(n):
        global REACH
        REACH = n

    return near, change


def by_helper():
    return near_by_helper, by_global()[1]


def by_dict():
    return near_by_dict, lambda n: LIMITS["reach"].__setitem__(0, n)


def by_cell():
    reach = 3

    def fn(q, k):
        return (q.index >= k.index) & (q.index - k.index < reach)

    def change(n):
        nonlocal reach
        reach = n

    return fn, change


def by_default():
    def fn(q, k, reach=3):
        return (q.index >= k.index) & (q.index - k.index < reach)

    return fn, lambda n: setattr(fn, "__defaults__", (n,))


def by_bound_method():
    config = Config()
    return config.near, lambda n: setattr(config, "reach", n)


def by_class_attribute():
    class Wide(Config):
        pass

    Wide.reach = 3
    return Wide().near, lambda n: setattr(Wide, "reach", n)


def by_callable_object():
    config = Config()
    return config, lambda n: setattr(config, "reach", n)


def by_method_of_an_object():
    config = Config()
    return lambda q, k: config.near(q, k), lambda n: setattr(config, "reach", n)


def by_property():
    config = Nested(Config())
    return config.near, lambda n: setattr(config.inner, "reach", n)


def by_slot():
    config = Slotted()
    config.reach = 3
    return config.near, lambda n: setattr(config, "reach", n)


def by_helper_of_an_object():
    """The helper's code names the attribute, the function's does not."""
    config = Config()
    helper = lambda c, q, k: (q.index >= k.index) & (q.index - k.index < c.reach)
    return lambda q, k: helper(config, q, k), lambda n: setattr(config, "reach", n)


def by_partial():
    config = Config()
    fn = functools.partial(lambda c, q, k: c.near(q, k), config)
    return fn, lambda n: setattr(config, "reach", n)


def by_module():
    module = types.ModuleType("settings")
    module.reach = 3
    fn = lambda q, k: (q.index >= k.index) & (q.index - k.index < module.reach)
    return fn, lambda n: setattr(module, "reach", n)


def by_name_as_text():
    config = Config()
    fn = lambda q, k: (q.index >= k.index) & (q.index - k.index < getattr(config, "re" + "ach"))
    return fn, lambda n: setattr(config, "reach", n)


class Bare:
    """Nothing of it but the function within names what it has."""


def by_function_within():
    config = Bare()
    config.reach = 3

    def fn(q, k):
        def is_near(distance):
            return distance < config.reach

        return (q.index >= k.index) & is_near(q.index - k.index)

    return fn, lambda n: setattr(config, "reach", n)


WAYS = [by_global, by_helper, by_dict, by_cell, by_default, by_bound_method, by_class_attribute]
WAYS += [by_callable_object, by_method_of_an_object, by_property, by_slot, by_helper_of_an_object]
WAYS += [by_partial, by_module, by_name_as_text, by_function_within]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_a_mask_reads_when_it_is_called_counts(way):
    fn, change = way()
    whole = fa.mask_fn(fn) & fa.Window(15)
    for reach in (3, 5, 16, 3):
        change(reach)
        expected = (np.subtract.outer(range(16), range(16)) < reach) & np.tri(16, dtype=bool)
        for mask in (fn, whole):
            described, _ = spec.describe(X, X, X, mask=mask)
            seen = described.mask.on_tile(*tokens(), None if mask is fn else described_data(mask))
            np.testing.assert_array_equal(seen[0, 0, 0], expected)


def tokens():
    index = jnp.arange(16, dtype=jnp.int32)
    return index.reshape(1, 1, 1, 16, 1), index.reshape(1, 1, 1, 1, 16)


def described_data(mask):
    return spec.describe(X, X, X, mask=mask)[1].mask


def test_scores_and_values_follow_too():
    config = types.SimpleNamespace(scale=1.0)
    score = fa.score_fn(lambda s, q, k: s * config.scale)
    fa.flash_attention(X, X, X, score=score)
    config.scale = 0.0
    out = fa.flash_attention(X, X, X, score=score)
    np.testing.assert_allclose(out, jnp.broadcast_to(X.mean(1, keepdims=True), X.shape), atol=1e-6)


@pytest.mark.parametrize("way", [*WAYS[:4], by_bound_method, by_partial], ids=lambda w: w.__name__)
def test_what_has_not_changed_has_the_same_key(way):
    fn, change = way()
    change(3)
    first = fingerprint(fn)
    assert first is not None and fingerprint(fn) == first
    change(4)
    assert fingerprint(fn) != first
    change(3)
    assert fingerprint(fn) == first


def test_a_recursive_function_has_a_key():
    def power(x, n):
        return x if n == 1 else x * power(x, n - 1)

    assert fingerprint(power) == fingerprint(power) is not None


def test_what_imports_or_captures_arrays_has_no_key():
    array = jnp.ones(3)

    def imports(q, k):
        import math

        return math.pi

    def within(q, k):
        return [imports_too(x) for x in (q, k)]

    def imports_too(x):
        def inner():
            import math

            return x * math.pi

        return inner()

    assert fingerprint(imports) is None
    assert fingerprint(imports_too) is None and fingerprint(within) is None
    assert fingerprint(lambda q, k: array) is None
    assert fingerprint(lambda q, k: eval("1")) is None
    iterator = iter([1])
    assert fingerprint(lambda q, k: iterator) is None


def test_a_call_described_again_is_cheap():
    """3 ms for a mask and a score; half of a trace."""
    mask = fa.mask_fn(lambda q, k: (q.index >= k.index) & (q.image == k.image))
    mask = mask(tokens={"image": jnp.zeros((1, 16), jnp.int32)})
    score = fa.score_fn(lambda s, q, k, c: 50 * jnp.tanh((s - c.slope) / 50))
    score = score(heads={"slope": jnp.ones(2)})
    times = []
    for _ in range(20):
        start = time.perf_counter()
        spec.describe(X, X, X, mask=mask, score=score)
        times.append(time.perf_counter() - start)
    assert min(times) < 3e-3


def test_a_number_is_known_by_its_bits():
    assert fingerprint(0.0) != fingerprint(-0.0) and fingerprint(0j) != fingerprint(-0j)
    assert fingerprint(float("nan")) == fingerprint(float("nan"))
    assert len({fingerprint(x) for x in (1, 1.0, True, np.float32(1), np.int32(1))}) == 5
