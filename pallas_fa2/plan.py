"""From a Spec and a device to a Plan: the implementation, its tile sizes and its schedule."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

from pallas_fa2.kernels import FUSED, REGISTRY, hopper, hopper_backward, hopper_forward, token_data
from pallas_fa2.kernels.mosaic import round_up
from pallas_fa2.spec import Device, Spec

# A blockwise tile of scores is held several times over (scores, probabilities, their gradients);
# this bounds one copy, so that memory stays O(T) with a modest constant.
TILE_BYTES = 64 << 20


ANY_LENGTH = math.inf, math.inf


class Tuned(NamedTuple):
    """A kernel's configuration, and the calls that it serves."""

    config: Any
    longest: tuple[float, float] = ANY_LENGTH  # up to so many queries; causal, full
    general: bool = False  # under masks other than a causal one, and with score functions
    masks: bool = False  # under a mask alone that reads no pairs as well, of any length

    def takes(self, spec: Spec) -> bool:
        """Whether it is made for such calls, of some length."""
        if spec.plain:
            return not self.general
        alone = spec.only_masked and not token_data.pair_bytes(spec)
        return (self.general or (self.masks and alone)) and self.fits(spec)

    def serves(self, spec: Spec) -> bool:
        long = spec.plain and spec.q_len > self.longest[spec.causal is None]
        return self.takes(spec) and not long

    def fits(self, spec: Spec) -> bool:
        """Whether shared memory has room for data of tokens and pairs. (A row more of keys is their places.)"""
        size, rows = token_data.pair_bytes(spec), token_data.token_rows(spec, "k") + 1
        if size == 0:
            return self.config.room(rows) >= 0
        return self.config.pair_stages(size, rows) >= 1


# Of a head dim, the first that serves a call, as measured on an H200 (docs/decisions/0009, 0012, 0018, 0019). Registers:
# 128 * (2 * 240 + 24) or 128 * (3 * 160 + 32) of 65,536. A kernel takes a second buffer of Q where there is
# room (`Config.with_queries_ahead`): 1 % for long sequences and 5 to 13 % for 512 tokens. At H = 64 three
# warpgroups are 10 to 20 % faster than two, unless most of their larger tiles lies beyond the diagonal, or a tile is most of a sequence
# (256 and 197 tokens 1.6 times as fast with two); at H = 96 from 2048 queries
# on (2 to 4 %; 9 to 19 % at H = 80, whose panels of 16 columns TMA loads slowly); at H = 256 an
# accumulator of 64 rows takes 128 registers of each thread, which leaves room for 64 keys. Under masks a third
# warpgroup's larger tiles cost windows of 128 keys 16 to 43 %. Half of a block's values at once: 1 to 2 % at
# H = 64, but 1.5 % less at 96 and 4 to 6 % at 128.
HOPPER_FORWARD = (
    *(
        Tuned(
            hopper_forward.Config(
                64, 64, warpgroups, 128, 3, registers, q_buffers=2, values_at_once=64
            ),
            longest=longest,
        )
        for warpgroups, registers, longest in (
            (2, (240, 24), (1024, 320)),
            (3, (160, 32), ANY_LENGTH),
        )
    ),
    *(
        Tuned(
            hopper_forward.Config(
                dim, dim, 2, block_kv=128, stages=2, registers=(240, 24), q_in_registers=True
            ),
            longest=longest,
            masks=masks,
        )
        for dim, longest, masks in ((96, (1024, 1024), True), (128, ANY_LENGTH, False))
    ),
    # More keys would spill.
    Tuned(
        hopper_forward.Config(96, 96, 3, block_kv=96, stages=3, registers=(160, 32), q_buffers=2)
    ),
    Tuned(
        hopper_forward.Config(
            192, 128, 2, block_kv=128, stages=2, registers=(240, 24), out_columns=64
        ),
        masks=True,
    ),
    Tuned(
        hopper_forward.Config(
            192, 192, 2, block_kv=64, stages=2, registers=(240, 24), out_columns=96
        )
    ),
    Tuned(hopper_forward.Config(256, 256, 2, block_kv=64, stages=2, registers=(240, 24))),
    # Functions take registers: for Q, or of a third warpgroup. (Two buffers of Q beside data of pairs as well.)
    *(
        Tuned(
            hopper_forward.Config(
                dim, dim, 2, 128, stages, (240, 24), q_buffers=q_buffers, values_at_once=at_once
            ),
            general=True,
        )
        for dim, stages, q_buffers, at_once in (
            (64, 3, 2, 64),
            (96, 2, 2, None),
            (128, 2, 1, None),
        )
    ),
    # Data of keys take the room of half of the output, or of half of the keys.
    *(
        Tuned(
            hopper_forward.Config(
                *dims, 2, block_kv=64, stages=2, registers=(240, 24), out_columns=out_columns
            ),
            general=True,
        )
        for dims, out_columns in (((192, 128), 64), ((192, 192), 96), ((256, 256), 64))
    ),
    # Of data of pairs, a block of keys brings 2 to 8 bytes for each of a CTA's rows.
    *(
        Tuned(
            hopper_forward.Config(dim, dim, 2, block_kv=64, stages=2, registers=(240, 24)),
            general=True,
        )
        for dim in (64, 96, 128)
    ),
)


