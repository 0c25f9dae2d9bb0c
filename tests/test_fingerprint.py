"""Masks and scores are traced again when what they read has changed, and only then."""

import dataclasses
import functools
import operator
import os
import time
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2 import parse_call
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
    """A configuration object of a user: the width of a window is an attribute."""

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


class Model(Config):
    """Its methods call others that read the global."""

    @staticmethod
    def is_near(distance):
        return distance < REACH

    @classmethod
    def is_within(cls, distance):
        return distance < REACH

    def near_by_static(self, q, k):
        return (q.index >= k.index) & self.is_near(q.index - k.index)

    def near_by_class(self, q, k):
        return (q.index >= k.index) & self.is_within(q.index - k.index)


def by_static_method():
    return Model().near_by_static, by_global()[1]


def by_class_method():
    return Model().near_by_class, by_global()[1]


def by_what_a_class_makes():
    class Made:
        def __init__(self):
            self.reach = REACH

    return lambda q, k: (q.index >= k.index) & (q.index - k.index < Made().reach), by_global()[1]


def by_function_attribute():
    def fn(q, k):
        return (q.index >= k.index) & (q.index - k.index < fn.reach)

    return fn, lambda n: setattr(fn, "reach", n)


class Operators:
    def __init__(self, reach):
        self.values = {"reach": reach}

    def __getitem__(self, name):
        return self.values[name]

    def __int__(self):
        return self.values["reach"]

    def __iter__(self):
        return iter(self.values.values())

    def __gt__(self, distance):
        return distance < self.values["reach"]


def by_operator(use):
    instance = Operators(3)
    fn = lambda q, k: (q.index >= k.index) & use(instance, q.index - k.index)
    return fn, lambda n: instance.values.__setitem__("reach", n)


def by_item():
    return by_operator(lambda instance, distance: distance < instance["reach"])


def by_conversion():
    return by_operator(lambda instance, distance: distance < int(instance))


def by_iteration():
    return by_operator(lambda instance, distance: distance < max(instance))


def by_comparison():
    return by_operator(lambda instance, distance: instance > distance)


class Attribute:
    def __get__(self, owner, _):
        return owner.stored


class Described:
    reach = Attribute()
    stored = 3


def by_descriptor():
    described = Described()
    fn = lambda q, k: (q.index >= k.index) & (q.index - k.index < described.reach)
    return fn, lambda n: setattr(described, "stored", n)


class Tuple(NamedTuple):
    unused: int

    def is_near(self, distance):
        return distance < REACH


def by_method_of_a_tuple():
    instance = Tuple(0)
    fn = lambda q, k: (q.index >= k.index) & instance.is_near(q.index - k.index)
    return fn, by_global()[1]


def by_attribute_of_a_list():
    class List(list):
        pass

    instance = List([0])
    instance.reach = 3
    fn = lambda q, k: (q.index >= k.index) & (q.index - k.index < instance.reach)
    return fn, lambda n: setattr(instance, "reach", n)


def by_element_of_a_list():
    class List(list):
        pass

    instance = List([3])
    fn = lambda q, k: (q.index >= k.index) & (q.index - k.index < instance[0])
    return fn, lambda n: instance.__setitem__(0, n)


def by_function_of_a_function():
    mapped = jax.vmap(lambda distance: distance < REACH)
    fn = lambda q, k: (q.index >= k.index) & mapped((q.index - k.index)[None])[0]
    return fn, by_global()[1]


def by_attribute_getter():
    config = Config()
    getter = operator.attrgetter("reach")
    fn = lambda q, k: (q.index >= k.index) & (q.index - k.index < getter(config))
    return fn, lambda n: setattr(config, "reach", n)


def by_environment():
    os.environ["REACH"] = "3"
    fn = lambda q, k: (q.index >= k.index) & (q.index - k.index < int(os.environ["REACH"]))
    return fn, lambda n: os.environ.__setitem__("REACH", str(n))


