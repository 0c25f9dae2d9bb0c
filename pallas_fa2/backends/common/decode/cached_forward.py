"""The forward of `cached_attention`: from the arrays of a call on a cache to those of a decode kernel and back."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from pallas_fa2.backends.common.batching import batched
from pallas_fa2.backends.common.decode import block_lists
from pallas_fa2.backends.common.decode.break_even import slower_reason
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.mods import NO_MODS, ModArrays
from pallas_fa2.backends.common.decode.schedule import plan_decode
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.protocol import CachedForward
from pallas_fa2.compilation.launches import LaunchKey, reusable
from pallas_fa2.device import Device
from pallas_fa2.distributed.sharding import Axes, sharded
from pallas_fa2.ir.cached_spec import CachedOperands, CachedSpec
from pallas_fa2.ir.quantized import Scales

# Of one launch; a call of more sequences has several. `support` bounds the blocks of the call.
MAX_REQUESTS = 1 << 16


def make(
    unsupported_reason: Callable[[CachedSpec, Device], str | None],
    choose: Callable[[DecodeSpec, Device], DecodeConfig | None],
    decode: Callable[..., tuple[jax.Array, jax.Array]],
) -> CachedForward:
    """Return the forward of `cached_attention` by the kernel of an architecture, `decode` in the configuration of
    `choose`."""

    def configure(spec: CachedSpec, device: Device) -> DecodeConfig:
        config = choose(DecodeSpec.of_call(spec), device)
        assert config is not None, "`unsupported_reason` says so"
        return config

    run = functools.partial(
        forward, functools.partial(launch_decode, decode), f"{decode.__module__}.decode"
    )
    return CachedForward(unsupported_reason, configure, run, describe, slower_reason)


def describe(spec: CachedSpec, config: DecodeConfig, launch: DecodeSpec | None = None) -> str:
    """Describe the kernel that serves a call, or some of its requests."""
    launch = DecodeSpec.of_call(spec) if launch is None else launch
    keys = "the pages in the pool" if spec.page_size else "keys in the cache"
    lists = block_lists.lists_blocks(spec, launch, config)
    times = launch.entries_per_request * launch.parts
    reads = "" if times == 1 else f", so that a sequence's keys are read {times} times"
    work = "lists of the blocks that the mask does not hide" if lists else "lengths"
    return (
        f"{config.block_kv} keys x {launch.columns} columns, for {launch.q_len} queries of {launch.group} heads{reads}; "
        f"{config.stages} stages, {config.num_ctas} persistent CTAs that read {keys}, in equal shares by {work}; the last "
        "one of a tile merges its splits"
    )


def pad_groups(spec: DecodeSpec, q: jax.Array) -> jax.Array:
    """Return q `[tokens, N, H]` with zeros where the last part of a group has fewer heads."""
    if not spec.missing_heads:
        return q
    groups = q.reshape(q.shape[0], spec.kv_heads // spec.parts, -1, q.shape[2])
    padded = jnp.pad(groups, ((0, 0), (0, 0), (0, spec.missing_heads), (0, 0)))
    return padded.reshape(q.shape[0], spec.q_heads, q.shape[2])


def trim_groups(spec: DecodeSpec, x: jax.Array) -> jax.Array:
    """Return results `[tokens, N, ...]` without those of the heads that `pad_groups` adds."""
    if not spec.missing_heads:
        return x
    shape = x.shape[0], spec.kv_heads // spec.parts, spec.parts * spec.group, *x.shape[2:]
    return x.reshape(shape)[:, :, : -spec.missing_heads].reshape(x.shape[0], -1, *x.shape[2:])


class LaunchArrays(NamedTuple):
    """What a launch reads beside queries, keys and values, of the part of a call that a device has."""

    lengths: Any  # int32 [B]
    starts: Any  # int32 [B + 1], of packed queries
    table: Any  # int32 [B, pages of a request], if the cache is paged
    mods: ModArrays
    scales: Scales | None


def launch_decode(
    decode: Callable[..., tuple[jax.Array, jax.Array]],
    spec: CachedSpec,
    config: DecodeConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    arrays: LaunchArrays,
    launch: DecodeSpec | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [tokens, N, Hv]` and `lse [tokens, N]` by the kernel of an architecture, `decode`.

    If `launch` is one of some requests (`DecodeSpec.taken_queries`), the rows of others are anything.
    """
    if launch is None:
        launch = DecodeSpec.of_call(spec, arrays.lengths.size, k.shape[2])
    mods, visible = arrays.mods.in_rows(), None
    if block_lists.lists_blocks(spec, launch, config):
        visible = functools.partial(block_lists.visible_blocks, spec, launch, mods)
    plan = plan_decode(launch, config, arrays.lengths, arrays.starts, visible)
    eight_bits = {} if arrays.scales is None else {"scales": arrays.scales}
    rows = pad_groups(launch, q)
    out, lse = decode(launch, config, rows, k, v, plan, arrays.table, mods, **eight_bits)
    return trim_groups(launch, out), trim_groups(launch, lse)


def forward(
    launch: Callable[..., tuple[jax.Array, jax.Array]],
    name: str,
    spec: CachedSpec,
    config: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: CachedOperands,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [B, T, N, Hv]` and natural `lse [B, N, T]`; of packed queries `[tokens, N, Hv]` and `[N, tokens]`.

    `launch`, of this name, launches the kernels of an architecture, as `launch_decode` does.
    """

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, lengths: Any, rest: tuple) -> tuple:
        rows = q.reshape(-1, *q.shape[-2:])
        out, lse = launch(spec, config, rows, k, v, LaunchArrays(lengths, *rest))
        lse = jnp.swapaxes(lse.reshape(q.shape[:-1]), -1, -2)
        return out.reshape(*q.shape[:-1], out.shape[-1]), lse

    needs_arrays = DecodeSpec.of_call(spec).mods is not None
    mods = ModArrays.pack(spec, operands) if needs_arrays else NO_MODS
    rest = operands.starts, operands.table, mods, operands.scales
    batch = "." if spec.is_packed or spec.page_size else "b"
    starts_and_table = jax.tree.map(lambda x: "." * x.ndim, rest[:2])
    scale_axes = operands.scales and Scales(*(f"{batch}k.",) * 2)
    rest_axes = *starts_and_table, mods.axes(batch), scale_axes
    args = q, k, v, operands.lengths, rest
    key = LaunchKey.of(name, spec, config)
    if spec.is_packed or spec.page_size is not None:
        # Any row may be any request's, and any page: only heads are divided, and under vmap a call follows another.
        queries, lse = (".n.", "n.") if spec.is_packed else ("..n.", ".n.")
        axes = Axes((queries, "..k.", "..k.", ".", rest_axes), (queries, lse))
        return sequential_vmap(sharded(kernel, axes, reusable(kernel, key)))(*args)
    axes = Axes(("b.n.", "b.k.", "b.k.", "b", rest_axes), ("b.n.", "bn."))
    return batched(kernel, MAX_REQUESTS, axes, key)(*args)
