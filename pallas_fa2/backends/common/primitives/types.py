"""Names for what kernels and inline code pass around. Most of it has no public class in JAX."""

from typing import Any

from jax.experimental import pallas as pl
from jaxlib.mlir import ir

from pallas_fa2 import arithmetic

type Ref = Any  # memory: a reference or a view of one in a kernel's body, a memref in inline code
type Barrier = Any  # a reference to one mbarrier, or to an array of them
type RegisterLayout = Any  # a `plgpu.Layout`, or what a method of one returns
type Registers = Any  # an array in registers: a `jax.Array` in a kernel's body, an `mgpu.FragmentedArray` in inline code
type Scratch = (
    Any  # memory that a kernel allocates: `plgpu.SMEM`, `plgpu.Barrier`, ..., or a pytree of them
)
type Scalar = arithmetic.Scalar  # an int32 that is known when traced, or not
type Slice = pl.Slice
type MlirValue = ir.Value  # a value of one thread in inline code
type RegisterIndex = tuple[int, ...]  # the index of a register in `mgpu.FragmentedArray.registers`
