"""The name of a kernel's module, made independent of what the process has lowered before."""

from typing import Any

import jax

from pallas_fa2.backends.common.inline import inline_op

# jax 0.11 names each module for dumps, unless it has such a name: attention_0, attention_1, ... in the order of
# lowering. The name is among the bytes that it hashes: equal kernels of two programs would be compiled twice, and
# JAX's persistent cache would miss wherever kernels are lowered in another order. jax 0.12 leaves the name out.
NUMBERED = jax.__version_info__ < (0, 12)


def fix_module_name() -> None:
    """Name the module after the kernel in whose body this is called, without a number.

    The dump (MOSAIC_GPU_DUMP_TO) of a second kernel of that name then replaces the first's.
    """
    if NUMBERED:
        _name_module()


@inline_op("name_module")
def _name_module(context: Any) -> None:
    attributes = context.module.operation.attributes
    attributes["mosaic_gpu.dump_basename"] = attributes["sym_name"]
