"""Errors and speeds of implementations on one shape: nothing wrong gets a speed."""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from benchmarks.rivals import XLA_SCORES, Implementation, align_of, mask_of, score_of
from benchmarks.shapes import Shape
from pallas_fa2.planning.autotune import median_ms, total_times

# FlashAttention's own rule: twice the error of dense attention in the same dtype.
FACTOR = 2.0
# All implementations are timed one after the other in rounds, in bursts of so many milliseconds, each followed by a
# rest of so many times as long: after some 50 milliseconds near its limit of power an H200 falls from 1.98 to 1.7
# GHz, and what runs then, or next, is slower.
ROUNDS, BURST, RESTS = 3, 30.0, 3


def inputs(shape: Shape, seed: int = 0) -> tuple[jax.Array, ...]:
    """query, key, value, the cotangent of the output, and the `data` that a shape may have."""
    keys = jax.random.split(jax.random.key(seed), 5)
    of_q, of_k = (shape.q_len, shape.q_heads), (shape.kv_len, shape.kv_heads)
    dim, value_dim = shape.head_dim, shape.value_dim or shape.head_dim
    sizes = (*of_q, dim), (*of_k, dim), (*of_k, value_dim), (*of_q, value_dim)
    arrays = tuple(
        jax.random.normal(key, (shape.batch, *size), jnp.bfloat16)
        for key, size in zip(keys, sizes, strict=False)
    )
    if shape.bias:
        pairs = (1, shape.q_heads, shape.q_len, shape.kv_len)
        return (*arrays, jax.random.normal(keys[4], pairs, jnp.bfloat16))
    if shape.documents:
        starts = np.cumsum((0, *shape.documents[:-1]), dtype=np.int32)
        return (*arrays, jnp.asarray(np.repeat(starts, shape.documents))[None])
    return arrays


def without_dout(args: tuple) -> tuple:
    return (*args[:3], *args[4:])


def with_gradients(attention: Callable) -> Callable:
    """(q, k, v, dout, *data) -> out, dq, dk, dv and the gradients of data that are floats."""

    def run(q: Any, k: Any, v: Any, dout: Any, *data: Any) -> tuple:
        out, pull = jax.vjp(attention, q, k, v, *data)
        gradients = jax.tree.leaves(pull(dout))
        return (out, *(x for x in gradients if x.dtype != jax.dtypes.float0))

    return run


def corners(arrays: tuple, shape: Shape) -> tuple:
    """The heads of the first key head and of the last, of what `inputs` or `with_gradients` gives.

    Dense attention has room for so many, and a kernel that loses its way loses one of them.
    """

    def of(x: jax.Array, axis: int) -> jax.Array:
        heads = x.shape[axis] // shape.kv_heads
        first = jax.lax.slice_in_dim(x, 0, heads, axis=axis)
        return jnp.concatenate([first, jax.lax.slice_in_dim(x, -heads, None, axis=axis)], axis)

    data = (of(x, 1) if shape.bias else x for x in arrays[4:])
    return (*(of(x, 2) for x in arrays[:4]), *data)


class Turn:
    """Whose turn it is on the GPU, where several processes compile at the same time."""

    lock: contextlib.AbstractContextManager = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Problem:
    """A shape with q, k, v, dout and data; out and all gradients in its corners; their limits."""

    shape: Shape
    args: tuple[jax.Array, ...]
    expected: tuple[jax.Array, ...]
    allowed: list[float]


def prepared(shape: Shape, backward: bool = True) -> Callable[[], Problem]:
    """Random data, dense float32 attention, and what dense attention in bfloat16 allows: compiled, not yet
    run.

    Where there is no room for dense scores, the blockwise implementation stands for the dense one.
    """
    heads = 2 * shape.q_heads // shape.kv_heads
    fits = shape.score_bytes / shape.q_heads * heads <= XLA_SCORES

    def dense(q: Any, k: Any, v: Any, data: Any = None) -> jax.Array:
        return fa.flash_attention(
            q, k, v, mask=mask_of(shape, data), score=score_of(shape, data),
            align=align_of(shape), implementation="reference" if fits else "blockwise",
        )  # fmt: skip

    def forward(q: Any, k: Any, v: Any, _: Any, *data: Any) -> tuple:
        return (dense(q, k, v, *data),)

    def truth(*args: Any) -> tuple:
        run = with_gradients(dense) if backward else forward
        cut = corners(args, shape)
        expected = run(*(_widened(x) for x in cut))
        return expected, distances(run(*cut), expected)

    args = jax.eval_shape(lambda: inputs(shape))
    run = jax.jit(truth).lower(*args).compile()

    def solve() -> Problem:
        args = inputs(shape)
        expected, errors = run(*args)
        return Problem(shape, args, expected, [FACTOR * e for e in _rounded(errors)])

    return solve


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def distances(results: tuple, expected: tuple) -> list[jax.Array]:
    """Frobenius norms of the differences over those of the expected."""
    norm = jnp.linalg.norm
    pairs = zip(results, expected, strict=True)
    return [norm(x.astype(jnp.float32) - y) / norm(y) for x, y in pairs]


