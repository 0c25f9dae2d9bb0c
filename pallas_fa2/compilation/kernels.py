"""The Mosaic kernels of a lowered launch, each compiled by a small program of its own.

XLA's CUDA plugin compiles a Mosaic kernel when XLA compiles a program that calls it, one kernel after another, and
keeps it in the process under the hash of its module. So a program whose kernels other programs have compiled, in
threads or by being loaded from disk, takes only what XLA itself needs.
"""

import concurrent.futures
import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import serialize_executable
from jaxlib.mlir import ir

TARGET = "mosaic_gpu_v2"

log = logging.getLogger("pallas_fa2")

# A call with its gradient has up to eight kernels. Compilation holds no lock of Python's.
_pool = concurrent.futures.ThreadPoolExecutor(
    min(8, os.cpu_count() or 1), thread_name_prefix="pallas_fa2"
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A Mosaic kernel: the attributes of its custom call."""

    attributes: tuple[tuple[str, Any], ...]

    @property
    def hash(self) -> bytes:
        """The hash by which the plugin knows the kernel. The plugin compares no modules."""
        return dict(self.attributes)["kernel_hash"]

    @property
    def is_intact(self) -> bool:
        """Whether the hash is that of the module."""
        return hashlib.sha256(dict(self.attributes)["module"]).digest() == self.hash

    def lower(self, device: Any) -> jax.stages.Lowered:
        """Lower a program that calls the kernel for a device; None is the default one.

        It is compiled and never run, so it has no operands and a result of any type.
        """
        result = jax.ShapeDtypeStruct((), jnp.float32)
        sharding = None if device is None else jax.sharding.SingleDeviceSharding(device)

        def call() -> jax.Array:
            return jax.ffi.ffi_call(TARGET, result, has_side_effect=True)(**dict(self.attributes))

        with jax.default_device(device):
            return jax.jit(call, out_shardings=sharding).lower()


def kernels_of(program: Any, shapes: list[jax.ShapeDtypeStruct]) -> list[Kernel]:
    """Return the different kernels of a function of arrays of these shapes, in order."""
    lowered = jax.jit(program).trace(*shapes).lower(lowering_platforms=("cuda",))
    module: Any = lowered.compiler_ir("stablehlo")
    return list(dict.fromkeys(_kernels(module.operation)))


def _kernels(op: ir.Operation) -> Iterator[Kernel]:
    for region in op.regions:
        for block in region:
            for inner in block:
                attributes = inner.operation.attributes
                if inner.operation.name == "stablehlo.custom_call" and (
                    ir.StringAttr(attributes["call_target_name"]).value == TARGET
                ):
                    config = ir.DictAttr(attributes["mhlo.backend_config"])
                    yield Kernel(tuple((x.name, _python_value(x.attr)) for x in config))
                yield from _kernels(inner.operation)


def _python_value(attribute: Any) -> Any:
    if isinstance(attribute, ir.BoolAttr):
        return attribute.value
    return ir.StringAttr(attribute).value_bytes


class Compilation:
    """A kernel that is being compiled, or loaded if `serialized` is given."""

    def __init__(self, kernel: Kernel, device: Any = None, serialized: Any = None) -> None:
        self.kernel = kernel
        self.was_loaded = False
        self._device = device
        self.seconds = 0.0
        self._future = _pool.submit(self._run, serialized)

    def _run(self, serialized: Any) -> Any:
        start = time.perf_counter()
        executable = None
        if serialized is not None:
            try:
                executable = serialize_executable.deserialize_and_load(
                    *serialized, execution_devices=jax.local_devices()[:1]
                )
                self.was_loaded = True
            except Exception:
                log.debug("a stored kernel cannot be loaded", exc_info=True)
        if executable is None:
            # Lowered here, because the mesh of a caller is not that of this thread.
            executable = self.kernel.lower(self._device).compile()
        self.seconds = time.perf_counter() - start
        return executable

    def wait(self) -> jax.stages.Compiled | None:
        """Return the executable of the small program, or None if it could not be made: XLA then says why."""
        try:
            return self._future.result()
        except Exception:
            log.debug("a kernel cannot be compiled by itself", exc_info=True)
            return None
