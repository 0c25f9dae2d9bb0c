"""Measures kernels on the device at hand, and lets later calls use the fastest."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_fa2.api import Options
from pallas_fa2.autodiff import attention
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.device import Device, device_of
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.parse_call import as_sinks, parse_call
from pallas_fa2.planning import plan, tuned


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `autotune` measured: a time in milliseconds for each configuration of the forward, the fastest first."""

    spec: CallSpec
    device: Device
    times: tuple[tuple[Any, float], ...]

    @property
    def best(self) -> Any:
        return self.times[0][0]

    def __str__(self) -> str:
        lines = [f"{ms:9.4f} ms  {config}" for config, ms in self.times]
        return "\n".join([f"{self.spec} on {self.device.kind}", *lines])


def autotune(
    query: Any,
    key: Any,
    value: Any,
    *,
    iterations: int = 10,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tuning:
    """Measures every forward kernel for a call, and makes the fastest serve it from then on.

    It serves calls of the same description (shapes, dtype, mask, scale) on the same kind of device, in this process; in
    others after `save_autotuned(path)` here and `load_autotuned(path)` there. A function that was compiled before keeps
    the kernel that it has.

    Args:
      query, key, value: arrays as `flash_attention` takes them; what they hold decides nothing.
      iterations: runs of each kernel, of which the median counts; kernel time by CUPTI.
      options: any of `flash_attention`, such as `mask`.

    Returns:
      A `Tuning`, which prints as a table.

    Raises:
      ValueError: no fused kernel, or not the one that was asked for, runs the call (the message says why).
    """
    # What comes after the kernel, or asks for one by name, describes nothing.
    described: dict[str, Any] = dict(options)
    sinks, name = described.pop("sinks", None), described.pop("implementation", None)
    spec, operands = parse_call(query, key, value, **described)
    if sinks is not None:
        as_sinks(sinks, spec.q_heads)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    device = device_of(query)
    planned = plan.make_plan(spec, device, name or "fused")
    candidates = BACKENDS[planned.implementation].candidates(spec, device)
    if not candidates:
        raise ValueError(
            f"implementation must be one whose kernels can be measured, but it is {name!r}, which has no choice of them; "
            "leave it out for the fused one that runs the call"
        )

    def measure(config: Any) -> float:
        chosen = dataclasses.replace(planned, forward=config)
        run = jax.jit(lambda q, k, v: attention(spec, chosen, q, k, v, operands))
        return median_ms(run, (query, key, value), iterations)

    times = [(config, measure(config)) for config in candidates]
    tuning = Tuning(spec, device, tuple(sorted(times, key=lambda time: time[1])))
    tuned.store(planned.implementation, spec, device, tuning.best)
    return tuning


def median_ms(fn: Callable, args: tuple, iterations: int) -> float:
    """Median of the kernel time by CUPTI."""
    return statistics.median(total_times(fn, args, iterations))


def total_times(fn: Callable, args: tuple, iterations: int) -> list[float]:
    """The milliseconds of all kernels together, in each iteration, by CUPTI."""
    return [sum(ms for _, ms in iteration) for iteration in kernel_times(fn, args, iterations)]


def kernel_times(fn: Callable, args: tuple, iterations: int) -> list[list[tuple[str, float]]]:
    """The name and the milliseconds of every kernel, in each iteration, by CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    found: Any
    _, found = profiler.measure(fn, aggregate=False, iterations=iterations)(*args)
    if found is None:
        raise RuntimeError("no kernel ran")
    return found if iterations > 1 else [found]
