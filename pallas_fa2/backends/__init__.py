"""The registry of backends, the fastest first."""

from pallas_fa2.backends import reference
from pallas_fa2.backends.protocol import Backend
from pallas_fa2.backends.sm90 import backend, support
from pallas_fa2.backends.xla import blockwise
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec


def _never(spec: CallSpec, device: Device) -> None:
    return None


def _unknown_length(spec: CallSpec, device: Device) -> str | None:
    for name, length in (("T", spec.q_len), ("S", spec.kv_len)):
        if not isinstance(length, int):
            return f"its tiles are of lengths that are known, and here {name} is {length}"
    return None


# Those that are one kernel, and not XLA's operations.
FUSED = ("hopper",)

BACKENDS = {
    "hopper": Backend(
        "hopper", support.unsupported_reason, backend.forward, backend.backward, backend.describe
    ),
    "blockwise": Backend(
        "blockwise", _unknown_length, blockwise.forward, blockwise.backward, blockwise.describe
    ),
    "reference": Backend(
        "reference",
        _never,
        lambda spec, config, *args: reference.forward(spec, *args),
        None,
        reference.describe,
    ),
}
