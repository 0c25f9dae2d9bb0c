"""The registry of implementations, fastest first."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_fa2.kernels import blockwise, hopper, reference
from pallas_fa2.spec import Device, KernelDescription, Spec


@dataclasses.dataclass(frozen=True)
class Implementation:
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
    refuses: Callable[[Spec, Device], str | None]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    describe: Callable[..., KernelDescription]


def _never(spec: Spec, device: Device) -> None:
    return None


def _unknown_length(spec: Spec, device: Device) -> str | None:
    for name, length in (("T", spec.q_len), ("S", spec.kv_len)):
        if not isinstance(length, int):
            return f"its tiles are of lengths that are known, and here {name} is {length}"
    return None


# Those that are one kernel, and not XLA's operations.
FUSED = ("hopper",)

REGISTRY = {
    "hopper": Implementation(
        "hopper", hopper.refuses, hopper.forward, hopper.backward, hopper.describe
    ),
    "blockwise": Implementation(
        "blockwise", _unknown_length, blockwise.forward, blockwise.backward, blockwise.describe
    ),
    "reference": Implementation(
        "reference",
        _never,
        lambda spec, config, *args: reference.forward(spec, *args),
        None,
        reference.describe,
    ),
}
