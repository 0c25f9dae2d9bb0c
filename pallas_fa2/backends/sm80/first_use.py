"""Checks the kernels on a GPU of a kind on which nobody has run them, when they are first used there.

A small case of each family of kernels is compared with the definition, in about a second and the time that its compilation
takes. The result is kept in a file for that GPU and the versions of its driver, of JAX and of this package.
"""

import functools
import importlib.metadata
import json
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.backends import reference
from pallas_fa2.backends.sm80 import configs
from pallas_fa2.caches import Cache, Pages
from pallas_fa2.compilation import store
from pallas_fa2.device import Device
from pallas_fa2.ir.equivalent_call import equivalent_arrays, equivalent_spec
from pallas_fa2.masks import Causal, SlidingWindow
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.parse_call import parse_call

# Compute capabilities on which the tests of the kernels have run.
RUN_ON = ("9.0",)
# Head dims and dtypes of kernels that differ in their code.
FAMILIES = (
    *((dim, "bfloat16") for dim in (64, 96, 128, 256)),
    *((dim, "float32") for dim in (64, 128)),
)
# Relative error, in the 2-norm: what is computed from bfloat16 has 0.002 to 0.003 on an H200, from float32 5e-7
# interpreted.
MAX_ERROR = {"bfloat16": 0.01, "float32": 1e-5}

# Of the decode kernel: head dim and, if the cache is paged, size of pages.
DECODE_FAMILIES = (64, None), (128, 16), (256, None)

# A backend's forward and backward, or the `configure` and `forward` of a `CachedForward`.
type Kernels = tuple[Callable, Callable]


def cache_file() -> pathlib.Path:
    """Return where results are kept, with a store of compiled kernels and without one."""
    return store.cache_directory() / "first_use.json"


def failure(kernels: Kernels, device: Device, what: str = "attention") -> str | None:
    """Return why the kernels of "attention" or "decode" must not be used on a device, or None: they are right, were run on
    such a GPU by others, or this process has none."""
    if device.capability in RUN_ON:
        return None
    gpus = [d for d in jax.local_devices() if d.platform == "gpu" and d.device_kind == device.kind]
    if not gpus:  # a program is compiled for a device that is elsewhere
        return None
    return _remembered(kernels, device, what, gpus[0])


@functools.lru_cache
def _remembered(kernels: Kernels, device: Device, what: str, gpu: Any) -> str | None:
    """Return why the kernels must not be used, or None, by the file of results; run the check if it has none."""
    file = cache_file()
    versions = gpu.client.platform_version.replace("\n", " ")
    key = f"{device.kind}, {device.capability}, {versions}, jax {jax.__version__}, {_version()}"
    key += "" if what == "attention" else f", {what}"
    run = check if what == "attention" else check_decode
    try:
        results = json.loads(file.read_text())
    except (OSError, ValueError):
        results = {}
    if key not in results:
        # In a thread of its own: a caller may be tracing.
        with ThreadPoolExecutor(1) as pool:
            results[key] = pool.submit(run, kernels, device, gpu).result()
        try:
            store.make_private(file.parent)
            file.write_text(json.dumps(results, indent=1))
        except OSError:
            pass  # it is checked again in the next process
    if not results[key]:
        return None
    return (
        f"its kernels were wrong on this {device.kind} when they were checked ({results[key]}; {file}): please report it, "
        "with what `python -m pallas_fa2` prints"
    )


def check(kernels: Kernels, device: Device, gpu: Any) -> str:
    """Run each family of kernels on a GPU; return what is wrong, or nothing."""
    return "; ".join(filter(None, check_families(kernels, device, gpu).values()))


def check_decode(kernels: Kernels, device: Device, gpu: Any) -> str:
    """Run each family of decode kernels on a GPU; return what is wrong, or nothing."""
    with jax.default_device(gpu):
        errors = [_decode_error(kernels, device, *family) for family in DECODE_FAMILIES]
    return "; ".join(filter(None, errors))


