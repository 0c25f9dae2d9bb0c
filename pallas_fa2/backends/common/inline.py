"""Operations of a kernel that are written in MLIR and PTX, and the data by which an interpreter knows them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm


@dataclasses.dataclass(frozen=True)
class InlineOp:
    """The name of an operation in inline code, and its parameters that are known when traced.

    The code has it as its attribute `op`. JAX keeps the code among the parameters of the equation
    (`eqn.params["mgpu_fn"].op`), so that an interpreter, which cannot run the code, finds the operation there.
    """

    name: str
    params: Mapping[str, Any]


def inline_op[**Args](
    name: str, *arg_types: Any, result: Any = None, **params: Any
) -> Callable[[Callable[Concatenate[Any, Args], Any]], Callable[Args, Any]]:
    """Return a decorator that makes an operation of code(context, *operands), which emits MLIR.

    `arg_types` are a layout or a `plgpu.RefType` for each operand, `result` is one or several `plgpu.ShapeDtypeStruct`.
    Operands of the operation are arrays and references; the code gets `mgpu.FragmentedArray` and MLIR's memrefs.
    """

    def decorate(code: Callable[Concatenate[Any, Args], Any]) -> Callable[Args, Any]:
        vars(code)["op"] = InlineOp(name, params)
        emit: Any = plgpu.inline_mgpu(arg_types=arg_types, return_type=result)(code)
        return functools.update_wrapper(emit, code)

    return decorate


def asm(
    code: str,
    constraints: str,
    *operands: ir.Value,
    result: ir.Type | None = None,
    side_effects: bool = True,
) -> Any:
    """Emit PTX whose operands follow $0, the result, if it has one. Without side effects LLVM may move it or leave it
    out."""
    kind = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(kind, operands, code, constraints, has_side_effects=side_effects)


def asm_words(
    count: int, code: str, constraints: str, *operands: ir.Value, side_effects: bool = False
) -> list[ir.Value]:
    """Emit PTX and return `count` 32-bit words, $0, $1, ... of the code; the operands follow them."""
    structure = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    constraints = ",".join(["=r"] * count + [constraints])
    words = asm(code, constraints, *operands, result=structure, side_effects=side_effects)
    word = ir.IntegerType.get_signless(32)
    return [llvm.extractvalue(word, words, [i]) for i in range(count)]


def i32(value: int) -> ir.Value:
    """Return an MLIR constant of 32 bits."""
    return arith.constant(ir.IntegerType.get_signless(32), value)
