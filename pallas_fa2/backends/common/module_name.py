"""A kernel's module says nothing of what the process has lowered before."""

from typing import Any

import jax

from pallas_fa2.backends.common.inline import inline_op

# jax 0.11 names each module for dumps, unless it has such a name: attention_0, attention_1, ... as the process
# comes to them. The name is among the bytes that it hashes: equal kernels of two programs would be compiled twice,
# and JAX's persistent cache miss wherever kernels are lowered in another order. jax 0.12 takes it out.
NUMBERED = jax.__version_info__ < (0, 12)


def fix_module_name() -> None:
    """Give the module of the kernel around the name of the kernel, without a number.

    Of two kernels of one name, what is dumped of the second (MOSAIC_GPU_DUMP_TO) then takes the place of the first's.
    """
    if NUMBERED:
        _name_module()


@inline_op("name_module")
def _name_module(context: Any) -> None:
    attributes = context.module.operation.attributes
    attributes["mosaic_gpu.dump_basename"] = attributes["sym_name"]
