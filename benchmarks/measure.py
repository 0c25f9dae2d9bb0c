"""Measures errors and speeds of implementations on one shape; a wrong result gets no speed."""

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
from benchmarks import record, remote
from benchmarks.rivals import Implementation, align_of, mask_of, score_limit, score_of
from benchmarks.shapes import Shape
from pallas_fa2.planning.autotune import median_ms, total_times

# FlashAttention's rule: at most twice the error of dense attention in the same dtype.
FACTOR = 2.0
# All implementations are timed one after the other in ROUNDS rounds, in bursts of BURST milliseconds, each followed by
# a rest of RESTS times as long: after some 50 milliseconds near its power limit an H200 falls from 1.98 to 1.7 GHz, and
# what runs then, or next, is slower.
ROUNDS, BURST, RESTS = 3, 30.0, 3


def inputs(shape: Shape, seed: int = 0) -> tuple[jax.Array, ...]:
    """Return query, key, value, the cotangent of the output, and the bias or the starts of documents, if any."""
    keys = jax.random.split(jax.random.key(seed), 5)
    q_shape, k_shape = (shape.q_len, shape.q_heads), (shape.kv_len, shape.kv_heads)
    dim, value_dim = shape.head_dim, shape.value_dim or shape.head_dim
    sizes = (*q_shape, dim), (*k_shape, dim), (*k_shape, value_dim), (*q_shape, value_dim)
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
    """Return a function (q, k, v, dout, *data) -> out, dq, dk, dv and the gradients of floating-point data."""

    def run(q: Any, k: Any, v: Any, dout: Any, *data: Any) -> tuple:
        out, vjp = jax.vjp(attention, q, k, v, *data)
        gradients = jax.tree.leaves(vjp(dout))
        return (out, *(x for x in gradients if x.dtype != jax.dtypes.float0))

    return run


def edge_heads(arrays: tuple, shape: Shape) -> tuple:
    """Slice the result of `inputs` or `with_gradients` to the query heads of the first and of the last key head.

    The scores of these fit in memory, and an indexing error in a kernel shows in one of them.
    """

    def slice_heads(x: jax.Array, axis: int) -> jax.Array:
        heads = x.shape[axis] // shape.kv_heads
        first = jax.lax.slice_in_dim(x, 0, heads, axis=axis)
        return jnp.concatenate([first, jax.lax.slice_in_dim(x, -heads, None, axis=axis)], axis)

    data = (slice_heads(x, 1) if shape.bias else x for x in arrays[4:])
    return (*(slice_heads(x, 2) for x in arrays[:4]), *data)


class Gpu:
    """The lock of the GPU, where several processes compile at the same time."""

    lock: contextlib.AbstractContextManager = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Problem:
    """A shape with its inputs, the expected out and gradients of its `edge_heads`, and their allowed errors."""

    shape: Shape
    args: tuple[jax.Array, ...]
    expected: tuple[jax.Array, ...]
    allowed: list[float]


def compile_problem(shape: Shape, backward: bool = True) -> Callable[[], Problem]:
    """Compile dense float32 attention and the error of dense bfloat16 attention; return a function that runs them.

    Where dense scores do not fit in memory, `blockwise` computes both.
    """
    heads = 2 * shape.q_heads // shape.kv_heads
    fits = shape.score_bytes / shape.q_heads * heads <= score_limit()

    def dense(q: Any, k: Any, v: Any, data: Any = None) -> jax.Array:
        return fa.flash_attention(
            q, k, v, mask=mask_of(shape, data), score=score_of(shape, data),
            align=align_of(shape), implementation="reference" if fits else "blockwise",
        )  # fmt: skip

    def forward(q: Any, k: Any, v: Any, _: Any, *data: Any) -> tuple:
        return (dense(q, k, v, *data),)

    def truth(*args: Any) -> tuple:
        run = with_gradients(dense) if backward else forward
        heads = edge_heads(args, shape)
        expected = run(*(_widened(x) for x in heads))
        return expected, relative_errors(run(*heads), expected)

    args = jax.eval_shape(lambda: inputs(shape))
    run = jax.jit(truth).lower(*args).compile()

    def solve() -> Problem:
        args = inputs(shape)
        expected, errors = run(*args)
        return Problem(shape, args, expected, [FACTOR * e for e in _rounded(errors)])

    return solve


