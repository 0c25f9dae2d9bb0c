"""Scores against dense attention written out here, values and gradients."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.xla import blockwise

B, T, S, N, K, H = 2, 20, 13, 4, 2, 8
I, J = np.arange(T)[:, None], np.arange(S)[None]
DISTANCE = I - J
CAUSAL = DISTANCE >= 0
SCALE = H**-0.5


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


Q, KEY, V = normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)
WEIGHT = normal(B, T, N, H, seed=3)
BIAS = normal(B, N, T, S, seed=4)


def expected(change, q=Q, k=KEY, v=V):
    """Causal attention with scores `change(s)`, s being `[B, N, T, S]`; and its logsumexp."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = change(jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * SCALE)
    s = jnp.where(CAUSAL[None, None], s, -jnp.inf)
    lse = jax.nn.logsumexp(s, -1)
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(s - lse[..., None]), v, precision="highest"), lse


def attend(score, q=Q, k=KEY, v=V, implementation=None):
    return fa.flash_attention(
        q, k, v, mask=fa.Causal(), score=score, return_lse=True, implementation=implementation
    )


def check(score, change):
    chex.assert_trees_all_close(attend(score), expected(change), rtol=2e-5, atol=2e-6)


def check_gradients(make, change, data, implementation=None):
    """Check the gradients of query, key, value and all the data."""

    def loss(out_and_lse):
        out, lse = out_and_lse
        return jnp.sum(out * WEIGHT) + jnp.sum(jnp.sin(lse))

    def ours(data, *qkv):
        return loss(attend(make(data), *qkv, implementation))

    def dense(data, *qkv):
        return loss(expected(lambda s: change(s, data), *qkv))

    argnums = (0, 1, 2, 3)
    actual, want = (jax.jit(jax.grad(f, argnums))(data, Q, KEY, V) for f in (ours, dense))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, want)
    chex.assert_trees_all_close(actual, want, rtol=2e-4, atol=2e-5)


def per_head(x):
    return x.reshape(1, N, 1, 1)


PAPER = 2.0 ** -np.arange(1, 9, dtype=np.float32)


def test_alibi_of_an_integer_has_the_slopes_of_the_paper():
    """arXiv:2108.12409, section 3: 1/2, 1/4, ..., 1/256 for 8 heads."""
    q, k = np.zeros((1, T, 8, H), np.float32), np.zeros((1, S, 8, H), np.float32)
    _, lse = fa.flash_attention(q, k, k, score=fa.alibi(8), return_lse=True)
    s = -PAPER[:, None, None] * abs(DISTANCE)
    chex.assert_trees_all_close(lse[0], jax.nn.logsumexp(s, -1), rtol=1e-5, atol=1e-6)


SLOPES = np.array([0.5, 0.1, 0.0, -0.3], np.float32)
LINEAR = per_head(SLOPES) * abs(DISTANCE)


@pytest.mark.parametrize("slopes", [SLOPES, SLOPES.tolist()], ids=type)
def test_alibi_has_a_slope_for_each_head(slopes):
    check(fa.alibi(slopes), lambda s: s - LINEAR)