def check_families(kernels: Kernels, device: Device, gpu: Any) -> dict[tuple[int, str], str | None]:
    """Run each family of kernels on a GPU; return what is wrong, or None, by head dim and dtype."""
    with jax.default_device(gpu):
        return {family: _error(kernels, device, *family) for family in FAMILIES}


def _error(kernels: Kernels, device: Device, dim: int, dtype: str) -> str | None:
    """Compare a call with the definition: its lengths are no multiples of a tile's, and two heads share one of keys."""
    rng, results = np.random.default_rng(dim), ("out", "dq", "dk", "dv")
    shapes = ((1, 200, 2, dim), (1, 200, 1, dim), (1, 200, 1, dim), (1, 200, 2, dim))
    q, k, v, dout = (jnp.asarray(rng.standard_normal(x), dtype) for x in shapes)
    mask = SlidingWindow(70) if dim % 128 == 0 else Causal()
    spec, operands = parse_call(q, k, v, mask=mask)
    configuration = configs.configure(spec, device)

    @jax.jit
    def run(q: Any, k: Any, v: Any, dout: Any) -> tuple:
        forward, backward = kernels
        out, lse = forward(spec, configuration.forward, q, k, v, operands)
        saved = out, lse, dout, None, operands, ()
        return out, *backward(spec, configuration.backward, q, k, v, *saved)[:3]

    @jax.jit
    def define(q: Any, k: Any, v: Any, dout: Any) -> tuple:
        def attend(q: Any, k: Any, v: Any) -> Any:
            return reference.forward(spec, None, q, k, v, operands)[0]

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout.astype(out.dtype))

    with jax.default_matmul_precision("highest"):
        actual, expected = run(q, k, v, dout), define(q, k, v, dout)
    for name, x, y in zip(results, actual, expected[: len(results)], strict=True):
        if wrong := _compare(x, y, dtype):
            return f"{name} at H = {dim} in {dtype}: {wrong}"
    return None


def _decode_error(kernels: Kernels, device: Device, dim: int, page: int | None) -> str | None:
    """Compare a step on caches with the definition: three heads share one of keys, one sequence has no token, and a tile
    of the longest has several splits."""
    rng = np.random.default_rng(dim)
    lengths, slots = jnp.array([1500, 0, 77], jnp.int32), 1536

    def random(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    q = random(3, 2, 6, dim)
    if page is None:
        cache = Cache(random(3, slots, 2, dim), random(3, slots, 2, dim), lengths)
    else:
        width = slots // page
        table = jnp.asarray(rng.permutation(3 * width).reshape(3, width), jnp.int32)
        pool = 3 * width, page, 2, dim
        cache = Pages(random(*pool), random(*pool), table, lengths)
    spec, operands = parse_cached(q, cache, mask=SlidingWindow(1400) if page else Causal())
    configure, forward = kernels
    config = configure(spec, device)

    @jax.jit
    def run(*arrays: Any) -> Any:
        return forward(spec, config, *arrays, operands)[0]

    @jax.jit
    def define(q: Any, k: Any, v: Any) -> Any:
        call = equivalent_arrays(spec, q, k, v, operands)
        return reference.forward(equivalent_spec(spec), None, *call)[0]

    arrays = q, cache.key, cache.value
    with jax.default_matmul_precision("highest"):
        wrong = _compare(run(*arrays), define(*arrays), "bfloat16")
    pages = "" if page is None else f" and pages of {page}"
    return wrong and f"a decode step at H = {dim}{pages}: {wrong}"


def _compare(actual: jax.Array, expected: jax.Array, dtype: str) -> str | None:
    """Return what is wrong, or None if the relative error is within the bound; NaN never is."""
    x, y = (np.asarray(array.astype(jnp.float32)) for array in (actual, expected))
    error = np.linalg.norm(x - y) / np.linalg.norm(y)
    return None if error <= MAX_ERROR[dtype] else f"relative error {error:.2g}"


def _version() -> str:
    try:
        return f"pallas_fa2 {importlib.metadata.version('pallas_fa2')}"
    except importlib.metadata.PackageNotFoundError:
        return "pallas_fa2"
