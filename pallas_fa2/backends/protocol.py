"""The interface of a backend."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec


class KernelDescription(NamedTuple):
    """What `explain` says of an implementation's kernels."""

    tile: tuple[int, int]  # of the forward: queries, keys
    forward: str
    backward: str
    workspace_bytes: (
        Any  # of device memory beside inputs, outputs and gradients, in the backward; or a symbol
    )


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    `refuses(spec, device)` is the reason why it cannot run this call there, or None.
    `forward(spec, config, q, k, v, operands)` gives `out [B, T, N, Hv]`, in any dtype that its backward is to
    read, and `lse [B, N, T]`. It may give `tile.RowSums` as well, which `backward` then gets as `sums=`, with None
    for `lse`.
    `backward(spec, config, q, k, v, out, lse, dout, dlse, operands, wanted)` gives the gradients of q, k,
    v and of the floating-point score data, right where they are wanted; `dlse` may be None. Without one,
    JAX differentiates the forward.
    `describe(spec, config, backward_config, operands)` is what `explain` says of a call's kernels.
    """

    name: str
    unsupported_reason: Callable[[CallSpec, Device], str | None]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    describe: Callable[..., KernelDescription]