WAYS = [by_global, by_helper, by_dict, by_cell, by_default, by_bound_method, by_class_attribute]
WAYS += [by_callable_object, by_method_of_an_object, by_property, by_slot, by_helper_of_an_object]
WAYS += [
    by_partial,
    by_module,
    by_name_as_text,
    by_function_within,
    by_static_method,
    by_class_method,
]
WAYS += [
    by_what_a_class_makes,
    by_function_attribute,
    by_item,
    by_conversion,
    by_iteration,
    by_comparison,
]
WAYS += [by_descriptor, by_method_of_a_tuple, by_attribute_of_a_list, by_element_of_a_list]
WAYS += [by_function_of_a_function, by_attribute_getter, by_environment]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_key_depends_on_what_a_mask_reads(way):
    fn, change = way()
    whole = fa.mask_fn(fn) & fa.Window(15)
    for reach in (3, 5, 16, 3):
        change(reach)
        expected = (np.subtract.outer(range(16), range(16)) < reach) & np.tri(16, dtype=bool)
        for mask in (fn, whole):
            described, _ = parse_call.parse_call(X, X, X, mask=mask)
            visible = described.mask.on_leading_axes(
                *tokens(), None if mask is fn else described_data(mask)
            )
            np.testing.assert_array_equal(visible[0, 0, 0], expected)


def tokens():
    index = jnp.arange(16, dtype=jnp.int32)
    return index.reshape(1, 1, 1, 16, 1), index.reshape(1, 1, 1, 1, 16)


def described_data(mask):
    return parse_call.parse_call(X, X, X, mask=mask)[1].mask


def test_the_key_of_scores_depends_on_what_they_read():
    config = types.SimpleNamespace(scale=1.0)
    score = fa.score_fn(lambda s, q, k: s * config.scale)
    fa.flash_attention(X, X, X, score=score)
    config.scale = 0.0
    out = fa.flash_attention(X, X, X, score=score)
    np.testing.assert_allclose(out, jnp.broadcast_to(X.mean(1, keepdims=True), X.shape), atol=1e-6)


@pytest.mark.parametrize(
    "way",
    [*WAYS[:4], by_bound_method, by_partial, by_static_method, by_item],
    ids=lambda w: w.__name__,
)
def test_unchanged_functions_have_equal_keys(way):
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


def test_imports_and_captured_arrays_have_no_key():
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


@pytest.mark.parametrize(
    "name", ["where", "abs", "minimum", "add", "floor_divide", "tanh", "float32", "pi"]
)
def test_functions_of_jax_have_keys(name):
    function = getattr(jnp, name)
    assert fingerprint(lambda q, k: function(q.index)) is not None


def test_callbacks_of_one_name_have_different_keys():
    def scaled_by(factor):
        def on_host(s):
            return np.asarray(s) * np.float32(factor)

        def score(s, q, k):
            return jax.pure_callback(
                on_host, jax.ShapeDtypeStruct((), s.dtype), s, vmap_method="expand_dims"
            )

        return score

    one, zero = scaled_by(1.0), scaled_by(0.0)
    codes = [parse_call.parse_call(X, X, X, score=score)[0].scores[0] for score in (one, zero, one)]
    assert codes[0] == codes[2] != codes[1]


def test_parsing_a_call_again_is_cheap():
    """3 ms for a mask and a score; half of a trace."""
    mask = fa.mask_fn(lambda q, k: (q.index >= k.index) & (q.image == k.image))
    mask = mask(tokens={"image": jnp.zeros((1, 16), jnp.int32)})
    score = fa.score_fn(lambda s, q, k, c: 50 * jnp.tanh((s - c.slope) / 50))
    score = score(heads={"slope": jnp.ones(2)})
    times = []
    for _ in range(20):
        start = time.perf_counter()
        parse_call.parse_call(X, X, X, mask=mask, score=score)
        times.append(time.perf_counter() - start)
    assert min(times) < 3e-3


def test_the_key_of_a_number_is_its_bits():
    assert fingerprint(0.0) != fingerprint(-0.0) and fingerprint(0j) != fingerprint(-0j)
    assert fingerprint(float("nan")) == fingerprint(float("nan"))
    assert len({fingerprint(x) for x in (1, 1.0, True, np.float32(1), np.int32(1))}) == 5
