"""Bugs planted in the Hopper kernels themselves: the bench must catch each kind in each of them.

`tests/test_support.py` does the same with kernels of a few lines. That the kernels pass without a bug
is `test_sm90.py`'s.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.sm90 import backend
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.parse_call import parse_call
from pallas_fa2.planning.plan import make_plan
from tests.support import interpreter
from tests.support.hopper import H200
from tests.support.shared import RaceDetected

wait = Pipeline.consumer_wait


def wait_and_release(ring: Pipeline, step: Any) -> tuple:
    buffers = wait(ring, step)
    plgpu.barrier_arrive(ring.empty.at[ring.empty_offset + ring.stage(step)])
    return buffers


def nothing(*_: Any) -> None:
    pass


BUGS: dict[str, list[tuple[Any, str, Callable]]] = {
    "a slot released early": [
        (Pipeline, "consumer_wait", wait_and_release),
        (Pipeline, "consumer_release", nothing),
    ],
    "a slot filled while it is read": [(Pipeline, "producer_acquire", Pipeline.buffers_at)],
    "a missing fence": [(plgpu, "commit_smem", nothing)],
    "a skipped wait": [(Pipeline, "consumer_wait", Pipeline.buffers_at)],
}


@pytest.fixture(params=BUGS)
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in BUGS[request.param]:
        monkeypatch.setattr(*bug)


# At H = 256 the backward runs on pairs of CTAs. The lengths are such that a ring's slots are filled again.
FORWARDS, BACKWARDS = [(64, 520)], [(128, 140), (256, 140)]
# Where a barrier completes that nobody waits for, the interpreter may see that before the race.
CAUGHT, SAID = (RaceDetected, ValueError), "unordered pair|[Bb]arrier"


def call(head_dim: int, length: int) -> tuple:
    x = jax.random.normal(jax.random.key(0), (1, length, 1, head_dim), jnp.bfloat16)
    spec, operands = parse_call(x, x, x)
    return x, spec, make_plan(spec, H200._replace(num_sms=2), "hopper"), operands


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("head_dim, length", FORWARDS)
def test_a_bug_in_the_forward_is_caught(head_dim: int, length: int) -> None:
    x, spec, plan, operands = call(head_dim, length)
    with pytest.raises(CAUGHT, match=SAID):
        interpreter.run(lambda x: backend.forward(spec, plan.forward, x, x, x, operands), x)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("head_dim, length", BACKWARDS)
def test_a_bug_in_the_backward_is_caught(head_dim: int, length: int) -> None:
    x, spec, plan, operands = call(head_dim, length)
    rows = jnp.zeros((1, 1, x.shape[1]))

    def backward(x: Any) -> Any:
        return backend.backward(spec, plan.backward, x, x, x, x, rows, x, None, operands, ())

    with pytest.raises(CAUGHT, match=SAID):
        interpreter.run(backward, x)
