"""Measures the candidates of a backend on the device, and makes later calls use the fastest."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_fa2.autodiff import attention
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.device import Device, device_of
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.options import Options
from pallas_fa2.parse_call import parse_call
from pallas_fa2.planning import plan, tuned


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The configurations of the forward that `autotune` measured with their times in milliseconds, fastest first."""

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
    """Measure every forward kernel for a call, and use the fastest for such calls from then on.

    Such calls have the same description (shapes, dtype, mask, scale) and run on the same kind of device in this
    process; in others after `save_autotuned(path)` here and `load_autotuned(path)` there. A function that was compiled
    before keeps its kernel.

    Args:
      query, key, value: arrays as `flash_attention` takes them; their values do not matter.
      iterations: runs of each kernel, of which the median counts; kernel time by CUPTI.
      return_lse: has no effect: every kernel returns the logsumexp.
      options: any other option of `flash_attention`, such as `mask`.

    Returns:
      A `Tuning`, which prints as a table.

    Raises:
      ValueError: no fused kernel, or not the requested one, supports the call (the message says why).
    """
    described: dict[str, Any] = dict(options)
    name = described.pop("implementation", None)
    spec, operands = parse_call(query, key, value, **described)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    device = device_of(query)
    chosen = plan.make_plan(spec, device, name or "fused")
    candidates = BACKENDS[chosen.implementation].candidates(spec, device)
    if not candidates:
        raise ValueError(
            f"implementation must be one whose kernels can be measured, but it is {name!r}, and {chosen.implementation} has "
            "no choice of them for this call; leave it out for the fused one that runs the call, which may be one kernel"
        )

    def measure(config: Any) -> float:
        candidate = dataclasses.replace(chosen, forward=config)
        run = jax.jit(lambda q, k, v: attention(spec, candidate, q, k, v, operands))
        return median_ms(run, (query, key, value), iterations)

    times = [(config, measure(config)) for config in candidates]
    tuning = Tuning(spec, device, tuple(sorted(times, key=lambda time: time[1])))
    tuned.store(chosen.implementation, spec, device, tuning.best)
    return tuning


def median_ms(fn: Callable, args: tuple, iterations: int) -> float:
    """Return the median time of all kernels together in milliseconds, by CUPTI."""
    return statistics.median(total_times(fn, args, iterations))


def total_times(fn: Callable, args: tuple, iterations: int) -> list[float]:
    """Return the time of all kernels together in milliseconds for each iteration, by CUPTI."""
    return [sum(ms for _, ms in iteration) for iteration in kernel_times(fn, args, iterations)]


def kernel_times(fn: Callable, args: tuple, iterations: int) -> list[list[tuple[str, float]]]:
    """Return the name and the time in milliseconds of every kernel for each iteration, by CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    times: Any
    _, times = profiler.measure(fn, aggregate=False, iterations=iterations)(*args)
    if times is None:
        raise RuntimeError("no kernel ran")
    return times if iterations > 1 else [times]
