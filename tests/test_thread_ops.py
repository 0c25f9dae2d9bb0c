"""Operations on an int32 of each thread."""

import jax
import jax.numpy as jnp
import pytest

from pallas_fa2.backends.common.primitives import launch, layouts, thread_ops
from tests.support import interpreter, shared


def test_an_index_that_two_threads_write_is_a_race():
    def run(refs, _):
        thread_ops.scatter(refs[0], thread_ops.thread_indices() >> 1, thread_ops.thread_indices())

    out = jax.ShapeDtypeStruct((layouts.THREADS,), jnp.int32)
    with pytest.raises(shared.RaceDetected, match="written twice"):
        interpreter.run(launch.build_kernel("twice", run, [], out, {"cta": 1}, 1))
