"""Threads that write numbers of their own."""

import jax
import jax.numpy as jnp
import pytest

from pallas_fa2.kernels import lanes, mosaic
from tests.support import interpreter, shared


def test_a_place_that_two_threads_write_is_a_race():
    def run(refs, _):
        lanes.scatter(refs[0], lanes.thread_numbers() >> 1, lanes.thread_numbers())

    out = jax.ShapeDtypeStruct((lanes.THREADS,), jnp.int32)
    with pytest.raises(shared.RaceDetected, match="written twice"):
        interpreter.run(mosaic.launch("twice", run, [], out, {"cta": 1}, 1))
