"""A mask's or score's code on a tile, with values that vary over rows, columns, both or neither."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import pallas_fa2 as fa
from pallas_fa2.backends.common import compile_mods
from pallas_fa2.ir import evaluate
from pallas_fa2.ir.tile_functions import combined_scores
from pallas_fa2.ir.tile_values import TileValue, broadcast_to_tile
from pallas_fa2.parse_call import parse_call

ROWS, COLUMNS = 6, 9


@pytest.mark.parametrize(
    "see",
    [
        lambda q, k, c: q.index >= k.index,
        lambda q, k, c: (q.index // 3 == k.index % 4) | (k.a < q.a),
        lambda q, k, c: abs(q.index - k.index) < c.n,
        lambda q, k, c: ~((q.index > 2) & (k.index < 5)),
        lambda q, k, c: jnp.where(q.index > 3, k.a, -k.a) > c.x,
        lambda q, k, c: jnp.clip(q.index, 1, 4) == jnp.minimum(k.index, c.n),
        lambda q, k, c: c.n > 3,
        lambda q, k, c: (q.index.astype(jnp.uint32) ^ k.index.astype(jnp.uint32)) < 7,
        lambda q, k, c: (q.index << 1) - k.index >= jnp.sign(k.index - 4),
        lambda q, k, c: (q.index - k.index <= c.n) & (q.index >= k.index) & (k.index > 1),
        lambda q, k, c: (k.index - q.index < 2) | (k.index < c.n),
        lambda q, k, c: (q.index + k.index != 7) & (k.index + q.index > 3),
        lambda q, k, c: k.index - q.index > k.index // 2 - 4,
        lambda q, k, c: (q.index - k.index > -(2**31)) & (k.index - q.index <= 2**31 - 1),
        lambda q, k, c: (q.index - k.index < -(2**31)) | (k.index < -(2**31)),
        lambda q, k, c: (k.index - q.index < c.least) | (k.index - q.index == 3),
        lambda q, k, c: ((k.index < 3) | (q.index < k.index)) & (k.index <= q.index + 2),
        lambda q, k, c: (c.n > abs(k.index - q.index)) & (abs(q.index - k.index) > c.least),
        lambda q, k, c: (abs(q.index - k.index) <= c.least) | (abs(k.index - 3) < 2),
        lambda q, k, c: (abs(q.index - 2) <= q.index) & (abs(k.index - q.index) <= k.index),
        lambda q, k, c: (k.index + 5 >= q.index) & (q.a > 0),
        lambda q, k, c: (k.index - c.n <= q.index) | (q.index > 4),
        lambda q, k, c: (c.x > 1) | (4 - k.index < q.index),
        lambda q, k, c: (k.index < c.n) & (k.index >= c.least) & (c.n > 3),
        lambda q, k, c: (q.index - k.index <= k.index + 1) & (k.index + 3 > k.index - c.n),
        lambda q, k, c: (k.index + 3 <= k.a.astype(jnp.int32)) | (q.index + 1 < 3),
        lambda q, k, c: (q.index - k.index) // 4 == (k.index - 5) % 2 - 1,
        lambda q, k, c: (q.index - k.index) % 3 == (q.index - 4) // 3 + 1,
        lambda q, k, c: (q.index // 3 * 3 - k.index) % 5 + (k.index % 3) // 2 < 3,
        lambda q, k, c: (q.index // -2 == k.index % -4) | (q.index // 1 < k.index % 1 + 2),
        lambda q, k, c: (
            (q.index // c.n == k.index % c.n) | (5 // (q.index + 1) == 5 % (k.index + 1))
        ),
    ],
)
def test_a_tile_equals_the_scalar_function_of_each_pair(see):
    rng = np.random.default_rng(0)
    a_q, a_k = rng.standard_normal(ROWS, np.float32), rng.standard_normal(COLUMNS, np.float32)
    params = {"n": np.int32(4), "x": np.float32(0.1), "least": np.int32(-(2**31))}
    mask = fa.mask_fn(see)(q_tokens={"a": a_q}, k_tokens={"a": a_k}, params=params)
    q = jax.ShapeDtypeStruct((1, ROWS, 2, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, COLUMNS, 2, 64), jnp.bfloat16)
    spec, operands = parse_call(q, k, k, mask=mask)
    rows, columns = np.arange(ROWS, dtype=np.int32), np.arange(COLUMNS, dtype=np.int32)
    args = [TileValue.of_index(jnp.asarray(rows), 0), TileValue.of_index(jnp.asarray(columns), 1)]
    args += [TileValue(jnp.asarray(a_q), (0,)), TileValue(jnp.asarray(a_k), (1,))]
    args += [TileValue(jnp.asarray(params[name])) for name in sorted(params)]
    (results,) = evaluate.evaluate(spec.mask.jaxpr, args, (ROWS, COLUMNS))
    shape = (1, 1, 1, ROWS, 1), (1, 1, 1, 1, COLUMNS)
    expected = spec.mask.on_leading_axes(
        rows.reshape(shape[0]), columns.reshape(shape[1]), operands.mask
    )
    tile = broadcast_to_tile(results, (0, 1), (ROWS, COLUMNS))
    np.testing.assert_array_equal(
        tile, np.broadcast_to(expected, (1, 1, 1, ROWS, COLUMNS))[0, 0, 0]
    )


def code_of(mask):
    """Return the equations that evaluate a mask on a tile of indices."""
    q = jax.ShapeDtypeStruct((1, ROWS, 2, 64), jnp.bfloat16)
    spec, _ = parse_call(q, q, q, mask=mask)

    def tile(rows, columns):
        args = [TileValue.of_index(rows, 0), TileValue.of_index(columns, 1)]
        (results,) = evaluate.evaluate(spec.mask.jaxpr, args, (ROWS, COLUMNS))
        return broadcast_to_tile(results, (0, 1), (ROWS, COLUMNS))

    indices = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (ROWS, COLUMNS))
    code, _ = evaluate.dce(jax.make_jaxpr(tile)(*indices))
    return code.eqns


@pytest.mark.parametrize(
    "mask, comparisons",
    [
        (fa.Causal() & fa.Window(3), 2),
        (fa.Causal() & fa.Window(3, 0), 2),
        (lambda q, k: (q.index >= k.index) & (q.index - k.index <= 3), 2),
        (fa.mask_fn(lambda q, k: k.index < 5) | fa.Causal(), 1),
        (fa.Causal() & fa.Causal() & fa.Causal(), 1),
    ],
    ids=["causal_window", "one_sided", "user", "prefix", "repeated"],
)
def test_bounds_of_one_side_are_one_comparison(mask, comparisons):
    names = [e.primitive.name for e in code_of(mask) if e.outvars[0].aval.shape == (ROWS, COLUMNS)]
    assert sum(name in ("le", "ge", "lt", "gt") for name in names) == comparisons, names
    assert "sub" not in names


def operations_of(function):
    return [e.primitive.name for e in code_of(function) if e.primitive.name != "broadcast_in_dim"]


@pytest.mark.parametrize(
    "function, operations",
    [
        (lambda q, k: (q.index - k.index) % 4 == 0, ["sub", "and", "eq"]),
        (lambda q, k: (q.index - k.index) // 8 > 1, ["sub", "shift_right_arithmetic", "lt"]),
        (lambda q, k: q.index // 3 == k.index % 7, ["div", "rem", "eq"]),
    ],
    ids=["remainder", "quotient", "natural"],
)
@pytest.mark.parametrize("x64", [False, True])
def test_floor_division_takes_one_operation(function, operations, x64):
    with jax.enable_x64(x64):
        assert operations_of(function) == operations


@functools.partial(jax.jit, static_argnums=1)
def remainder(x, n):
    return x + n


@jax.jit
def floor_divide(x, *n):
    return x * n[0], x


@pytest.mark.parametrize(
    "function, operation",
    [
        (lambda q, k: jax.jit(remainder.__wrapped__)(q.index, 4) > k.index, "add"),
        (lambda q, k: remainder(q.index, 4) > k.index, "add"),
        (lambda q, k: floor_divide(q.index, 4)[0] > k.index, "mul"),
        (lambda q, k: floor_divide(q.index, 4, 5)[0] > k.index, "mul"),
    ],
)
def test_a_users_function_with_the_name_of_jnps_is_evaluated(function, operation):
    assert operations_of(function)[0] == operation


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k: q.index - k.index <= jnp.floor_divide(1000, jnp.int32(64)),
        lambda q, k: q.index - k.index <= jnp.remainder(1000, np.int32(64)),
        lambda q, k: q.index // 2**31 == k.index // 3_000_000_000,
    ],
)
def test_floor_division_of_wide_and_known_operands(function):
    with jax.enable_x64(True):
        assert "shift_right_arithmetic" not in operations_of(function)


def test_values_of_one_side_vary_over_one_axis():
    q = jax.ShapeDtypeStruct((1, ROWS, 2, 64), jnp.bfloat16)
    spec, _ = parse_call(q, q, q, mask=lambda q, k: (q.index % 2 == 0) & (q.index < 4))
    args = [TileValue(jnp.arange(ROWS), (0,)), TileValue(jnp.arange(ROWS), (1,))]
    (results,) = evaluate.evaluate(spec.mask.jaxpr, args, (ROWS, ROWS))
    assert results.axes == (0,)


# Of large numbers the tanh of the older emitters (conftest.py) is 1 - 2^-24, and its slope not 0.
XLA_AS_IT_IS = {"xla_backend_extra_options": ""}
SCORES = np.linspace(-9.0, 9.0, ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("size", [0.02, 1.0, 30.0])
@pytest.mark.parametrize(
    "score",
    [
        lambda s, q, k, c: 50.0 * jnp.tanh(s / 50.0),
        lambda s, q, k, c: jnp.tanh(s * q.a) * k.a - c.x * abs(q.index - k.index).astype(s.dtype),
        lambda s, q, k, c: jax.nn.sigmoid(s) + jax.nn.softplus(s) - jnp.expm1(-abs(s)),
        lambda s, q, k, c: jnp.sin(s * 40) + jnp.cos((q.index - 7 * k.index).astype(s.dtype)),
        lambda s, q, k, c: s**3 - 1 / (1 + s**2) + jnp.sqrt(abs(s)) / c.x,
        lambda s, q, k, c: -(-s * 2.0) * 0.25 + c.n.astype(s.dtype) - c.narrow.astype(s.dtype),
        lambda s, q, k, c: (q.index * q.index + (k.index - 3)).astype(s.dtype) / 4.0 - s,
        lambda s, q, k, c: jnp.log1p(jnp.exp(-abs(s))) + jnp.exp2(-abs(s)) * c.x,
    ],
)
def test_a_score_and_its_derivatives_equal_those_of_the_scalar_function(score, size):
    rng = np.random.default_rng(0)
    a_q, a_k = rng.standard_normal(ROWS, np.float32), rng.standard_normal(COLUMNS, np.float32)
    params = {"n": np.int32(4), "x": np.float32(0.7), "narrow": jnp.bfloat16(0.3)}
    q = jax.ShapeDtypeStruct((1, ROWS, 2, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, COLUMNS, 2, 64), jnp.bfloat16)
    tokens = {"q_tokens": {"a": a_q}, "k_tokens": {"a": a_k}}
    spec, _ = parse_call(q, k, k, score=fa.score_fn(score)(params=params, **tokens))
    assert compile_mods.unsupported_reason(spec) is None
    rows, columns = np.arange(ROWS, dtype=np.int32), np.arange(COLUMNS, dtype=np.int32)
    s = SCORES * np.float32(size)
    args = [
        TileValue(jnp.asarray(s / 0.5), (0, 1), factor=0.5),
        TileValue.of_index(jnp.asarray(rows), 0),
        TileValue.of_index(jnp.asarray(columns), 1),
        TileValue(jnp.asarray(a_q), (0,)),
        TileValue(jnp.asarray(a_k), (1,)),
        *(TileValue(jnp.asarray(params[name], "float32")) if name != "n" else TileValue(jnp.int32(4))
          for name in sorted(params)),
    ]  # fmt: skip
    wanted = [jnp.asarray(s), rows[:, None], columns, a_q[:, None], a_k]
    wanted += [params[name] for name in sorted(params)]
    for code in combined_scores(spec.scores):
        results = evaluate.evaluate(code, args, s.shape)
        pairs = [
            jnp.asarray(np.broadcast_to(x, s.shape).reshape(-1), aval.dtype)
            for x, aval in zip(wanted, code.in_avals, strict=True)
        ]
        each = jax.jit(jax.vmap(jaxpr_as_fun(code)), compiler_options=XLA_AS_IT_IS)
        for x, y in zip(results, each(*pairs), strict=True):
            tile = broadcast_to_tile(x, (0, 1), s.shape)
            tolerance = 1e-5 if y.dtype == jnp.float32 else 1e-2
            y = y.astype("float32").reshape(s.shape)
            np.testing.assert_allclose(tile, y, tolerance, 1e-5)


def test_integers_beyond_float32_stay_integers():
    """2^24 + 1 is no float32."""
    q = jax.ShapeDtypeStruct((1, ROWS, 2, 64), jnp.bfloat16)

    def score(s, q, k):
        return s + ((q.index + 2**24 + 1) - 2**24).astype(s.dtype)

    spec, _ = parse_call(q, q, q, score=score)
    value, _ = combined_scores(spec.scores)
    rows = TileValue.of_index(jnp.arange(ROWS, dtype=jnp.int32), 0)
    args = [TileValue(jnp.zeros((ROWS, ROWS)), (0, 1)), rows, rows]
    (results,) = evaluate.evaluate(value, args, (ROWS, ROWS))
    tile = broadcast_to_tile(results, (0, 1), (ROWS, ROWS))
    np.testing.assert_array_equal(tile, np.broadcast_to(np.arange(ROWS)[:, None] + 1, tile.shape))
