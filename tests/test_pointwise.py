"""A mask's code on a tile, with values that vary over rows, columns, both or neither."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.kernels import pointwise
from pallas_fa2.kernels.pointwise import Value
from pallas_fa2.spec import describe

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
    ],
)
def test_a_tile_is_what_the_scalar_function_says_of_each_pair(see):
    rng = np.random.default_rng(0)
    a_q, a_k = rng.standard_normal(ROWS, np.float32), rng.standard_normal(COLUMNS, np.float32)
    n, x = np.int32(4), np.float32(0.1)
    mask = fa.mask_fn(see)(q_tokens={"a": a_q}, k_tokens={"a": a_k}, params={"n": n, "x": x})
    q = jax.ShapeDtypeStruct((1, ROWS, 2, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, COLUMNS, 2, 64), jnp.bfloat16)
    spec, operands = describe(q, k, k, mask=mask)
    rows, columns = np.arange(ROWS, dtype=np.int32), np.arange(COLUMNS, dtype=np.int32)
    args = [Value(jnp.asarray(rows), (0,)), Value(jnp.asarray(columns), (1,))]
    args += [Value(jnp.asarray(a_q), (0,)), Value(jnp.asarray(a_k), (1,))]
    args += [Value(jnp.asarray(n)), Value(jnp.asarray(x))]
    found = pointwise.evaluate(spec.mask, args, (ROWS, COLUMNS))
    shape = (1, 1, 1, ROWS, 1), (1, 1, 1, 1, COLUMNS)
    expected = spec.mask.on_tile(rows.reshape(shape[0]), columns.reshape(shape[1]), operands.mask)
    tile = pointwise.spread(found, (0, 1), (ROWS, COLUMNS))
    np.testing.assert_array_equal(
        tile, np.broadcast_to(expected, (1, 1, 1, ROWS, COLUMNS))[0, 0, 0]
    )


def test_what_depends_on_one_side_varies_over_it_alone():
    q = jax.ShapeDtypeStruct((1, ROWS, 2, 64), jnp.bfloat16)
    spec, _ = describe(q, q, q, mask=lambda q, k: (q.index % 2 == 0) & (q.index < 4))
    args = [Value(jnp.arange(ROWS), (0,)), Value(jnp.arange(ROWS), (1,))]
    assert pointwise.evaluate(spec.mask, args, (ROWS, ROWS)).axes == (0,)
