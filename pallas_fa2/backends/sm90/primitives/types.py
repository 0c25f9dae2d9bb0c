"""Names for what kernels and inline code pass around. Most of it has no public class in JAX."""

from typing import Any

import jax
from jax.experimental import pallas as pl

type Scalar = int | jax.Array  # an int32 that is known when traced, or not
type Ref = Any  # memory: a reference or a view of one in a kernel's body, a memref in inline code
type Barrier = Any  # a reference to one mbarrier, or to an array of them
type Slice = pl.Slice
