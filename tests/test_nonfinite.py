"""Blocks in which something is not finite are sanitized, interpreted and on a GPU."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_fa2 as fa
from pallas_fa2 import arithmetic
from pallas_fa2.backends.common import compile_mods, kernel_spec
from pallas_fa2.backends.common.primitives import launch
from pallas_fa2.backends.sm90.backward import preprocess
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.nonfinite import ArrayToSanitize, SanitizePass
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.parse_call import parse_call
from tests.support import interpreter
from tests.support.hopper import planned_for_h200

BATCH, HEADS = 2, 2
# Indices in the first array, and the values there.
NONFINITE = {
    (0, 3, 1, 5): math.nan,
    (0, 100, 0, 7): math.nan,  # with blocks of 96, two CTAs read it
    (1, 64, 0, 0): math.inf,
    (1, 69, 0, 63): -math.inf,
}


def arrays(length: int, dims: tuple[int, int]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    x, y = (
        jax.random.normal(key, (BATCH, length, HEADS, dim), jnp.bfloat16)
        for key, dim in zip(keys, dims, strict=True)
    )
    for index, value in NONFINITE.items():
        x = x.at[index].set(value)
    return [x, y]


def sanitize(block: int, kernel_dims: tuple[int, int]) -> Any:
    """Return a call of a kernel that sanitizes alone."""

    def call(x: jax.Array, y: jax.Array) -> list[Any]:
        copies = SanitizePass(
            (ArrayToSanitize(x, kernel_dims[0], 0.0), ArrayToSanitize(y, kernel_dims[1], math.nan)),
            block,
        )

        def run(refs: tuple, memory: list[Any]) -> None:
            *tiles, arrived = memory
            copies.sanitize_with_first(refs[:2], refs[2:], lax.axis_index("cta"), tiles, arrived)

        memory, grid = [*copies.buffers, pipeline.barriers(1)], {"cta": math.prod(copies.grid)}
        return copies.sanitized_arrays(
            launch.build_kernel("sanitize", run, memory, copies.outputs, grid, 1)(x, y)
        )

    return call


def check(sanitized: list[Any], x: jax.Array, y: jax.Array, block: int) -> None:
    rows = ~np.isfinite(np.asarray(x, np.float32)).all(-1)
    for array, value, result in ((x, 0.0, sanitized[0]), (y, math.nan, sanitized[1])):
        assert result.is_nonfinite_block.shape == (BATCH, HEADS, -(-x.shape[1] // block))
        expected = np.where(rows[..., None], value, np.asarray(array, np.float32))
        written = np.asarray(result.sanitized, np.float32)
        for (batch, head, i), flag in np.ndenumerate(np.asarray(result.is_nonfinite_block)):
            index = batch, slice(i * block, (i + 1) * block), head
            # A block may be flagged for what is just past it, in the same 64 rows.
            assert flag == 1 or not rows[index].any()
            assert flag == 0 or rows[batch, i * block : i * block + 128, head].any()
            if flag:
                np.testing.assert_array_equal(written[index], expected[index])


CASES = pytest.mark.parametrize(
    "length, dims, kernel_dims, block",
    [
        (128, (64, 64), (64, 64), 64),
        (70, (64, 64), (64, 64), 128),  # a length that ends within a group of rows
        (192, (96, 96), (96, 96), 96),  # no multiple of 64
        (136, (72, 64), (96, 96), 64),  # fewer columns than the kernel has
        (139, (64, 96), (96, 96), 128),
        (128, (192, 128), (192, 128), 128),
    ],
)


@CASES
def test_sanitized_interpreted(length: int, dims: Any, kernel_dims: Any, block: int) -> None:
    x, y = arrays(length, dims)
    check(interpreter.run(sanitize(block, kernel_dims), x, y), x, y, block)


@pytest.mark.gpu
@CASES
def test_sanitized_on_a_gpu(length: int, dims: Any, kernel_dims: Any, block: int) -> None:
    x, y = arrays(length, dims)
    check(jax.jit(sanitize(block, kernel_dims))(x, y), x, y, block)


@pytest.mark.parametrize("side", ["k", "q"])
def test_the_preprocess_searches_where_tokens_may_attend_to_nothing(side: str) -> None:
    """It does so by the mask's arrays, in batch entries of which its code says nothing; among queries, under a
    score."""
    x, _ = arrays(139, (64, 64))
    score = fa.soft_cap(2.0) if side == "q" else None
    spec, _ = parse_call(x, x, x, mask=fa.Lengths(jnp.array([5, 5])), score=score)
    sizes = {"batch": BATCH, "q_len": 139, "kv_len": 139, "q_heads": HEADS, "kv_heads": HEADS}
    mask, config = compile_mods.compile_mask(spec), BackwardConfig(64, 64)
    of_score = compile_mods.compile_score(spec, ())
    problem = kernel_spec.KernelSpec(
        **sizes, scale=1.0, causal_offset=None, mask=mask, score=of_score
    )

    def flags(x: jax.Array, in_doubt: jax.Array) -> jax.Array:
        ones, lse = (
            jnp.ones_like(x),
            jnp.zeros((BATCH, HEADS, arithmetic.round_up(139, config.block_q))),
        )
        factors = preprocess.BackwardOperands(ones, ones, ones, ones)._replace(**{side: x})
        sanitized, _, _ = preprocess.backward_preprocess(
            problem, config, factors, ones, lse, True, in_doubt
        )
        return getattr(sanitized, side).is_nonfinite_block

    everywhere, first, nowhere = (
        np.asarray(interpreter.run(flags, x, jnp.array(entries, jnp.int32)))
        for entries in ([1, 1], [1, 0], [0, 0])
    )
    assert everywhere[0].any() and everywhere[1].any()
    np.testing.assert_array_equal(first[0], everywhere[0])
    assert not first[1].any() and not nowhere.any()


GROUPS = 5
# Values of three keys are not finite; no query attends to one of them, those of a group to each other one.
UNATTENDED, ATTENDED = (70, math.nan), {7: math.inf, 133: math.nan}


@pytest.mark.parametrize(
    "dims, length",
    [((64, 64), 200), ((80, 80), 139), ((96, 96), 200), ((192, 128), 264), ((256, 256), 139)],
)
def test_values_that_are_not_finite_reach_only_queries_that_attend_to_them(
    dims: Any, length: int
) -> None:
    ids = jnp.arange(length) % GROUPS
    mask = fa.mask_fn(lambda q, k: q.ids == k.ids)(
        q_tokens={"ids": ids}, k_tokens={"ids": ids.at[UNATTENDED[0]].set(GROUPS)}
    )
    q, k, v = (
        jax.random.normal(key, (1, length, 1, dim), jnp.bfloat16)
        for key, dim in zip(jax.random.split(jax.random.key(1), 3), (dims[0], *dims), strict=True)
    )

    def attend(v: jax.Array) -> Any:
        run = functools.partial(
            fa.flash_attention, mask=mask, implementation="hopper", return_lse=True
        )
        with planned_for_h200(cores=2):
            return [np.asarray(x) for x in interpreter.run(run, q, k, v)]

    out, lse = attend(v)
    last = dims[1] - 1
    unattended, _ = attend(v.at[0, UNATTENDED[0], 0, last].set(UNATTENDED[1]))
    chex.assert_trees_all_close(unattended, out, atol=1e-2)

    poison = v
    for key, value in ATTENDED.items():
        poison = poison.at[0, key, 0, last].set(value)
    poisoned, lse_of_poisoned = attend(poison)
    attends = np.isin(ids, [key % GROUPS for key in ATTENDED])
    np.testing.assert_array_equal(np.isfinite(poisoned[0, :, 0]).any(-1), ~attends)
    chex.assert_trees_all_close(poisoned[:, ~attends], out[:, ~attends], atol=1e-2)
    chex.assert_trees_all_close(lse_of_poisoned[..., ~attends], lse[..., ~attends], atol=1e-5)
