"""Kernels of a bounded batch size, for any batch size and under `vmap`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_fa2.compilation.launches import LaunchKey, reusable
from pallas_fa2.distributed import sharding
from pallas_fa2.distributed.sharding import Axes


def batched(
    kernel: Callable, limit: int, axes: Axes | None = None, key: LaunchKey | None = None
) -> Callable:
    """Return the kernel for any batch, which is the first axis of every array; vmap adds to it.

    A launch takes up to `limit` batch entries. An array that they share has a first axis of 1, and so may its
    gradient have. With `axes`, each device runs its batch entries and heads (`sharding.sharded`). With `key`, a launch
    is lowered once in a process (`launches.reusable`), unless XLA is to partition it: of a call on several devices, the
    launch with all batch entries and heads is traced and never compiled.
    """

    def launches(kernel: Callable, *args: Any) -> Any:
        batch = jax.tree.leaves(args)[0].shape[0]
        if batch <= limit:
            return kernel(*args)

        def launch(entries: slice) -> Any:
            return kernel(*jax.tree.map(lambda x: x if len(x) == 1 else x[entries], args))

        def join(*x: jax.Array) -> jax.Array:
            if sum(map(len, x)) == batch:
                return jnp.concatenate(x)
            totals = [y.sum(0, dtype=jnp.float32, keepdims=True) for y in x]
            return functools.reduce(jnp.add, totals)

        chunks = [slice(i, i + limit) for i in range(0, batch, limit)]
        return jax.tree.map(join, *map(launch, chunks))

    whole = functools.partial(launches, kernel)
    on_device = whole if key is None else functools.partial(launches, reusable(kernel, key))
    call = custom_vmap(on_device if axes is None else sharding.sharded(whole, axes, on_device))

    @call.def_vmap
    def _(size: int, batched: Any, *args: Any) -> Any:
        batched = tuple(batched)
        entries = jax.tree.leaves(jax.tree.map(lambda x, mapped: x.shape[mapped], args, batched))
        batch = entries[0]

        def merge_axes(x: jax.Array, mapped: bool) -> jax.Array:
            x = x if mapped else x[None]
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
            return x.reshape(size * batch, *x.shape[2:])

        def without_vmap(*args: Any) -> Any:
            return whole(*jax.tree.map(lambda x, mapped: x[0] if mapped else x, args, batched))

        def sum_copies(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
            if x.shape[1] == like.shape[0]:
                return x
            return x.sum(1, dtype=jnp.float32, keepdims=True).astype(like.dtype)

        out = call(*jax.tree.map(merge_axes, args, batched))
        out = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), out)
        if min(entries) < batch:
            # What the batch entries shared was copied for each of them, and has as many gradients.
            out = jax.tree.map(sum_copies, out, jax.eval_shape(without_vmap, *args))
        return out, jax.tree.map(lambda _: True, out)

    return call