def hopper_forwards(head_dim: int, value_dim: int) -> list[Tuned]:
    """The forward kernels of these head dims, or of the next sizes up."""
    dims = hopper.kernel_dims(head_dim, value_dim)
    return [t for t in HOPPER_FORWARD if (t.config.head_dim, t.config.value_dim) == dims]


# What `autotune` has found.
TUNED: dict[tuple[Spec, Device], hopper_forward.Config] = {}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call runs. `passed_over` names the faster implementations and why they cannot."""

    implementation: str
    forward: Any = None
    backward: Any = None
    passed_over: tuple[tuple[str, str], ...] = ()
    # Where gradients of score data are asked for, and another implementation must form them all: its
    # name and configuration.
    of_data: tuple[str, Any] | None = None

    def backward_for(self, data: bool) -> tuple[str, Any]:
        """The implementation that forms gradients, and its configuration; `data`: of score data too."""
        return self.of_data if data and self.of_data else (self.implementation, self.backward)

    def said_of(self, spec: Spec) -> str:
        """In one line, which implementation runs a call and why no faster one does."""
        reasons = [f"not {name}: {reason}" for name, reason in self.passed_over]
        return "; ".join([f"{self.implementation} runs {spec}", *reasons])


def make_plan(spec: Spec, device: Device, implementation: str | None = None) -> Plan:
    """The fastest implementation that supports the call, or the one that was asked for."""
    names = {None: tuple(REGISTRY), "fused": FUSED}.get(implementation, (implementation,))
    if not set(names) <= set(REGISTRY):
        raise ValueError(
            f"implementation must be one of {', '.join(REGISTRY)}, fused or None, but it is "
            f"{implementation!r}"
        )
    passed_over = []
    for name in names:
        reason = REGISTRY[name].refuses(spec, device)
        if reason is None:
            return _configure(name, spec, device, tuple(passed_over))
        passed_over.append((name, reason))
    reasons = "; ".join(reason for _, reason in passed_over)
    raise ValueError(
        f"implementation {implementation!r} does not support this call: {reasons}. Leave "
        f"implementation=None to use the fastest one that does ({spec})"
    )


def tuning_key(spec: Spec, device: Device) -> tuple[Spec, Device]:
    """Of the calls that one measured forward serves: how the backward sums makes no difference."""
    return dataclasses.replace(spec, deterministic=False), device


def _configure(name: str, spec: Spec, device: Device, passed_over: tuple) -> Plan:
    of_data = None
    if name == "hopper":
        forward = TUNED.get(tuning_key(spec, device))
        if forward is None:
            kernels = hopper_forwards(spec.head_dim, spec.value_dim)
            tuned = next(t for t in kernels if t.serves(spec))
            forward = dataclasses.replace(tuned.config, ctas=device.cores)
        backward = hopper_backward.Config(
            *hopper.kernel_dims(spec.head_dim, spec.value_dim),
            ctas=device.cores,
            ordered=spec.deterministic,
        )
        if spec.deterministic and spec.scores:  # the kernels sum those in any order
            of_data = "blockwise", block_sizes(spec)
    elif name == "blockwise":
        forward = backward = block_sizes(spec)
    else:
        forward = backward = None
    return Plan(name, forward, backward, passed_over, of_data)


def block_sizes(spec: Spec) -> tuple[int, int]:
    """Square tiles, the largest of 512, 256, 128, 64 whose scores stay within `TILE_BYTES`."""
    heads = spec.batch * spec.q_heads
    known = isinstance(heads, int)  # and no symbol of `jax.export`
    scores = max(heads, 1) * spec.accumulator.itemsize if known else TILE_BYTES
    fits = (b for b in (512, 256, 128, 64) if scores * b * b <= TILE_BYTES)
    block = next(fits, 64)
    return min(block, round_up(spec.q_len, 8)), min(block, round_up(spec.kv_len, 8))


def device_of(array: Any) -> Device:
    """Where a call on this array will run: its own device, or else JAX's default one."""
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        return _describe(next(iter(array.devices())))
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return _describe(default)
    return _describe(jax.devices(default)[0])


@functools.lru_cache
def _describe(device: Any) -> Device:
    return Device(
        device.platform,
        device.device_kind,
        str(getattr(device, "compute_capability", "")),
        int(getattr(device, "core_count", 1)),
    )
