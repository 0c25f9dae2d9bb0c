"""float32 queries, keys and values as sums of two float16 arrays, whose products tensor cores form.

The numbers x of a token's head are 2^(e - 14) (high + low), where 2^e is the power of two at or below their largest:
`high` is 2^(14 - e) x rounded to float16, `low` what is missing of it, rounded. Together they have 23 bits of a number
down to 2^-17 of that largest, and an error of 2^-39 of the largest below. A product of two such numbers is high high' +
high low' + low high', with an error of 2^-22 (H. Ootomo and R. Yokota, "Recovering single precision accuracy from
Tensor Cores while surpassing the FP32 theoretical peak performance", arXiv:2203.03341). bfloat16 would take six
products for as much: JAX's `DotAlgorithmPreset.BF16_BF16_F32_X6`; `X3` of three leaves an error of 2^-17.

S = Q K^T gets its powers of two back by rows and columns. In O = P V, those of V are one for each term of the sum, and
go into P: a softmax of scores + log2 of the size of their values, whose weights 2^-size the row sum takes back. So what
P has in float16 is exact in relation to the largest *contribution* to a row of O, and a value that the mask hides,
however large, changes nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TERMS = 2
# Of the largest number of a token, and of P: a half of float16's range, so that rounding stays inside.
TOP_EXPONENT = 14
# 2^(e - 14 - 14) is a normal float32, as GPUs flush others to zero. Smaller tokens have fewer bits.
MIN_EXPONENT = -98
# Of a row of P or dS, for which 2^(e - 14) is the smallest normal float32.
LEAST_LARGEST = 2.0**-112
# Values are scaled as if they were at most 2^105 smaller than the largest of their head. P is a float32 from 2^-126 to
# 2^14: of the probabilities of a query that sees both, those down to 2^-35 remain; and row sums of up to 2^22 keys are
# finite.
MAX_SIZE_DIFFERENCE = 105


class Scales(NamedTuple):
    """Powers of two by which the products of split operands are multiplied, in float32."""

    # [B, N, T'], T' a multiple of block_q; NaN where a number of the query is not finite
    queries: jax.Array
    # [B, K, blocks, 3 block_kv]: of each key its power, NaN where a number of the key or its value is not finite; the
    # log2 of its value's size in relation to the head's largest, at most 0; and the weight that undoes it and P's 2^14.
    keys: jax.Array
    heads: jax.Array  # [B, K], of O


def split_operands(
    q: jax.Array, k: jax.Array, v: jax.Array, dims: tuple[int, int], tile: tuple[int, int]
) -> tuple[jax.Array, jax.Array, jax.Array, Scales]:
    """Return q, k and v as float16 `[B, T, N, 2 H']`, high terms before low ones, and their `Scales`.

    `dims` are H' of the kernel, for q and k, and for v, no less than the arrays'; `tile` is (block_q, block_kv).
    Tokens with a number that is not finite are zeros, and NaN where they are seen.
    """
    block_q, block_kv = tile
    q_exponent, k_exponent, v_exponent = map(_row_exponents, (q, k, v))
    largest = v_exponent.max(1, keepdims=True)  # [B, 1, K]
    size = jnp.maximum(v_exponent - largest, -MAX_SIZE_DIFFERENCE)
    q_scale = jnp.where(_finite_rows(q), _power_of_two(q_exponent - TOP_EXPONENT), jnp.nan)
    finite = _finite_rows(k) & _finite_rows(v)
    k_scale = jnp.where(finite, _power_of_two(k_exponent - TOP_EXPONENT), jnp.nan)
    keys = k_scale, size.astype(jnp.float32), _power_of_two(-size - TOP_EXPONENT)
    scales = Scales(
        queries=_pad_tokens(q_scale, block_q).swapaxes(1, 2),
        keys=jnp.concatenate([_blocks(x, block_kv) for x in keys], -1),
        heads=_power_of_two(largest[:, 0] - 2 * TOP_EXPONENT),
    )
    return (
        _split_rows(q, q_exponent, dims[0]),
        _split_rows(k, k_exponent, dims[0]),
        _split_rows(v, size + largest, dims[1]),
        scales,
    )


class GradientScales(NamedTuple):
    """The powers of two of tokens in the backward: a number is that of its token times the sum of its terms. float32,
    finite, 0 for tokens past the end."""

    q: jax.Array  # [B, N, T']
    dout: jax.Array
    k: jax.Array  # [B, K, S']
    v: jax.Array


def split_for_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    dims: tuple[int, int],
    multiples: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, GradientScales]:
    """Return q, k, v and dout as float16 `[B, T, N, 2 H']`, high terms before low ones, and the powers of their tokens.

    `dims` are H' of the kernels, for q and k, and for v and dout; `multiples` are those to which the scales of queries
    and keys are padded. Tokens with a number that is not finite are zeros: a query that sees one has an lse of NaN.
    """
    exponents = [_row_exponents(x) for x in (q, k, v, dout)]
    q_power, k_power, v_power, dout_power = (_power_of_two(e - TOP_EXPONENT) for e in exponents)
    (of_queries, of_keys), (dim, value_dim) = multiples, dims
    columns = dim, dim, value_dim, value_dim
    q, k, v, dout = map(_split_rows, (q, k, v, dout), exponents, columns)
    powers = (q_power, of_queries), (dout_power, of_queries), (k_power, of_keys), (v_power, of_keys)
    padded = (_pad_tokens(x, block).swapaxes(1, 2) for x, block in powers)
    return q, k, v, dout, GradientScales(*padded)


def row_powers(highest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return 2^(e - 14) and 2^(14 - e) for each row of a tile in registers, where 2^e is the power of two at or below
    its largest absolute value, `highest`."""
    bits = lax.bitcast_convert_type(jnp.maximum(highest, LEAST_LARGEST), jnp.int32)
    power = (bits & (0xFF << 23)) - (TOP_EXPONENT << 23)
    power = lax.bitcast_convert_type(power, jnp.float32)
    return power, inverse_power(power)