def _widened(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def relative_errors(results: tuple, expected: tuple) -> list[jax.Array]:
    """Return the Frobenius norm of each error over that of the expected array."""
    norm = jnp.linalg.norm
    pairs = zip(results, expected, strict=True)
    return [norm(x.astype(jnp.float32) - y) / norm(y) for x, y in pairs]


def _rounded(errors: list[jax.Array]) -> list[float]:
    return [float(f"{x:.3g}") for x in errors]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function of a problem's inputs that returns a tuple, or the reason why it does not compile."""

    run: Callable[..., tuple] | None
    error: Callable[..., list] | None  # of the results, given the expected ones
    seconds: float  # of compilation
    refused: str = ""

    @classmethod
    def compile(cls, fn: Callable, args: tuple, shape: Shape) -> "Program":
        start = time.perf_counter()
        try:
            lowered = jax.jit(fn).lower(*args)
            run = lowered.compile()
            seconds = time.perf_counter() - start
            return cls(run, compile_error(shape, lowered.out_info), seconds)
        except Exception as e:  # noqa: BLE001 - a rival without this shape must not end the run
            return cls(None, None, 0.0, short_error(e))

    def checked(self, args: tuple, problem: Problem) -> dict[str, Any]:
        """Return the time of the first call and the errors, or the reason why there are none."""
        if self.run is None or self.error is None:
            return {"refused": self.refused}
        try:
            start = time.perf_counter()
            results = jax.block_until_ready(self.run(*args))
            first_call = self.seconds + time.perf_counter() - start
            errors = self.error(results, problem.expected[: len(results)])
        except Exception as e:  # noqa: BLE001 - nor one that runs and fails
            return {"refused": describe_failure(e, args)}
        row = graded(errors, problem)
        return row if "refused" in row else {"first_call_s": round(first_call, 2), **row}

    def times(self, args: tuple, count: int) -> list[float]:
        """Return the milliseconds of `count` consecutive launches after a first one."""
        assert self.run is not None
        return total_times(self.run, args, count)


def compile_error(shape: Shape, results: tuple) -> Callable[[tuple, tuple], list[jax.Array]]:
    """Compile the errors of results of these shapes and dtypes, a function of them and of the expected ones."""

    def error(results: tuple, expected: tuple) -> list[jax.Array]:
        return relative_errors(edge_heads(results, shape), expected)

    def expected(results: tuple) -> tuple:
        return tuple(_widened(x) for x in edge_heads(results, shape))

    return jax.jit(error).lower(results, jax.eval_shape(expected, results)).compile()


def graded(errors: list[jax.Array], problem: "Problem") -> dict[str, Any]:
    """Return the errors as a part of a row, which has no speed if one is larger than allowed."""
    error = _rounded(errors)
    # `any(e > limit ...)` would be False for NaN.
    if not all(e <= limit for e, limit in zip(error, problem.allowed, strict=False)):
        return {"refused": "wrong result", "error": error}
    return {"error": error}


def burst(run: Callable, args: tuple, count: int) -> list[float]:
    """Return the milliseconds of `count` consecutive launches after a first one, and let the GPU rest."""
    return rest_after(total_times(run, args, count))


def rest_after(times: list[float]) -> list[float]:
    """Let the GPU rest after a burst of launches, with a first one that was not timed; return their milliseconds."""
    time.sleep(1e-3 * RESTS * (sum(times) + times[0]))
    return times


def describe_failure(e: Exception, args: tuple) -> str:
    """Describe why a call failed; raise if the device is dead, as all later calls would fail as well."""
    jax.block_until_ready(-args[0])
    return short_error(e)


def short_error(e: Exception) -> str:
    return f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"


@dataclasses.dataclass(frozen=True)
class RemoteProgram:
    """The forward, or forward and backward, that a worker runs, with the methods of a `Program`."""

    worker: remote.Worker
    phase: str  # "forward" or "both"
    types: tuple[jax.ShapeDtypeStruct, ...]  # of the results
    error: Callable[..., list]  # of the results, given the expected ones

    @classmethod
    def compile(cls, worker: remote.Worker, phase: str) -> "RemoteProgram":
        q, k, v, dout, *_ = jax.eval_shape(lambda: inputs(worker.shape))
        types = (dout,) if phase == "forward" else (dout, q, k, v)
        return cls(worker, phase, types, compile_error(worker.shape, types))

    def checked(self, args: tuple, problem: Problem) -> dict[str, Any]:
        """Return the errors, or the reason why there are none."""
        try:
            self.worker.load(problem.args[:4])
            arrays = self.worker.ask("results", self.phase)
        except RuntimeError as e:
            return {"refused": short_error(e)}
        each = zip(arrays, self.types, strict=True)
        results = tuple(jnp.asarray(x.view(y.dtype)) for x, y in each)
        return graded(self.error(results, problem.expected[: len(results)]), problem)

    def times(self, args: tuple, count: int) -> list[float]:
        """Return the milliseconds of `count` consecutive runs after a first one."""
        return self.worker.ask("times", self.phase, count)


class Programs(NamedTuple):
    """The forward and the forward + backward of an implementation on a shape."""

    forward: Program | RemoteProgram
    both: Program | RemoteProgram | None

    @classmethod
    def compile(cls, attention: Callable, shape: Shape, backward: bool) -> "Programs":
        args = jax.eval_shape(lambda: inputs(shape))
        forward = Program.compile(lambda *x: (attention(*x),), without_dout(args), shape)
        if forward.refused or not backward:
            return cls(forward, None)
        return cls(forward, Program.compile(with_gradients(attention), args, shape))

    @classmethod
    def of_worker(cls, worker: remote.Worker, backward: bool) -> "Programs":
        both = RemoteProgram.compile(worker, "both") if backward else None
        return cls(RemoteProgram.compile(worker, "forward"), both)


def speeds(
    programs: Mapping[str, Program | RemoteProgram],
    args: tuple,
    flops: float,
    problem: Problem,
    iterations: int,
) -> dict[str, dict]:
    """Return the TFLOP/s of each program by the median of all its launches, or the reason why there is none."""
    rows = {name: program.checked(args, problem) for name, program in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in itertools.count():
        remaining = [
            name
            for name, row in rows.items()
            if "refused" not in row and (turn < ROUNDS or len(times[name]) < iterations)
        ]
        if not remaining:
            break
        for name in remaining if turn % 2 == 0 else reversed(remaining):
            count = min(iterations, max(1, int(BURST / times[name][0]))) if times[name] else 1
            try:
                times[name] += rest_after(programs[name].times(args, count))
            except Exception as e:  # noqa: BLE001 - as in `checked`
                rows[name] = {"refused": describe_failure(e, args)}
    for name, row in rows.items():
        if "refused" not in row:
            ms = statistics.median(times[name])
            speed = {"tflops": record.rounded(flops / ms * 1e-9), "ms": record.rounded(ms)}
            rows[name] = speed | row
    return rows


def measure_programs(
    programs: Mapping[str, Programs], problem: Problem, iterations: int
) -> dict[str, dict[str, dict]]:
    """Return the `speeds` of the forward and of forward + backward, if there is one and the forward is not refused."""
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
    """Return a row for each implementation, the shape, and the allowed errors of out, dq, dk, dv and dbias.

    Nothing runs on the GPU before this process holds its lock.
    """
    with contextlib.ExitStack() as workers:
        # They import their libraries while programs are compiled here.
        started = {
            name: workers.enter_context(remote.Worker(x.worker, shape))
            for name, x in implementations.items()
            if x.worker is not None
        }
        solve = compile_problem(shape, backward)
        programs = {
            name: Programs.of_worker(started[name], backward)
            if name in started
            else Programs.compile(functools.partial(x.attention, shape), shape, backward)
            for name, x in implementations.items()
        }
        with Gpu.lock:
            problem = solve()
            rows = measure_programs(programs, problem, iterations)
    return {"shape": dataclasses.asdict(shape), "allowed": problem.allowed, "rows": rows}


def matmul(iterations: int, size: int = 8192) -> float:
    """Return the TFLOP/s of a product of square bfloat16 matrices of random data, the attainable peak."""
    a, b = jax.random.normal(jax.random.key(1), (2, size, size), jnp.bfloat16)
    return 2 * size**3 / median_ms(jax.jit(jnp.matmul), (a, b), iterations) * 1e-9