SCORES = {
    "soft_cap": (fa.soft_cap(0.7), lambda s: 0.7 * jnp.tanh(s / 0.7)),
    "bias": (fa.bias(BIAS), lambda s: s + BIAS),
    "bias of 16 bits": (fa.bias(jnp.asarray(BIAS, jnp.bfloat16).at[:].set(0.5)), lambda s: s + 0.5),
    "function": (lambda s, q, k: s * 2.0, lambda s: s * 2),
    "function of positions": (
        fa.score_fn(lambda s, q, k: jnp.where(q.index == k.index, s * 3.0, s)),
        lambda s: jnp.where(DISTANCE == 0, s * 3, s),
    ),
    "function of lengths": (
        lambda s, q, k: s * (k.length / q.length),
        lambda s: s * (S / T),
    ),
    "constant": (lambda s, q, k: jnp.zeros_like(s), lambda s: s * 0),
    "empty": ((), lambda s: s),
    "a list": ([fa.soft_cap(0.7)], lambda s: 0.7 * jnp.tanh(s / 0.7)),
    "cap, then bias": ((fa.soft_cap(0.7), fa.bias(BIAS)), lambda s: 0.7 * jnp.tanh(s / 0.7) + BIAS),
    "bias, then cap": (
        (fa.bias(BIAS), fa.soft_cap(0.7)),
        lambda s: 0.7 * jnp.tanh((s + BIAS) / 0.7),
    ),
    "three": (
        (lambda s, q, k: s + 1.0, lambda s, q, k: s * 2.0, fa.alibi(SLOPES)),
        lambda s: (s + 1) * 2 - LINEAR,
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_apply_from_left_to_right(name):
    check(*SCORES[name])


BIAS_SHAPES = [(N, T, 1), ()]


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_the_gradient_of_a_bias_has_its_shape(shape):
    def change(s, bias):
        return s + bias.reshape((1,) * (4 - bias.ndim) + bias.shape)

    check_gradients(fa.bias, change, normal(*shape, seed=5))


def test_the_gradient_of_a_capped_score_is_finite_far_out():
    q, k = 1e4 * Q, KEY
    gradient = jax.grad(lambda q: jnp.sum(attend(fa.soft_cap(5.0), q, k)[0] * WEIGHT))(q)
    assert np.all(np.isfinite(gradient))


@fa.score_fn
def of_all_kinds(s, q, k, c):
    near = jnp.clip(q.index - k.index, 0, 4)
    s = s * c.head[q.kind] + q.both * k.both + q.own
    return (s + c.pair) * k.own + c.table[near] + c.number * c.bucket.astype(jnp.float32)


KINDS = np.random.default_rng(6).integers(0, 3, (B, T), np.int32)
BUCKETS = np.random.default_rng(7).integers(0, 5, (T, S), np.int32)
ALL_KINDS = {
    "tokens": {"both": normal(1, seed=10)},
    "q_tokens": {"own": normal(B, T, seed=11)},
    "k_tokens": {"own": 1 + 0.3 * normal(S, seed=12)},
    "heads": {"head": normal(N, 3, seed=13)},
    "params": {"table": normal(5, seed=14), "number": normal(seed=15)},
    "pairs": {"pair": normal(B, 1, T, S, seed=16)},
}


def with_all_kinds(data):
    integers = of_all_kinds(q_tokens={"kind": KINDS}, pairs={"bucket": BUCKETS})
    return integers(**data)


def change_by_all_kinds(s, data):
    head = jnp.moveaxis(data["heads"]["head"][:, KINDS], 0, 1)  # [B, N, T]
    both, own = data["tokens"]["both"][0], data["q_tokens"]["own"]
    s = s * head[..., None] + both**2 + own[:, None, :, None]
    near = data["params"]["table"][np.clip(DISTANCE, 0, 4)]
    s = (s + data["pairs"]["pair"]) * data["k_tokens"]["own"].reshape(1, 1, 1, S)
    return s + near[None, None] + data["params"]["number"] * BUCKETS[None, None].astype(np.float32)


IMPLEMENTATIONS = ["reference", "blockwise"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_flow_to_floating_point_data_of_every_kind(implementation, monkeypatch):
    """Blockwise on ragged tiles, whose parts of a gradient must add up."""
    monkeypatch.setattr(blockwise, "block_sizes", lambda spec: (8, 8))
    data = ALL_KINDS
    chex.assert_trees_all_close(
        attend(with_all_kinds(data), implementation=implementation),
        expected(lambda s: change_by_all_kinds(s, data)),
        rtol=5e-5,
        atol=5e-6,
    )
    check_gradients(with_all_kinds, change_by_all_kinds, data, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_padding_of_a_tile_has_finite_scores(implementation, monkeypatch):
    """Neither a score of 0 nor data of 0 may stand for a token beyond the end."""
    monkeypatch.setattr(blockwise, "block_sizes", lambda spec: (8, 8))

    @fa.score_fn
    def tempered(s, q, k, c):
        return s * jnp.log(abs(s)) / (q.heat * k.gain) * c.by

    data = {"heat": 1 + abs(normal(B, T, seed=20)), "gain": 1 + abs(normal(S, seed=21)), "by": 2.0}

    def make(data):
        tokens = {"q_tokens": {"heat": data["heat"]}, "k_tokens": {"gain": data["gain"]}}
        return tempered(**tokens, params={"by": data["by"]})

    def change(s, data):
        by = data["heat"][:, None, :, None] * data["gain"].reshape(1, 1, 1, S)
        return s * jnp.log(abs(s)) / by * data["by"]

    check_gradients(make, change, data, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masked_pairs_have_finite_scores(implementation):
    def loss(by):
        score = fa.score_fn(lambda s, q, k, c: s * jnp.log(abs(s)) * c.by)(params={"by": by})
        out = fa.flash_attention(
            Q, KEY, V, mask=fa.Lengths(kv=7), score=score, implementation=implementation
        )
        return jnp.sum(out * WEIGHT)

    assert np.isfinite(jax.grad(loss)(2.0))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_data_of_masked_pairs_reach_no_gradient(implementation, poison, monkeypatch):
    monkeypatch.setattr(blockwise, "block_sizes", lambda spec: (8, 8))
    data = {"bias": BIAS, "cap": np.float32(3), "heat": 1 + abs(normal(T, seed=20))}
    # The first queries see no key, and no query sees the keys above the diagonal.
    mask = fa.Causal() & (lambda q, k: q.index > 1)
    dead = ~np.broadcast_to(CAUSAL & (I > 1), BIAS.shape)

    @fa.score_fn
    def capped(s, q, k, c):
        return c.cap * jnp.tanh((s + c.bias) / (c.cap * q.heat))

    def loss(data):
        score = capped(
            q_tokens={"heat": data["heat"]},
            params={"cap": data["cap"]},
            pairs={"bias": data["bias"]},
        )
        out = fa.flash_attention(Q, KEY, V, mask=mask, score=score, implementation=implementation)
        return jnp.sum(out * WEIGHT)

    poisoned = {**data, "bias": np.where(dead, poison, BIAS).astype(np.float32)}
    poisoned["heat"] = np.where(np.arange(T) > 1, data["heat"], poison).astype(np.float32)
    actual, want = jax.grad(loss)(poisoned), jax.grad(loss)(data)
    chex.assert_trees_all_close(actual, want, rtol=1e-6)
    assert not np.any(actual["bias"][dead]) and not np.any(actual["heat"][:2])


def test_the_gradient_of_16_bit_data_is_summed_in_float32(monkeypatch):
    """Tile by tile in bfloat16 a sum of 256 would stand still long before its end."""
    monkeypatch.setattr(blockwise, "block_sizes", lambda spec: (8, 8))
    q, k, v = normal(1, 256, N, H), normal(1, 256, K, H, seed=1), normal(1, 256, K, H, seed=2)

    def loss(slopes, implementation):
        _, lse = fa.flash_attention(
            q, k, v, score=fa.alibi(slopes), return_lse=True, implementation=implementation
        )
        return jnp.sum(lse)

    slopes = jnp.full(N, 0.01, jnp.bfloat16)
    actual = jax.grad(loss)(slopes, "blockwise")
    want = jax.grad(loss)(slopes.astype(jnp.float32), "reference")
    assert actual.dtype == jnp.bfloat16
    chex.assert_trees_all_close(actual.astype(jnp.float32), want, rtol=2**-8)


def _buckets(distance, count=8, limit=16):
    """T5's relative buckets of a causal decoder (arXiv:1910.10683): exact, then logarithmic."""
    distance = np.maximum(distance, 0)
    exact = count // 2
    far = np.log(np.maximum(distance, 1) / exact) / np.log(limit / exact) * (count - exact)
    return np.where(distance < exact, distance, np.minimum(exact + far.astype(int), count - 1))


def test_a_table_of_relative_positions_as_in_t5():
    of_distance = _buckets(np.arange(T)).astype(np.int32)

    @fa.score_fn
    def relative(s, q, k, c):
        return s + c.table[c.bucket[jnp.maximum(q.index - k.index, 0)]]

    def make(table):
        return relative(heads={"table": table}, params={"bucket": of_distance})

    def change(s, table):
        return s + table[:, _buckets(DISTANCE)][None]

    check_gradients(make, change, normal(N, 8, seed=8))


def test_scores_read_explicit_positions():
    positions = np.random.default_rng(9).integers(0, 30, (B, T), np.int32)
    _, lse = fa.flash_attention(
        Q, KEY, V, score=fa.alibi(SLOPES), q_positions=positions, return_lse=True
    )
    _, plain = fa.flash_attention(
        Q, KEY, V, score=fa.bias(-per_head(SLOPES) * abs(positions.reshape(B, 1, T, 1) - J)),
        return_lse=True,
    )  # fmt: skip
    chex.assert_trees_all_close(lse, plain, rtol=1e-5)


def test_a_score_cannot_unmask_a_pair():
    _, lse = fa.flash_attention(
        Q, KEY, V, mask=fa.Lengths(q=0), score=lambda s, q, k: 0.0 * s, return_lse=True
    )
    assert np.all(lse == -np.inf)


def test_a_parameter_may_be_a_python_number():
    score = fa.score_fn(lambda s, q, k, c: s * c.t)
    check(score(params={"t": 0.5}), lambda s: s * 0.5)


class Rule:
    def method(self, s, q, k):
        return s * 2.0

    def __call__(self, s, q, k):
        return s * 2.0


@pytest.mark.parametrize(
    "fn", [lambda s, q, k, n=2.0: s * n, Rule().method, Rule()], ids=["default", "method", "object"]
)
def test_any_callable_of_a_score_and_two_tokens_is_a_score(fn):
    check(fa.score_fn(fn), lambda s: s * 2)


@pytest.mark.parametrize(
    "score, message",
    [
        (BIAS, r"score must be a score function .* ndarray; wrap a dense array as bias\(array\)"),
        ((fa.soft_cap(1.0), jnp.ones(3)), r"score must be a score function .* wrap a dense array"),
        ("soft_cap", r"score must be a score function or a tuple of them, but it holds str"),
        (lambda s, q, k: s > 0, r"must return one float32 .* it returns bool\[\]"),
        (lambda s, q, k: s.astype(jnp.bfloat16), r"must return one float32 .* bfloat16\[\]"),
        (lambda s, q, k: jnp.stack([s, s]), r"must return one float32 .* float32\[2\]"),
    ],
    ids=["array", "array in a tuple", "text", "boolean", "dtype", "vector"],
)
def test_objects_that_are_no_scores_are_errors(score, message):
    with pytest.raises(TypeError, match=message):
        attend(score)


def test_an_equal_cap_does_not_recompile():
    chex.clear_trace_counter()
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 8, 1, 4))

    @jax.jit
    @chex.assert_max_traces(n=2)
    def run(score):
        return fa.flash_attention(q, k, k, score=score)

    for cap in (5.0, np.float32(5), 5, 6.0):
        run(fa.soft_cap(cap))


def test_a_cap_must_be_a_python_number():
    with pytest.raises(TypeError, match=r"cap must be a Python number.*params={'cap': cap}"):
        fa.soft_cap(jnp.float32(5))  # pyright: ignore[reportArgumentType]


def test_a_bias_may_be_a_list():
    actual = attend(fa.bias(np.asarray(BIAS).tolist()))  # pyright: ignore[reportArgumentType]
    chex.assert_trees_all_equal(actual, attend(fa.bias(BIAS)))


@pytest.mark.parametrize(
    "array", [np.ones((1, 1, T, S), bool), [[True] * S] * T], ids=["array", "list"]
)
def test_a_bias_is_no_mask(array):
    with pytest.raises(
        TypeError, match=r"bias must be numbers .* but it is boolean; pass it as mask="
    ):
        fa.bias(array)


@pytest.mark.parametrize("cap", [0, -1.0, np.nan])
def test_a_cap_is_positive(cap):
    with pytest.raises(ValueError, match=r"cap must be a positive .* but it is .*; .*no cap"):
        fa.soft_cap(cap)


@pytest.mark.parametrize(
    "score, message",
    [
        (fa.alibi(8), r"heads\['slope'\] must have shape \[N, \.\.\.\] with N = 4.*\(8,\)"),
        (fa.bias(BIAS[:, :, 1:]), r"^bias must .* T = 20, .* has shape \(2, 4, 19, 13\)"),
    ],
    ids=["alibi", "bias"],
)
def test_data_of_a_wrong_shape_are_named(score, message):
    with pytest.raises(ValueError, match=message):
        attend(score)


def test_errors_about_undeclared_data_list_the_declared():
    with pytest.raises(AttributeError, match=r"c\.slop: no such data \(there is slope\)"):
        attend(fa.score_fn(lambda s, q, k, c: s * c.slop)(heads={"slope": SLOPES}))


def test_the_gradient_of_a_bias_under_vmap():
    def loss(bias):
        return jnp.sum(attend(fa.bias(bias))[0] * WEIGHT)

    two = np.stack([BIAS, 2 * BIAS])
    apart = [jax.grad(loss)(x) for x in two]
    together = jax.vmap(jax.grad(loss))(two)
    chex.assert_trees_all_close(together, np.stack(apart), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_capped_score_is_its_slope():
    x = jnp.linspace(-9, 9, 7)
    slopes = jax.vmap(jax.grad(lambda s: fa.soft_cap(3.0).fn(s, None, None)))(x)
    np.testing.assert_allclose(slopes, 1 - np.tanh(x / 3) ** 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_row_is_empty_at_scores_of_minus_2_to_the_26th(implementation):
    limit = np.float32(-(2.0**26))
    above = np.nextafter(limit, np.float32(0))
    rows = np.array([-1e10, -1e9, limit, above, -1e6], np.float32)
    values = jax.random.normal(jax.random.key(0), (1, 7, 1, 8))
    score = fa.bias(jnp.broadcast_to(rows[:, None], (5, 7)))

    def attend(v):
        x = jnp.zeros((1, 5, 1, 8)), jnp.zeros((1, 7, 1, 8))
        return fa.flash_attention(
            *x, v, score=score, return_lse=True, implementation=implementation
        )

    (out, lse), pull = jax.vjp(attend, values)
    (dv,) = pull((jnp.ones_like(out), jnp.zeros_like(lse)))
    mean = values[0].mean(0, keepdims=True)
    np.testing.assert_array_equal(out[0, :3], 0)
    np.testing.assert_allclose(out[0, 3:], np.broadcast_to(mean, (2, 1, 8)), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(lse[0, 0, :3], -np.inf)
    np.testing.assert_allclose(lse[0, 0, 3:], rows[3:] + np.log(np.float32(7)), rtol=1e-7)
    np.testing.assert_allclose(dv, np.full_like(dv, 2 / 7), rtol=1e-5)
