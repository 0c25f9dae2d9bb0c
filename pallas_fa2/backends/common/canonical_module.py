"""A kernel's module, made independent of where the library is installed and of what the process has lowered before.

Mosaic compiles a kernel once for each hash of its module in a process, and JAX's persistent cache hashes the whole module
as well. Two things in it do not change the machine code:

- Source locations: paths of this package's files, and names of the transformations that a call was traced under. So a
  forward alone and the same forward beside its backward differed, and so did two installations.
- In jax 0.11 the name for dumps, `attention_0`, `attention_1`, ... in the order of lowering. jax 0.12 does not hash it.
"""

from typing import Any

from jaxlib.mlir import passmanager

from pallas_fa2.backends.common.inline import inline_op


@inline_op("canonicalize_module")
def canonicalize_module(context: Any) -> None:
    """Strip the locations of all operations so far, and name the module after its kernel without a number.

    It must be the last operation of a kernel's body. The operations that Mosaic adds behind it have no paths. The dump
    (MOSAIC_GPU_DUMP_TO) of a second kernel of that name replaces the first's, and dumps of SASS have no line numbers.
    """
    module = context.module.operation
    module.attributes["mosaic_gpu.dump_basename"] = module.attributes["sym_name"]
    strip = passmanager.PassManager.parse("builtin.module(strip-debuginfo)")
    strip.enable_verifier(False)  # the module is not complete yet: its blocks have no terminators
    strip.run(module)
