"""Score functions, which modify scores between the scaled product and the mask.

They apply from left to right to `scale * q·k`, may read data of tokens, pairs, heads and batch entries and shared data,
and are differentiable in that data.
"""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_fa2.ir.arrays import AuxArrays, CallShape
from pallas_fa2.ir.tokens import Context, Token
from pallas_fa2.pytree_fn import UserFn, call_with_context


class Score(UserFn):
    """A scalar function of a score and its two tokens (see `score_fn`)."""

    def normalized_data(self, dims: CallShape) -> AuxArrays:
        """Return its arrays with the five leading axes of one call."""
        labels = {"bias": "bias"} if self.fn is _add_bias else {}
        return self.data().to_leading_axes(repr(self), dims, labels)

    def evaluate(self, s: Any, q_index: Any, k_index: Any, data: AuxArrays, dims: CallShape) -> Any:
        q, k, c = data.views(q_index, k_index, dims)
        return call_with_context(self.fn, (s, q, k), c)


def score_fn(fn: Callable) -> Score:
    """Make a score from a function `fn(s, q, k)` or `fn(s, q, k, c)` of a score and two tokens.

    `s` is the scaled score, a float32 scalar (float64 for float64 inputs); the result, of its dtype, replaces it::

        @score_fn
        def relative(s, q, k, c):
            return s - c.slope * abs(q.index - k.index)

        score = relative(heads={"slope": slopes})             # [N]

    Its data are of the same kinds as those of `mask_fn`, and the same holds for `jit`. Gradients flow to floating-point
    data of every kind.

    Raises:
      TypeError, ValueError: when attention is called: the function captures an array, returns no such scalar, or its
        data do not fit the call.
    """
    return Score(fn)


def soft_cap(cap: float) -> Score:
    """Make the score `cap * tanh(s / cap)` (Gemma 2, arXiv:2408.00118, section 2).

    Raises:
      TypeError, ValueError: cap is no Python number, or is not positive.
    """
    if not isinstance(cap, numbers.Real):
        raise TypeError(
            f"cap must be a Python number, but it is {cap!r}; for a learned cap write "
            "score_fn(lambda s, q, k, c: c.cap * jnp.tanh(s / c.cap))(params={'cap': cap})"
        )
    if not cap > 0:
        raise ValueError(
            f"cap must be a positive number, but it is {cap!r}; leave the score out for no cap"
        )
    return Score(SoftCap(float(cap)))


@dataclasses.dataclass(frozen=True)
class SoftCap:
    """The function of `soft_cap`, equal for equal caps and picklable."""

    cap: float

    def __call__(self, s: Any, q: Token, k: Token) -> Any:
        return self.cap * jnp.tanh(s / self.cap)


def _linear_bias(s: Any, q: Token, k: Token, c: Context) -> Any:
    return s - c.slope.astype(s.dtype) * abs(q.index - k.index).astype(s.dtype)


def alibi(slopes: int | Float[Array, " N"]) -> Score:
    """Make the score `s - slope[head] * |q.index - k.index|` (attention with linear biases, arXiv:2108.12409).

    `slopes` are floats `[N]`, one for each query head, or the number of heads N for the paper's geometric slopes
    `2^(-8 (n + 1) / N)`.
    """
    if isinstance(slopes, int):
        slopes = 2.0 ** (-8.0 * jnp.arange(1, slopes + 1, dtype=jnp.float32) / slopes)
    return Score(_linear_bias, heads={"slope": jnp.asarray(slopes)})


def _add_bias(s: Any, q: Token, k: Token, c: Context) -> Any:
    return s + c.bias.astype(s.dtype)


def bias(array: Float[Array, "..."]) -> Score:
    """Make the score that adds an array, which broadcasts to `[*B, N, T, S]`; its gradient has the array's shape.

    Raises:
      TypeError: the array is boolean.
    """
    array = array if hasattr(array, "shape") else jnp.asarray(array)
    if array.dtype == jnp.bool_:
        raise TypeError(
            "bias must be numbers that are added to the scores, but it is boolean; pass it as mask=, True where a query "
            "attends to a key"
        )
    return Score(_add_bias, pairs={"bias": array})


def as_scores(score: Any) -> tuple[Score, ...]:
    """Return None, a score, a function or a sequence of these as a tuple of scores."""
    if score is None:
        return ()
    scores = tuple(score) if isinstance(score, tuple | list) else (score,)
    for s in scores:
        if not isinstance(s, Score) and not callable(s):
            raise TypeError(
                f"score must be a score function or a tuple of them, but it holds "
                f"{type(s).__name__}; wrap a dense array as bias(array)"
            )
    return tuple(s if isinstance(s, Score) else Score(s) for s in scores)