def inverse_power(power: jax.Array) -> jax.Array:
    """Return 1 / power of powers of two from 2^-126 to 2^126, exactly; of 0, 2^127."""
    # float32's exponents are biased by 127
    bits = (2 * 127 << 23) - lax.bitcast_convert_type(power, jnp.int32)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _finite_rows(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all(-1)


def _row_exponents(x: jax.Array) -> jax.Array:
    """Return floor(log2(max |x|)) of each token's head, int32 `[B, T, N]`, at least `MIN_EXPONENT`, which it is where
    some x is not finite."""
    largest = jnp.where(_finite_rows(x), jnp.abs(x).max(-1), 0.0)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    return jnp.clip((bits >> 23) - 127, MIN_EXPONENT, 127)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2^exponent in float32, from -126 to 127, exactly: `jnp.exp2` may err."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _split_rows(x: jax.Array, exponent: jax.Array, columns: int) -> jax.Array:
    """Return the float16 terms of 2^(14 - exponent) x, `[B, T, N, 2 columns]`, zeros where x has no columns."""
    scaled = x * _power_of_two(TOP_EXPONENT - exponent)[..., None]
    scaled = jnp.where(_finite_rows(x)[..., None], scaled, 0.0)
    # XLA may leave out a conversion to float16 and back (`xla_allow_excess_precision`), but not this.
    high = lax.reduce_precision(scaled, exponent_bits=5, mantissa_bits=10)
    pad = [(0, 0)] * (x.ndim - 1) + [(0, columns - x.shape[-1])]
    terms = (jnp.pad(term.astype(jnp.float16), pad) for term in (high, scaled - high))
    return jnp.concatenate(list(terms), -1)


def _pad_tokens(x: jax.Array, block: int) -> jax.Array:
    """Pad `[B, T, N]` to whole blocks of tokens, with zeros."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0)))


def _blocks(x: jax.Array, block: int) -> jax.Array:
    """Return `[B, N, blocks, block]` of `[B, T, N]`."""
    x = _pad_tokens(x, block).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, block)
