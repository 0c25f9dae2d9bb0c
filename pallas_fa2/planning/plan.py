"""Chooses the backend and its configuration for a `CallSpec` on a device."""

import dataclasses
from typing import Any

from pallas_fa2.backends import BACKENDS, FUSED
from pallas_fa2.backends.sm90 import support
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.configs import forward_configs
from pallas_fa2.backends.sm90.forward import config
from pallas_fa2.backends.xla import blockwise
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

# What `autotune` has found.
AUTOTUNE_CACHE: dict[tuple[CallSpec, Device], config.ForwardConfig] = {}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call runs. `passed_over` names the faster implementations and why they cannot."""

    implementation: str
    forward: Any = None
    backward: Any = None
    rejected: tuple[tuple[str, str], ...] = ()
    # Where gradients of score data are asked for, and another implementation must form them all: its
    # name and configuration.
    score_grad_fallback: tuple[str, Any] | None = None

    def backward_for(self, data: bool) -> tuple[str, Any]:
        """The implementation that forms gradients, and its configuration; `data`: of score data too."""
        return (
            self.score_grad_fallback
            if data and self.score_grad_fallback
            else (self.implementation, self.backward)
        )

    def summary(self, spec: CallSpec) -> str:
        """In one line, which implementation runs a call and why no faster one does."""
        reasons = [f"not {name}: {reason}" for name, reason in self.rejected]
        return "; ".join([f"{self.implementation} runs {spec}", *reasons])


def make_plan(spec: CallSpec, device: Device, implementation: str | None = None) -> Plan:
    """The fastest implementation that supports the call, or the one that was asked for."""
    names = {None: tuple(BACKENDS), "fused": FUSED}.get(implementation, (implementation,))
    if not set(names) <= set(BACKENDS):
        raise ValueError(
            f"implementation must be one of {', '.join(BACKENDS)}, fused or None, but it is "
            f"{implementation!r}"
        )
    passed_over = []
    for name in names:
        reason = BACKENDS[name].unsupported_reason(spec, device)
        if reason is None:
            return _configure(name, spec, device, tuple(passed_over))
        passed_over.append((name, reason))
    reasons = "; ".join(reason for _, reason in passed_over)
    raise ValueError(
        f"implementation {implementation!r} does not support this call: {reasons}. Leave "
        f"implementation=None to use the fastest one that does ({spec})"
    )


def tuning_key(spec: CallSpec, device: Device) -> tuple[CallSpec, Device]:
    """Of the calls that one measured forward serves: how the backward sums makes no difference."""
    return dataclasses.replace(spec, deterministic=False), device


def _configure(name: str, spec: CallSpec, device: Device, passed_over: tuple) -> Plan:
    of_data = None
    if name == "hopper":
        forward = AUTOTUNE_CACHE.get(tuning_key(spec, device))
        if forward is None:
            kernels = forward_configs(spec.head_dim, spec.value_dim)
            tuned = next(t for t in kernels if t.matches(spec))
            forward = dataclasses.replace(tuned.config, num_ctas=device.num_sms)
        backward = BackwardConfig(
            *support.kernel_dims(spec.head_dim, spec.value_dim),
            num_ctas=device.num_sms,
            deterministic=spec.deterministic,
        )
        if spec.deterministic and spec.scores:  # the kernels sum those in any order
            of_data = "blockwise", blockwise.block_sizes(spec)
    elif name == "blockwise":
        forward = backward = blockwise.block_sizes(spec)
    else:
        forward = backward = None
    return Plan(name, forward, backward, passed_over, of_data)
