"""The interface of a backend."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec


class Configuration(NamedTuple):
    """How a backend runs one call: what its forward and its backward are given as `config`."""

    forward: Any = None
    backward: Any = None
    # The backend that forms all gradients where those of score data are wanted, if it is another one.
    score_gradients: str | None = None


class KernelDescription(NamedTuple):
    """What `explain` says of a backend's kernels.

    `tile` is that of the forward, (queries, keys). `workspace_bytes` of device memory are used by the backward beside
    inputs, outputs and gradients: an integer, or a symbol of `jax.export`.
    """

    tile: tuple[int, int]
    forward: str
    backward: str
    workspace_bytes: Any


def no_candidates(spec: CallSpec, device: Device) -> list[Any]:
    return []


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
      name: what a call's `implementation` says.
      unsupported_reason: `(spec, device)` -> why it cannot run this call there, or None.
      configure: `(spec, device)` -> its `Configuration` for a call that it supports.
      forward: `(spec, config, q, k, v, operands)` -> `out [B, T, N, Hv]`, in any dtype that its backward is to read, and
        `lse [B, N, T]`. It may return `tile.RowSums` as well, which the backward then gets as `sums=`, with None for
        `lse`.
      backward: `(spec, config, q, k, v, out, lse, dout, dlse, operands, wanted)` -> the gradients of q, k, v and a tuple
        of those of the floating-point score data, right where they are `wanted`; `dlse` may be None. Where it is
        None, JAX differentiates the forward.
      describe: `(spec, forward config, backward config, operands)` -> its `KernelDescription` of a call.
      candidates: `(spec, device)` -> the forward configs among which `autotune` chooses.
      config_type: the class of its forward configs, made of keyword arguments that JSON holds, if there are candidates.
      is_fused: whether it is kernels of this package, and not XLA's operations.
    """

    name: str
    unsupported_reason: Callable[[CallSpec, Device], str | None]
    configure: Callable[[CallSpec, Device], Configuration]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    describe: Callable[..., KernelDescription]
    candidates: Callable[[CallSpec, Device], list[Any]] = no_candidates
    config_type: type | None = None
    is_fused: bool = False
