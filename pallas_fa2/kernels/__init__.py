"""The registry of implementations, fastest first."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_fa2.kernels import blockwise, hopper, reference
from pallas_fa2.spec import Device, Spec


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    `refuses(spec, device)` is the reason why it cannot run this call there, or None.
    `forward(spec, config, q, k, v, operands)` gives `out [B, T, N, Hv]` and `lse [B, N, T]`.
    `backward(spec, config, q, k, v, out, lse, dout, dlse, operands, wanted)` gives the gradients of q, k,
    v and of the floating-point score data, right where they are wanted; `dlse` may be None. Without one,
    JAX differentiates the forward.
    """

    name: str
    refuses: Callable[[Spec, Device], str | None]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None


def _never(spec: Spec, device: Device) -> None:
    return None


REGISTRY = {
    "hopper": Implementation("hopper", hopper.refuses, hopper.forward, hopper.backward),
    "blockwise": Implementation("blockwise", _never, blockwise.forward, blockwise.backward),
    "reference": Implementation(
        "reference", _never, lambda spec, config, *args: reference.forward(spec, *args), None
    ),
}
