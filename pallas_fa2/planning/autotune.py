"""Measures kernels on the device at hand, and lets later calls use the fastest."""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from pallas_fa2.api import Options
from pallas_fa2.autodiff import attention
from pallas_fa2.backends.sm90 import aux_inputs, configs
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.device import Device, device_of
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.parse_call import as_sinks, parse_call
from pallas_fa2.planning import plan

# Of the 60 MB of L2: the keys and values of the heads that run at the same time.
L2_BUDGETS = (16 << 20, 32 << 20, 48 << 20)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `autotune` measured: a time in milliseconds for each forward kernel, the fastest first."""

    spec: CallSpec
    device: Device
    times: tuple[tuple[ForwardConfig, float], ...]

    @property
    def best(self) -> ForwardConfig:
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

    It serves calls of the same description (shapes, dtype, mask, scale) on the same kind of device,
    until the process ends. A function that was compiled before keeps the kernel that it has.

    Args:
      query, key, value: arrays as `flash_attention` takes them; what they hold decides nothing.
      iterations: runs of each kernel, of which the median counts; kernel time by CUPTI.
      options: any of `flash_attention`, such as `mask`.

    Returns:
      A `Tuning`, which prints as a table.

    Raises:
      ValueError: the call does not run on the Hopper kernels (the message says why).
    """
    # What comes after the kernel, or asks for one by name, describes nothing.
    described: dict[str, Any] = dict(options)
    sinks, name = described.pop("sinks", None), described.pop("implementation", None)
    if name not in (None, "hopper", "fused"):
        raise ValueError(
            f"implementation must be hopper, fused or None where kernels are measured, but it is {name!r}"
        )
    spec, operands = parse_call(query, key, value, **described)
    if sinks is not None:
        as_sinks(sinks, spec.q_heads)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    device = device_of(query)
    planned = plan.make_plan(spec, device, "hopper")

    def measure(config: ForwardConfig) -> float:
        chosen = dataclasses.replace(planned, forward=config)
        run = jax.jit(lambda q, k, v: attention(spec, chosen, q, k, v, operands))
        return median_ms(run, (query, key, value), iterations)

    times = [(config, measure(config)) for config in candidates(spec, device)]
    tuning = Tuning(spec, device, tuple(sorted(times, key=lambda time: time[1])))
    plan.AUTOTUNE_CACHE[plan.tuning_key(spec, device)] = tuning.best
    return tuning


def candidates(spec: CallSpec, device: Device) -> list[ForwardConfig]:
    """The kernels of the call's head dim; under a mask alone, those without one as well. Causal calls also
    choose how many heads share the L2."""

    def suits(kernel: configs.ConfigRule) -> bool:
        plain = spec.has_only_mask and not kernel.for_mods
        whole = all(aux_inputs.PAD_MULTIPLE % n == 0 for n in kernel.config.tile)
        plain &= whole or not aux_inputs.mask_reads_pairs(spec)
        return kernel.matches_kind(spec) or (plain and kernel.fits_smem(spec))

    return [
        dataclasses.replace(kernel.config, num_ctas=device.num_sms, l2_budget=section)
        for kernel in configs.forward_configs(spec.head_dim, spec.value_dim)
        if suits(kernel)
        for section in (L2_BUDGETS if spec.causal else (kernel.config.l2_budget,))
    ]


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
