"""Inline operations: what the interpreter knows of them, and that it knows all of them."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_fa2 as fa
from pallas_fa2.backends.common.inline import InlineOp, inline_op
from pallas_fa2.backends.common.primitives import launch, thread_ops
from tests.support import inline, interpreter, operations

FILES = sorted(pathlib.Path(fa.__file__).parent.rglob("*.py"))
KNOWN = {
    *inline.LOADED,
    *inline.STORED,
    *inline.ADDED,
    *inline.INLINE,
    *operations.OPERATIONS,
    "copy_rows",
}


def calls(name: str) -> list[ast.Call]:
    """Calls of a function in the package."""
    nodes = (node for file in FILES for node in ast.walk(ast.parse(file.read_text())))
    return [x for x in nodes if isinstance(x, ast.Call) and ast.unparse(x.func).endswith(name)]


def test_the_interpreter_knows_every_operation_and_no_other() -> None:
    """A name that is no constant is an argument of the function around it."""
    first = [
        x.args[0] for f in ("inline_op", "_mask_by_comparison", "_load_operand") for x in calls(f)
    ]
    assert {x.value for x in first if isinstance(x, ast.Constant)} == KNOWN


def test_every_operation_is_made_by_the_decorator() -> None:
    assert len(calls("inline_mgpu")) == 1


def test_the_name_and_the_parameters_are_in_the_equation() -> None:
    layout = plgpu.Layout.WG_SPLAT(shape=())
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout)

    @inline_op("add", layout, result=result, amount=3)
    def code(_, x):
        raise AssertionError("it is not run to be traced")

    (eqn,) = jax.make_jaxpr(code)(np.int32(1)).eqns
    assert eqn.params["mgpu_fn"].op == InlineOp("add", {"amount": 3})


def test_an_unknown_operation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(refs, _):
        refs[0][...] = thread_ops.thread_indices()

    monkeypatch.delitem(inline.INLINE, "thread_indices")
    kernel = launch.build_kernel(
        "unknown", run, [], jax.ShapeDtypeStruct((128,), jnp.int32), {"cta": 1}, 1
    )
    with pytest.raises(KeyError, match="thread_indices"):
        interpreter.run(kernel)
