"""Chooses the backend and its configuration for a `CachedSpec` on a device."""

import dataclasses
from typing import Any

from pallas_fa2.backends.registry import BACKENDS, FUSED
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.equivalent_call import equivalent_spec
from pallas_fa2.planning.plan import Plan, make_plan


@dataclasses.dataclass(frozen=True)
class CachedPlan:
    """The backend that runs a call on a cache.

    Attributes:
      implementation: the name of the backend.
      call: the plan of the equivalent call. It runs the forward where `reads_cache` is False, and the backward always.
      reads_cache: whether the backend's own `cached` forward reads the cache.
      config: that forward's configuration.
      rejected: the names of the faster backends and why they cannot run the call, or take more time.
      not_read: why no kernel reads the cache itself, where none can that was asked for.
    """

    implementation: str
    call: Plan
    reads_cache: bool = False
    config: Any = None
    rejected: tuple[tuple[str, str], ...] = ()
    not_read: str | None = None

    def summary(self, spec: CachedSpec) -> str:
        """Say in one line which backend runs a call and why no faster one does."""
        return "; ".join([f"{self.implementation} runs {spec}", *self.reasons()])

    def reasons(self) -> list[str]:
        """Say of each faster backend why it cannot run the call; or why its kernel that reads caches cannot, where the
        backend runs the equivalent call."""
        return [
            f"not {name}{"'s kernel that reads caches" * (name == self.implementation)}: {reason}"
            for name, reason in self.rejected
        ]


def make_cached_plan(
    spec: CachedSpec, device: Device, implementation: str | None = None
) -> CachedPlan:
    """Choose the fastest backend that reads the cache itself, or else the one of the equivalent call.

    Raises:
      ValueError: the requested one supports neither, or any kernel of this package is requested and none reads the
        cache.
    """
    names = FUSED if implementation == "fused" else (implementation,)
    names = tuple(BACKENDS) if implementation is None else names
    rejected = []
    for name in BACKENDS:
        cached = BACKENDS[name].cached
        if cached is None or name not in names:
            continue
        reason = cached.unsupported_reason(spec, device)
        if reason is None:
            slower = cached.slower_reason(spec, device)
            if slower is not None and (
                BACKENDS[name].unsupported_reason(equivalent_spec(spec), device) is None
            ):
                call = _plan_equivalent_call(spec, device, name)
                return CachedPlan(name, call, rejected=(*rejected, (name, slower)))
            config = cached.configure(spec, device)
            # The call that the backward runs may need another backend than the one asked for.
            call = dataclasses.replace(
                _plan_equivalent_call(spec, device), requested=implementation
            )
            return CachedPlan(name, call, True, config, tuple(rejected))
        rejected.append((name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected) or "none was asked for"
    if spec.split_size is not None:
        raise ValueError(
            f"split_size must be None where no kernel reads the cache, but it is {spec.split_size} ({reasons}); leave it out, "
            "or attend to one sequence in each call"
        )
    plan = _plan_equivalent_call(spec, device, implementation)
    if implementation == "fused":
        raise ValueError(
            f"implementation 'fused' has no kernel that reads this cache, only one of the equivalent call, {cost(spec)} "
            f"({reasons}). {remedy(spec)}, or leave implementation=None"
        )
    of_caches = (reason for reason in rejected if reason not in plan.rejected)
    rejected = [*of_caches, *plan.rejected]
    return CachedPlan(plan.implementation, plan, rejected=tuple(rejected), not_read=reasons)


def cost(spec: CachedSpec) -> str:
    """Say what the equivalent call costs beside its kernels."""
    if spec.page_size is not None:
        return "which copies all pages of all sequences to contiguous keys"
    if spec.quantized is not None:
        return f"which copies all keys and values to {spec.call.dtype.name}"
    return "which splits no sequence among multiprocessors"


def remedy(spec: CachedSpec) -> str:
    """Say how to have a kernel that reads the cache."""
    if spec.call.dtype.itemsize > 2:
        return "Keep queries and caches in bfloat16 (a Flax layer does with dtype=jnp.bfloat16)"
    if spec.quantized is not None:
        return "Keep the cache in 16 bits, or sizes as these reasons ask"
    return "Choose sizes as these reasons ask"


def _plan_equivalent_call(
    spec: CachedSpec, device: Device, implementation: str | None = None
) -> Plan:
    reason = None
    if spec.has_sequence_data:
        # Kernels read one value of an entry, and here an entry has the queries of all sequences.
        reason = "its masks and scores read a value for each sequence of packed queries"
    return make_plan(equivalent_spec(spec), device, implementation, not_fused=reason)
