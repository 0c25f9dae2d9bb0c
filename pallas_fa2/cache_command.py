"""`python -m pallas_fa2 cache`: shows, warms and clears the store of compiled kernels."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_fa2 as fa
from pallas_fa2.compilation import store


def run(arguments: Sequence[str]) -> int:
    """Run the command with what follows `cache` on the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pallas_fa2 cache", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("show", help="print the directory, the number of entries and their size")
    commands.add_parser("clear", help="remove all entries")
    warm = commands.add_parser("warm", help="compile one call and its gradient for this GPU")
    warm.add_argument("--query", type=_shape, required=True, metavar="B,T,N,H")
    warm.add_argument("--key", type=_shape, required=True, metavar="B,S,K,H")
    warm.add_argument("--value-dim", type=int, metavar="HV", help="H by default")
    warm.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    warm.add_argument("--causal", action="store_true")
    warm.add_argument("--forward-only", action="store_true", help="no gradient")
    options = parser.parse_args(arguments)
    directory = store.directory()
    if directory is None:
        print(
            f"There is no store: set {store.VARIABLE}=1 for the user's cache directory, or to another one."
        )
        return 1
    if options.command == "clear":
        print(f"{store.clear()} entries removed from {directory}")
        return 0
    if (reason := store.obstacle(directory)) is not None:
        print(f"{directory} is not used: {reason}")
        return 1
    if options.command == "warm":
        return _warm(options)
    sizes = store.sizes()
    print(
        f"{directory}: {len(sizes)} entries, {sum(sizes.values()) / 2**20:.1f} MiB of at most "
        f"{store.MAX_BYTES >> 20}"
    )
    return 0


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(map(int, text.split(",")))
    if len(shape) != 4 or min(shape) < 1:
        raise argparse.ArgumentTypeError(
            f"it must be four sizes, such as 1,4096,32,128, but it is {text}"
        )
    return shape


def _warm(options: argparse.Namespace) -> int:
    """Lower a call: the kernels are compiled and stored by then, and XLA compiles nothing."""
    if jax.default_backend() != "gpu":
        print(
            f"Kernels are compiled for the GPU of this machine, but JAX runs on {jax.default_backend()}."
        )
        return 1
    value = (*options.key[:3], options.value_dim or options.key[3])
    dtype = jnp.dtype(options.dtype)
    q, k, v = (jax.ShapeDtypeStruct(shape, dtype) for shape in (options.query, options.key, value))

    def attend(*qkv: jax.Array) -> jax.Array:
        return fa.flash_attention(*qkv, is_causal=options.causal, implementation="fused")

    def differentiate(*qkv: jax.Array) -> tuple[Any, ...]:
        out, pull = jax.vjp(attend, *qkv)
        return out, *pull(out)

    start, before = time.perf_counter(), set(store.files())
    jax.jit(attend if options.forward_only else differentiate).lower(q, k, v)
    added = len(set(store.files()) - before)
    print(f"{added} entries added to {store.directory()} in {time.perf_counter() - start:.1f} s")
    if not added:
        explanation = fa.explain(q, k, v, is_causal=options.causal, implementation="fused")
        print(
            "Its kernels were stored already, or none can be written there (docs/user/first-call.md). "
            f"Its forward: {explanation.forward}"
        )
    return 0
