"""What a kernel is lowered to has no operation that folds away, and the same arrays as before."""

import collections
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import core as mosaic_core
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common import canonical_module
from pallas_fa2.backends.common.primitives.launch import build_kernel
from tests.support import compile_gate
from tests.support.program_keys import CALLS, program_keys


def operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from operations(inner.operation)


def constant(op: Any) -> str | None:
    """Return a constant as text, or None."""
    if op.name != "arith.constant":
        return None
    return f"constant {op.attributes['value']} of {op.results[0].type}"


def lowered_operations(run: Any) -> list[list[str]]:
    """Return the operations of each kernel that is lowered by run(), constants with their values."""
    kernels, serialize = [], mosaic_core._run_serde_pass

    def record(module: Any, **options: Any) -> Any:
        texts = [constant(x) or x.name for x in operations(module.operation)]
        kernels.append(texts)
        return serialize(module, **options)

    with mock.patch.object(mosaic_core, "_run_serde_pass", record):
        run()
    return kernels


def test_operations_that_fold_away_are_not_given_to_mosaic() -> None:
    """Each kernel of a causal call with its gradients has at most 0.6 of them left, and few constants twice."""
    run = lambda: program_keys(CALLS["both"])
    folded = lowered_operations(run)
    with mock.patch.object(canonical_module, "_PIPELINE", "builtin.module(strip-debuginfo)"):
        unfolded = lowered_operations(run)
    assert len(folded) == len(unfolded) == 3
    # Of the smallest kernel's 792 constants 92 are left with jax 0.12.
    share = 0.1 if jax.__version_info__ < (0, 12) else 0.15
    for after, before in zip(folded, unfolded, strict=True):
        assert len(after) < 0.6 * len(before), (len(after), len(before))
        count = lambda texts: sum(x.startswith("constant") for x in texts)
        assert count(after) < share * count(before), collections.Counter(after).most_common(5)


def test_arrays_that_tma_alone_reads_are_kept() -> None:
    """Mosaic makes their descriptors behind the body, when their references are used for the first time."""

    def run(refs: tuple, memory: Any) -> None:
        (source, target), (tile, barrier) = refs, memory
        plgpu.copy_gmem_to_smem(source, tile, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(tile, target)
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    memory = [plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]
    kernel = build_kernel("copy", run, memory, shape, {"cta": 1}, 1)
    (names,) = lowered_operations(lambda: compile_gate.program_for_h200(kernel, shape))
    assert names.count("memref.extract_strided_metadata") == 2
    assert "func.call" in names  # those that make the descriptors
    assert compile_gate.compile_for_h200(kernel, shape)[0].count("UTMALDG") == 1
