"""The interface of a backend."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.call_spec import CallSpec


class Defect(str):
    """A reason why a backend must not run a call that is a mistake of its kernels: callers are warned of it whatever
    runs instead."""


class Configuration(NamedTuple):
    """The `config` arguments of a backend's forward and backward for one call."""

    forward: Any = None
    backward: Any = None
    # The name of the backend that computes all gradients where those of score data are needed, if it is another one; it
    # always does where `backward` is None.
    score_gradients: str | None = None
    # Why it is another one.
    reason: str | None = None


class KernelDescription(NamedTuple):
    """The description of a backend's kernels that `explain` prints.

    `tile` is the forward's, (queries, keys). `workspace_bytes` is the device memory that the backward uses beside
    inputs, outputs and gradients: an integer, or a symbol of `jax.export`. `backward` is None where another backend
    computes all gradients.
    """

    tile: tuple[int, int]
    forward: str
    backward: str | None
    workspace_bytes: Any


@dataclasses.dataclass(frozen=True)
class CachedForward:
    """A backend's forward of `cached_attention`, whose keys are in a cache.

    Attributes:
      unsupported_reason: `(cached spec, device)` -> why it cannot run this call there, or None.
      configure: `(cached spec, device)` -> its `config`, hashable.
      forward: `(cached spec, config, q, k, v, cached operands)` -> `out [B, T, N, Hv]` in q's dtype and the natural
        `lse [B, N, T]` in float32; of packed queries `[tokens, N, H]` it is `[tokens, N, Hv]` and `[N, tokens]`. Keys
        and values are `[B, S, K, H]`, or `[P, page, K, H]` for pages.
      describe: `(cached spec, config)` -> the kernels in words, for `explain`.
      slower_reason: `(cached spec, device)` -> why the same backend's `Backend.forward` takes less time for a call that
        this one supports, and copies no keys, or None.
    """

    unsupported_reason: Callable[[CachedSpec, Device], str | None]
    configure: Callable[[CachedSpec, Device], Any]
    forward: Callable[..., Any]
    describe: Callable[[CachedSpec, Any], str]
    slower_reason: Callable[[CachedSpec, Device], str | None] = lambda spec, device: None


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of attention.

    Attributes:
      name: the value of a call's `implementation`.
      unsupported_reason: `(spec, device)` -> why it cannot run this call there, or None.
      configure: `(spec, device)` -> its `Configuration` for a call that it supports.
      forward: `(spec, config, q, k, v, operands)` -> `out [B, T, N, Hv]`, in any dtype that its backward reads, and
        the natural `lse [B, N, T]`. It may return `tile.RowSums` as well, which the backward then gets as `sums=`, with
        None for `lse`.
      backward: `(spec, config, q, k, v, out, lse, dout, dlse, operands, needs_grad)` -> the gradients of q, k, v and a
        tuple of those of the floating-point leaves of the score data, which are valid for the leaves that
        `needs_grad`; `dlse` may be None. If the attribute is None, JAX differentiates the forward.
      describe: `(spec, forward config, backward config, operands)` -> the `KernelDescription` of a call.
      candidates: `(spec, device)` -> the forward configs among which `autotune` chooses.
      config_type: the class of the forward configs, whose keyword arguments JSON can hold, if there are candidates.
      cached: its forward of `cached_attention`, if it has one of its own. Without, the keys of a cache are gathered,
        and `forward` runs the equivalent call.
      is_fused: whether it runs kernels of this package, not XLA's operations.
    """

    name: str
    unsupported_reason: Callable[[CallSpec, Device], str | None]
    configure: Callable[[CallSpec, Device], Configuration]
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    describe: Callable[..., KernelDescription]
    candidates: Callable[[CallSpec, Device], list[Any]] = lambda spec, device: []
    config_type: type | None = None
    cached: CachedForward | None = None
    is_fused: bool = False


def describe_kernels(
    backend: Backend, spec: CallSpec, forward: Any, backward: Any, operands: Any
) -> KernelDescription:
    """Return a backend's description of a call, or that nothing runs where its batch is empty."""
    if spec.batch == 0:
        nothing = "nothing runs, as the batch is empty"
        return KernelDescription((spec.q_len, spec.kv_len), nothing, nothing, 0)
    return backend.describe(spec, forward, backward, operands)