def _rounded(numbers: list[jax.Array]) -> list[float]:
    return [float(f"{x:.3g}") for x in numbers]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of a problem's arguments that returns a tuple, compiled; or why it is not."""

    run: Callable[..., tuple] | None
    error: Callable[..., list] | None  # of what `run` returns, beside the expected
    seconds: float
    refused: str = ""

    @classmethod
    def of(cls, fn: Callable, args: tuple, shape: Shape) -> "Program":
        def error(results: tuple, expected: tuple) -> list[jax.Array]:
            return distances(corners(results, shape), expected)

        def expected(results: tuple) -> tuple:
            return tuple(_widened(x) for x in corners(results, shape))

        start = time.perf_counter()
        try:
            lowered = jax.jit(fn).lower(*args)
            run = lowered.compile()
            seconds = time.perf_counter() - start
            results = lowered.out_info
            check = jax.jit(error).lower(results, jax.eval_shape(expected, results)).compile()
            return cls(run, check, seconds)
        except Exception as e:  # noqa: BLE001 - a rival without this shape must not end the run
            return cls(None, None, 0.0, reason(e))

    def checked(self, args: tuple, problem: Problem) -> dict[str, Any]:
        """The time of the first call and the error, or the reason why there is none."""
        if self.run is None or self.error is None:
            return {"refused": self.refused}
        try:
            start = time.perf_counter()
            results = jax.block_until_ready(self.run(*args))
            first_call = self.seconds + time.perf_counter() - start
            error = _rounded(self.error(results, problem.expected[: len(results)]))
        except Exception as e:  # noqa: BLE001 - nor one that runs and fails
            return {"refused": cause(e, args)}
        # Not `any(e > limit ...)`: NaN is above no limit.
        if not all(e <= limit for e, limit in zip(error, problem.allowed, strict=False)):
            return {"refused": "wrong result", "error": error}
        return {"first_call_s": round(first_call, 2), "error": error}


def burst(run: Callable, args: tuple, count: int) -> list[float]:
    """Milliseconds of so many launches, in a row after a first; then the GPU rests."""
    times = total_times(run, args, count)
    time.sleep(1e-3 * RESTS * (sum(times) + times[0]))
    return times


def cause(e: Exception, args: tuple) -> str:
    """Why a call failed. After a fault that killed the device this raises too: the run ends here, instead
    of blaming everybody else."""
    jax.block_until_ready(-args[0])
    return reason(e)


def reason(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


class Programs(NamedTuple):
    """An implementation on a shape."""

    forward: Program
    both: Program | None

    @classmethod
    def of(cls, attention: Callable, shape: Shape, backward: bool) -> "Programs":
        args = jax.eval_shape(lambda: inputs(shape))
        forward = Program.of(lambda *x: (attention(*x),), without_dout(args), shape)
        if forward.refused or not backward:
            return cls(forward, None)
        return cls(forward, Program.of(with_gradients(attention), args, shape))


def speeds(
    programs: Mapping[str, Program], args: tuple, flops: float, problem: Problem, iterations: int
) -> dict[str, dict]:
    """TFLOP/s of each by the median of all its launches, or the reason why there is none."""
    found = {name: program.checked(args, problem) for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in itertools.count():
        wanting = [
            name
            for name, row in found.items()
            if "refused" not in row and (turn < ROUNDS or len(times[name]) < iterations)
        ]
        if not wanting:
            break
        for name in wanting if turn % 2 == 0 else reversed(wanting):
            known = times[name]
            count = min(iterations, max(1, int(BURST / known[0]))) if known else 1
            try:
                run = programs[name].run
                assert run is not None
                known += burst(run, args, count)
            except Exception as e:  # noqa: BLE001 - as in `checked`
                found[name] = {"refused": cause(e, args)}
    for name, row in found.items():
        if "refused" not in row:
            ms = statistics.median(times[name])
            speed = {"tflops": float(f"{flops / ms * 1e-9:.4g}"), "ms": float(f"{ms:.4g}")}
            found[name] = speed | row
    return found


def rows(
    programs: Mapping[str, Programs], problem: Problem, iterations: int
) -> dict[str, dict[str, dict]]:
    """`speeds` of the forward and, if wanted and unless that is refused, of forward + backward."""
    shape = problem.shape
    forwards = {name: program.forward for name, program in programs.items()}
    args = without_dout(problem.args)
    forward = speeds(forwards, args, shape.forward_flops, problem, iterations)
    boths = {
        name: program.both
        for name, program in programs.items()
        if program.both is not None and "refused" not in forward[name]
    }
    both = speeds(boths, problem.args, shape.both_flops, problem, iterations)
    return {
        name: {"forward": row} | ({"both": both[name]} if name in both else {})
        for name, row in forward.items()
    }


def measure(
    shape: Shape,
    implementations: Mapping[str, Implementation],
    iterations: int,
    backward: bool = True,
) -> dict[str, Any]:
    """A row for each implementation, the shape, and the errors allowed: of out, dq, dk, dv, dbias.

    Nothing runs on the GPU before it is this process's `Turn`.
    """
    solve = prepared(shape, backward)
    programs = {
        name: Programs.of(functools.partial(implementation.attention, shape), shape, backward)
        for name, implementation in implementations.items()
    }
    with Turn.lock:
        given = solve()
        found = rows(programs, given, iterations)
    return {"shape": dataclasses.asdict(shape), "allowed": given.allowed, "rows": found}


def matmul(iterations: int, size: int = 8192) -> float:
    """TFLOP/s of a product of square bfloat16 matrices of random data: the ceiling."""
    a, b = jax.random.normal(jax.random.key(1), (2, size, size), jnp.bfloat16)
    return 2 * size**3 / median_ms(jax.jit(jnp.matmul), (a, b), iterations) * 1e-9
