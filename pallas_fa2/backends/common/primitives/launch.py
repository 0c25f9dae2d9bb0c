"""Mosaic GPU kernels, and how XLA calls them."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.canonical_module import canonicalize_module
from pallas_fa2.backends.common.primitives.types import Ref, Scratch
from pallas_fa2.ir.mesh import varying_axes


def isolate_from_fusion(kernel: Callable) -> Callable:
    """Return the kernel on arrays that have memory of their own.

    XLA would fuse it with slices around it, as in a scan, and has it read and write in the middle of
    larger arrays. Mosaic wants arrays aligned to 256 bytes, and what a kernel adds to (`pl.run_state`) is
    no longer what it was before.
    """
    barrier = lax.optimization_barrier
    return lambda *arrays: barrier(kernel(*barrier(arrays)))


def build_kernel(
    name: str,
    run: Callable,
    memory: Scratch,
    out_type: Any,
    grid: dict[str, int],
    warpgroups: int,
    cluster: Mapping[str, int] = types.MappingProxyType({}),
    reduction_bytes: int = 0,
) -> Callable[..., Any]:
    """Return a kernel: run(arrays in device memory, memory) in every warpgroup of every CTA.

    Profiles show its name. `memory` is a pytree of what a CTA allocates; `grid` counts clusters. Without `out_type` the
    kernel writes to references, and the caller has to isolate from fusion what makes these (`isolate_from_fusion`).
    Pallas's reductions across warps take `reduction_bytes` of shared memory.
    """
    flat, tree = jax.tree.flatten(memory)

    def body(*refs: Ref) -> None:
        num_arrays = len(refs) - len(flat)
        run(refs[:num_arrays], jax.tree.unflatten(tree, refs[num_arrays:]))
        canonicalize_module()

    body.__name__ = name
    params = plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=reduction_bytes,
        # The kernels name their layouts. Pallas's default infers them, for longer than all else takes.
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=flat,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=params,
    )
    writes_references = not jax.tree.leaves(out_type)
    return kernel if writes_references else isolate_from_fusion(kernel)


def run_in_place(
    name: str,
    run: Callable,
    memory: Scratch,
    inputs: Any,
    outputs: Any,
    grid: dict[str, int],
    warpgroups: int,
    cluster: Mapping[str, int] = types.MappingProxyType({}),
) -> Any:
    """Return `outputs` as they are after run(inputs, outputs, memory) in every warpgroup of every CTA.

    Both are pytrees of arrays, of which `run` gets references. A kernel adds to the outputs or overwrites some of them.
    """
    read, read_tree = jax.tree.flatten(inputs)
    written, written_tree = jax.tree.flatten(outputs)

    def body(refs: tuple, memory: Any) -> None:
        inputs = jax.tree.unflatten(read_tree, refs[: len(read)])
        outputs = jax.tree.unflatten(written_tree, refs[len(read) :])
        run(inputs, outputs, memory)

    kernel = build_kernel(name, body, memory, (), grid, warpgroups, cluster)

    @isolate_from_fusion
    def after(read: list, written: tuple) -> tuple:
        def launch(refs: tuple) -> None:
            for ref, x in zip(refs, written, strict=True):
                if varying_axes(x):
                    ref[...] = x
            kernel(*read, *refs)

        # Inside `shard_map` JAX refuses kernels that write to references of arrays that vary over mesh axes. References
        # of empty arrays do not vary, and the arrays are stored into them; XLA removes the stores. A caller has
        # the results vary as inputs do (`match_varying_axes`).
        initial = tuple(lax.empty(x.shape, x.dtype) if varying_axes(x) else x for x in written)
        return pl.run_state(launch)(initial)

    return jax.tree.unflatten(written_tree, after(read, tuple(written)))
