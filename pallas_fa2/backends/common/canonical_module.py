"""A kernel's module, made small, and independent of where the library is installed and of what the process has lowered
before.

Mosaic compiles a kernel once for each hash of its module in a process, and JAX's persistent cache hashes the whole
module as well. Two things in it do not change the machine code:

- Source locations: paths of this package's files, and names of the transformations that a call was traced under. So a
  forward alone and the same forward beside its backward differed, and so did two installations.
- In jax 0.11 the name for dumps, `attention_0`, `attention_1`, ... in the order of lowering. jax 0.12 does not hash it.

Half of the operations that Pallas lowers a kernel to are constants, what follows from constants alone, and values that
nobody uses, such as what a store to shared memory replaces. Mosaic would find that too, but first it writes, hashes and
reads them, and searches them for equal results of loops that carry more than a hundred values: half of a compilation
(docs/decisions/0071-first-calls.md). Folded before, the machine code is the same.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir, passmanager

from pallas_fa2.backends.common.inline import inline_op

# No pattern has that label, so that `canonicalize` only folds constants, keeps one of each, and drops what nobody uses.
# Blocks are left as they are, as the last ones have no terminators yet.
_FOLD = "canonicalize{enable-patterns=none region-simplify=disabled}"
_PIPELINE = f"builtin.module(strip-debuginfo,func.func({_FOLD}))"


@inline_op("canonicalize_module")
def canonicalize_module(context: Any) -> None:
    """Strip the locations of all operations so far, fold these, and name the module after its kernel without a number.

    It must be the last operation of a kernel's body: values from before it may be gone. The operations that Mosaic adds
    behind it have no paths. The dump (MOSAIC_GPU_DUMP_TO) of a second kernel of that name replaces the first's, and
    dumps of SASS have no line numbers.
    """
    module = context.module.operation
    module.attributes["mosaic_gpu.dump_basename"] = module.attributes["sym_name"]
    passes = passmanager.PassManager.parse(_PIPELINE)
    passes.enable_verifier(False)  # the module is not complete yet: its blocks have no terminators
    with _arrays_in_use(module):
        passes.run(module)


@contextlib.contextmanager
def _arrays_in_use(module: Any) -> Iterator[None]:
    """Give the kernel's arrays on the host a user while passes run.

    Behind the body, Mosaic makes a descriptor of each array that TMA copies, from a reference that nobody uses so far.
    """
    (main,) = [
        x
        for x in module.regions[0].blocks[0]
        if x.operation.name == "func.func" and x.regions[0].blocks
    ]
    block = main.regions[0].blocks[0]
    values = [result for op in block for result in op.results]
    arrays = [x for x in values if isinstance(x.type, ir.MemRefType)]
    # A call may do anything, so it is not dropped. No such function exists, nor does the call when the module is
    # verified.
    callee: ir.Attribute = ir.FlatSymbolRefAttr.get("arrays_in_use")
    with ir.InsertionPoint(block), ir.Location.unknown():
        call = ir.Operation.create("func.call", operands=arrays, attributes={"callee": callee})
    yield
    if list(call.operands) != arrays:  # they would be references to what is no more
        raise AssertionError("an array of the kernel was folded into another one")
    call.erase()
