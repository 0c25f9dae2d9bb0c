"""What is said where no fused kernel runs a call or its gradients, or none reads a cache."""

import contextlib
import os
import warnings
from collections.abc import Iterable

import jax

from pallas_fa2.backends.protocol import Defect
from pallas_fa2.backends.registry import FUSED
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.planning.cached_plan import CachedPlan, cost, remedy
from pallas_fa2.planning.plan import Plan

# A warning names the line of the user's: differentiation calls us by way of JAX.
NOT_THE_USERS = (
    *(os.path.dirname(__file__), os.path.dirname(jax.__file__)),
    # CPython 3.12 skips no file whose name is all of a prefix.
    contextlib.__file__.removesuffix(".py"),
)


class FallbackWarning(UserWarning):
    """A call on a GPU, or its gradients, run on XLA's operations, because no fused kernel supports them, or a kernel
    was found to be wrong on this GPU."""


_warned: set[str] = set()


def warn_of_fallback(
    spec: CallSpec, implementation: str, rejected: tuple[tuple[str, str], ...], device: Device
) -> None:
    """Issue a `FallbackWarning` once for each reason that no fused kernel runs a call, or that one is not used because
    it is wrong; where warnings are errors, each time."""
    if device.platform != "gpu" or not rejected:
        return
    defect = next((reason for _, reason in rejected if isinstance(reason, Defect)), None)
    if defect is not None:
        _warn_once(defect, f"this call runs on {implementation}, slower: {defect} ({spec})")
        return
    if implementation in FUSED:
        return
    remedy = (
        "cast query, key and value to float32 (a Flax layer does with dtype=jnp.float32)"
        if spec.dtype.itemsize > 4
        else "see explain(...) and the table in README"
    )
    reason = rejected[-1][1]  # of the fused backend that takes most calls
    subject = "no fused kernel supports this call, which runs"
    _warn_once(reason, _message(subject, reason, spec, remedy, implementation))


def warn_of_equivalent_call(spec: CachedSpec, plan: CachedPlan, device: Device) -> None:
    """Issue a `FallbackWarning` once for each reason that no kernel reads a cache, where those of the equivalent call
    run."""
    if device.platform != "gpu" or plan.not_read is None or plan.implementation not in FUSED:
        return
    if any(isinstance(reason, Defect) for _, reason in plan.rejected):
        return  # `warn_of_fallback` says so
    _warn_once(
        plan.not_read,
        f"no kernel reads this cache: {plan.implementation} runs the equivalent call of flash_attention, {cost(spec)}: "
        f"{plan.not_read} ({spec}). {remedy(spec)}; implementation={plan.implementation!r} runs it without this warning, "
        "implementation='fused' makes it an error",
    )


def check_gradients(spec: CallSpec, plan: Plan, needs_grad: Iterable[bool]) -> None:
    """Issue a `FallbackWarning` if no fused kernel computes the gradients of a call, as it is differentiated.

    `needs_grad` says which score data need one.

    Raises:
      ValueError: `implementation="fused"` was asked for.
    """
    name, _ = plan.backward_for(any(needs_grad))
    if plan.device is None or plan.device.platform != "gpu" or name in FUSED:
        return
    if plan.requested not in (None, "fused", *FUSED):
        return
    if plan.implementation in FUSED:
        reason, remedy = plan.gradient_reason, "use a smaller head dim, or inputs of 16 bits"
        if plan.backward is not None:
            remedy = (
                "leave deterministic_gradients out, or pass the data through jax.lax.stop_gradient"
            )
    else:  # the plan of the call that stands for one on a cache
        reason, remedy = plan.rejected[-1][1], "see explain(...) and the table in README"
    assert reason is not None, "a backend says why another one computes gradients"
    if plan.requested == "fused":
        raise ValueError(
            f"implementation 'fused' does not support the gradients of this call: {reason} ({spec}). To have them, {remedy}; "
            f"or leave implementation=None, by which {name} computes them"
        )
    subject = "no fused kernel computes the gradients of this call, which run"
    _warn_once(reason, _message(subject, reason, spec, remedy, name))


def _message(subject: str, reason: str, spec: CallSpec, remedy: str, implementation: str) -> str:
    return (
        f"{subject} on {implementation}, slower: {reason} ({spec}). To avoid this, {remedy}; "
        f"implementation={implementation!r} runs it without this warning, implementation='fused' makes it an error"
    )


def _warn_once(reason: str, message: str) -> None:
    """Issue a `FallbackWarning` once for each reason; where warnings are errors, each time."""
    if reason in _warned:
        return
    warnings.warn(message, FallbackWarning, skip_file_prefixes=NOT_THE_USERS)
    _warned.add(reason)
