"""Makes the library plan for an H200 on a machine without one, and take each of its variants."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import pallas_fa2 as fa
from pallas_fa2.backends.common import mask_bits
from pallas_fa2.backends.common.primitives import launch
from pallas_fa2.backends.sm80 import support
from pallas_fa2.backends.sm90 import configs
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.xla import tile
from pallas_fa2.device import Device
from pallas_fa2.parse_call import parse_call
from tests.contract.cases import Case

Two = tuple[int, int]

H200 = Device("gpu", "NVIDIA H200", "9.0", 132)
A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0", 108)


@contextlib.contextmanager
def planned_for(device: Device) -> Iterator[None]:
    """What is traced inside may be interpreted or compiled, not run."""
    with contextlib.ExitStack() as patches:
        for module in ("api", "explanation", "cached_api", "cached_explanation"):
            patches.enter_context(
                mock.patch(f"pallas_fa2.{module}.device_of", lambda array: device)
            )
        yield


def planned_for_h200(cores: int = H200.num_sms) -> contextlib.AbstractContextManager[None]:
    """What is traced inside may be interpreted or compiled, not run."""
    return planned_for(H200._replace(num_sms=cores))


def runs_on_ampere(case: Case) -> bool:
    """Return whether the mma.sync kernels take a case."""
    values = case.value_dim or case.head_dim
    return (
        jnp.dtype(case.dtype).name in support.DTYPES
        and all(dim % 8 == 0 and dim <= 256 for dim in (case.head_dim, values))
        and (case.scale is None or case.scale > 0)
    )


@contextlib.contextmanager
def rounded_as_in_kernels() -> Iterator[None]:
    """`blockwise`, traced inside, rounds the operands of products and the output that delta is formed of to 16 bits.

    On a CPU it rounds neither, on a GPU not the output.
    """
    product, row_delta = tile.product, tile.row_delta

    def rounded(letters: str, a: jax.Array, b: jax.Array, accumulator: Any) -> jax.Array:
        dtype = min((a.dtype, b.dtype), key=lambda d: d.itemsize)
        return product(letters, a.astype(dtype), b.astype(dtype), accumulator)

    def of_rounded(out: Any, dout: Any, dlse: Any, dtype: Any) -> jax.Array:
        return row_delta(out.astype(dout.dtype), dout, dlse, dtype)

    with (
        mock.patch.object(tile, "product", rounded),
        mock.patch.object(tile, "row_delta", of_rounded),
    ):
        yield


@functools.cache
def _forwards(case: Case) -> list[configs.ConfigRule]:
    """All for a plain call; otherwise the first, as later ones have smaller tiles of the same."""
    mask, score = (of and of(case)[0] for of in (case.mask, case.score))
    q, k, v, _ = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes)
    spec, _ = parse_call(q, k, v, mask=mask, score=score)
    kernels = configs.forward_configs(case.head_dim, case.value_dim or case.head_dim)
    found = [t for t in kernels if t.matches_kind(spec) and t.max_q_len[spec.causal is None] > 0]
    return found if spec.is_plain else found[:1]


def is_first(case: Case, tuned: configs.ConfigRule) -> bool:
    """Of the forward kernels of a case: with all of them, the backward is the same."""
    return tuned == _forwards(case)[0]


def each_variant(cases: list[Case]) -> list[tuple[Case, configs.ConfigRule]]:
    """Every case with every forward kernel that may serve it, of its head dim or the next size up."""
    return [(case, tuned) for case in cases for tuned in _forwards(case)]


@contextlib.contextmanager
def planned_with(tuned: configs.ConfigRule) -> Iterator[None]:
    """What is traced inside takes this forward kernel, however long it is."""
    with mock.patch.object(
        configs, "FORWARD_CONFIGS", (tuned._replace(max_q_len=configs.ANY_LENGTH),)
    ):
        yield


@contextlib.contextmanager
def asking_first() -> Iterator[None]:
    """What is traced inside asks a mask before the attention, however little that saves."""
    with mock.patch.multiple(mask_bits, MIN_OPS_SAVED=-math.inf, MIN_OPS_BACKWARD=0):
        yield


@contextlib.contextmanager
def whole_heads(taken: bool = True) -> Iterator[None]:
    """What is traced inside has a backward whose CTAs take whole heads where it can, however slow that is; or has
    another one."""
    with _configured(head_per_cta=taken):
        yield


@contextlib.contextmanager
def storing_first(stored: bool = True) -> Iterator[None]:
    """Likewise one that takes no whole heads, and stores the first of a row's dQ."""
    with _configured(head_per_cta=False, first_store=stored):
        yield


def _configured(**fields: bool) -> Any:
    config = functools.partial(BackwardConfig, **fields)
    return mock.patch.object(configs, "BackwardConfig", config)


def name(value: Case | configs.ConfigRule) -> str:
    return str(value) if isinstance(value, Case) else f"{value.config.warpgroups}wg"


def packed_inputs(batch: int, lengths: Two, heads: Two, head_dim: int) -> list[jax.Array]:
    """q, k, v and dout, of lengths (T, S) and (query, key) heads, and each query's document of three."""
    shapes = [(batch, lengths[i], heads[i], head_dim) for i in (0, 1, 1, 0)]
    *keys, key = jax.random.split(jax.random.key(0), 5)
    arrays = [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True)]
    ids = jax.random.randint(key, (batch, lengths[0]), 0, 3)
    return [*arrays, jnp.sort(ids, 1)]


@contextlib.contextmanager
def all_at_once(kernel: str = "attention_gradients") -> Iterator[None]:
    """Interpreted CTAs of a kernel run side by side, which otherwise run one after another: as one
    cluster."""
    build_kernel = launch.build_kernel

    def as_cluster(
        name: str, run: Any, memory: Any, out: Any, grid: Any, groups: int, cluster: Any = ()
    ) -> Any:
        if name == kernel:
            grid, cluster = {"all": 1}, {**grid, **dict(cluster)}
        return build_kernel(name, run, memory, out, grid, groups, dict(cluster))

    with mock.patch.object(launch, "build_kernel", as_cluster):
        yield


def packed(ids: Any) -> Any:
    return fa.Causal() & fa.Segments(ids)


def attend_and_differentiate(mask: Any, implementation: Any = "hopper") -> Any:
    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(
            lambda *x: fa.flash_attention(*x, mask=mask, implementation=implementation), q, k, v
        )
        return out, pull(dout)

    return run


def arrays(
    t: int, s: int, dims: tuple[int, int], dtype: Any = jnp.bfloat16, n: int = 4, k: int = 2
) -> list:
    """q, k, v and dout of batch 2, n query and k key heads, without numbers."""
    h, hv = dims
    shapes = ((2, t, n, h), (2, s, k, h), (2, s, k, hv), (2, t, n, hv))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
