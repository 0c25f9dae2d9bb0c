"""Chooses the backend and its configuration for a `CallSpec` on a device."""

import dataclasses
from typing import Any

from pallas_fa2.backends.protocol import Backend
from pallas_fa2.backends.registry import BACKENDS, FUSED
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.planning import tuned


@dataclasses.dataclass(frozen=True)
class Plan:
    """The backend that runs a call and its configurations.

    `implementation` is the name of the backend. `rejected` has the names of the faster backends and why they cannot run
    the call. `score_grad_fallback` is the name and the configuration of another backend that computes all gradients
    where those of score data are needed, and everywhere if `backward` is None; `gradient_reason` says why. `requested`
    is the caller's `implementation`. `device` is the one that it was made for.
    """

    implementation: str
    forward: Any = None
    backward: Any = None
    rejected: tuple[tuple[str, str], ...] = ()
    score_grad_fallback: tuple[str, Any] | None = None
    gradient_reason: str | None = None
    requested: str | None = None
    device: Device | None = dataclasses.field(default=None, compare=False, repr=False)

    def backward_for(self, score_gradients: bool) -> tuple[str, Any]:
        """Return the backend that computes gradients, those of score data included or not, and its configuration."""
        fallback = self.score_grad_fallback
        if fallback is not None and (score_gradients or self.backward is None):
            return fallback
        return self.implementation, self.backward

    def summary(self, spec: CallSpec) -> str:
        """Say in one line which backend runs a call and why no faster one does."""
        reasons = [f"not {name}: {reason}" for name, reason in self.rejected]
        return "; ".join([f"{self.implementation} runs {spec}", *reasons])


def make_plan(
    spec: CallSpec,
    device: Device,
    implementation: str | None = None,
    not_fused: str | None = None,
) -> Plan:
    """Choose the fastest backend that supports the call, or the requested one; raise a ValueError if none does.

    `not_fused` says why no kernel of this package supports it, if that is known.
    """
    if implementation is None:
        names = tuple(BACKENDS)
    else:
        names = FUSED if implementation == "fused" else (implementation,)
    if not set(names) <= set(BACKENDS):
        raise ValueError(
            f"implementation must be one of {', '.join(BACKENDS)}, fused or None, but it is "
            f"{implementation!r}"
        )
    rejected = []
    for name in names:
        reason = not_fused if BACKENDS[name].is_fused else None
        reason = reason or BACKENDS[name].unsupported_reason(spec, device)
        if reason is None:
            plan = _configure(BACKENDS[name], spec, device, tuple(rejected))
            return dataclasses.replace(plan, requested=implementation)
        rejected.append((name, reason))
    reasons = "; ".join(reason for _, reason in rejected)
    raise ValueError(
        f"implementation {implementation!r} does not support this call: {reasons}. Leave "
        f"implementation=None to use the fastest one that does ({spec})"
    )


def plan_shard(plan: Plan, spec: CallSpec) -> Plan:
    """Return the plan of what a device computes of a call: by the same backend if it supports that, otherwise by the
    fastest."""
    assert plan.device is not None
    supports = BACKENDS[plan.implementation].unsupported_reason(spec, plan.device) is None
    return make_plan(spec, plan.device, plan.implementation if supports else None)


def _configure(backend: Backend, spec: CallSpec, device: Device, rejected: tuple) -> Plan:
    forward, backward, name, reason = backend.configure(spec, device)
    forward = tuned.find(backend.name, spec, device) or forward
    fallback = None if name is None else (name, BACKENDS[name].configure(spec, device).backward)
    return Plan(backend.name, forward, backward, rejected, fallback, reason, device=device)
