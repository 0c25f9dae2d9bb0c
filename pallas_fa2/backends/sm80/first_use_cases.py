"""Families of the mma.sync kernels, and a small call of each, by the kernels and by the definition.

Kernels of a family have their code in common but for lengths, numbers of heads and what masks and scores compute.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.arithmetic import round_up
from pallas_fa2.backends import reference
from pallas_fa2.backends.common.decode.arrays import page_rows
from pallas_fa2.backends.common.decode.spec import BLOCK_KV, DecodeSpec
from pallas_fa2.backends.sm80 import configs
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.caches import Cache, Pages
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.call_spec import CallSpec, split_floats
from pallas_fa2.ir.equivalent_call import equivalent_arrays, equivalent_spec
from pallas_fa2.masks import Causal, Dense, Segments, SlidingWindow
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.parse_call import parse_call
from pallas_fa2.scores import alibi, bias

# What the kernels of a family apply to scores. Under "segments" blocks come from lists that are made on the device, the mask is
# evaluated by the attention, and a score reads data of pairs; with "dropout" the mask is precomputed as bits.
PLAIN, SEGMENTS, DROPOUT = "no mods", "segments and a bias", "mask bits and dropout"


class Case(NamedTuple):
    """A small call: two functions of the same arrays, whose results that have names are to be the same."""

    names: tuple[str, ...]  # of the first results
    kernels: Callable[..., tuple[jax.Array, ...]]
    definition: Callable[..., tuple[jax.Array, ...]]
    arrays: tuple


class AttentionFamily(NamedTuple):
    """The forward and backward kernels of these head dims."""

    head_dim: int
    value_dim: int
    dtype: str
    mods: str = PLAIN
    deterministic: bool = False
    # The forward, if it is not the one that short calls take: that of long ones, or one that `autotune` tries.
    forward: ForwardConfig | None = None

    def __str__(self) -> str:
        ordered = ", deterministic gradients" * self.deterministic
        forward = "" if self.forward is None else f", {self.forward}"
        return (
            f"H {self.head_dim}, Hv {self.value_dim}, {self.dtype}, {self.mods}{ordered}{forward}"
        )

    def _options(self, rng: np.random.Generator, length: int) -> dict[str, Any]:
        """Return the mask, the score and the dropout of a call on so many queries and keys, of two heads."""
        options: dict[str, Any] = {"mask": Causal() if self.forward is None else None}
        if self.mods == SEGMENTS:
            # The third block of 128 queries sees nothing of the first block of keys, and all of some others.
            ids = jnp.asarray(np.digitize(np.arange(length), (100, 128)), jnp.int32)[None]
            pairs = rng.standard_normal((1, 2, length, length), np.float32)
            options = {
                "mask": Causal() & Segments(ids),
                "score": bias(jnp.asarray(pairs)),
            }
        elif self.mods == DROPOUT:
            seen = rng.random((length, length)) < 0.5
            seen[:128, 64:192], seen[128:, :64] = False, True
            options = {"mask": Dense(jnp.asarray(seen)[None, None])}
            options |= {"dropout_rate": 0.25, "dropout_rng": jax.random.key(0)}
        return options | {"deterministic_gradients": self.deterministic}

    def case(self, kernels: tuple[Callable, Callable], device: Device) -> Case:
        """Return a call whose lengths are no multiples of a tile's, of two heads that share one of keys.

        `kernels` are a backend's forward and backward.
        """
        rng = np.random.default_rng(self.head_dim)
        length = 200 if self.mods == PLAIN else 330
        q, k, v, dout = (
            jnp.asarray(rng.standard_normal((1, length, heads, dim)), self.dtype)
            for heads, dim in (
                *((2, self.head_dim), (1, self.head_dim)),
                *((1, self.value_dim), (2, self.value_dim)),
            )
        )
        spec, operands = parse_call(q, k, v, **self._options(rng, length))
        configuration = configs.configure(spec, device)
        if self.forward is not None:
            configuration = configuration._replace(forward=self.forward)
        num_floats = len(split_floats(operands.scores)[0])
        needs_grad = (configuration.score_gradients is None,) * num_floats
        names = ("out",)
        if configuration.backward is not None:
            names = ("out", "dq", "dk", "dv", *["dscore"] * sum(needs_grad))
        forward, backward = kernels

        def run(q: Any, k: Any, v: Any, dout: Any, operands: Any) -> tuple:
            out, lse = forward(spec, configuration.forward, q, k, v, operands)
            if configuration.backward is None:
                return (out,)
            saved = out, lse, dout, None, operands, needs_grad
            *gradients, dscores = backward(spec, configuration.backward, q, k, v, *saved)
            return out, *gradients, *dscores

        def define(q: Any, k: Any, v: Any, dout: Any, operands: Any) -> tuple:
            def attend(q: Any, k: Any, v: Any, floats: Any) -> Any:
                of_call = operands._replace(scores=rebuild(floats))
                return reference.forward(spec, None, q, k, v, of_call)[0]

            floats, rebuild = split_floats(operands.scores)
            out, pull = jax.vjp(attend, q, k, v, floats)
            *gradients, dscores = pull(dout.astype(out.dtype))
            return out, *gradients, *dscores

        return Case(names, run, define, (q, k, v, dout, operands))


class DecodeFamily(NamedTuple):
    """The decode kernels of these head dims, as blocks of K and V have them, of so many columns of queries, and with so many
    keys of a page that one copy brings."""

    head_dim: int
    value_dim: int
    dtype: str
    columns: int = 8
    page_size: int | None = None
    mods: bool = False

    def __str__(self) -> str:
        pages = "contiguous" if self.page_size is None else f"pages of {self.page_size}"
        mods = ", a mask and a score" * self.mods
        return f"decoding, H {self.head_dim}, Hv {self.value_dim}, {self.dtype}, {self.columns} columns, {pages}{mods}"

    def case(self, kernels: tuple[Callable, Callable], device: Device) -> Case:
        """Return a step on caches of three sequences: one has no token, and a tile of the longest has several splits.

        `kernels` are a backend's `CachedForward.configure` and `forward`.
        """
        rng = np.random.default_rng(self.head_dim)
        lengths, slots = jnp.array([1500, 0, 77], jnp.int32), 1536
        # A group has one head less than columns.
        queries = 1 if self.columns % 16 else 2
        group = self.columns // queries - 1

        def random(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), self.dtype)

        q = random(3, queries, 2 * group, self.head_dim)
        if self.page_size is None:
            k, v = (random(3, slots, 2, dim) for dim in (self.head_dim, self.value_dim))
            cache = Cache(k, v, lengths)
        else:
            width = slots // self.page_size
            pool = 3 * width, self.page_size, 2
            k, v = (random(*pool, dim) for dim in (self.head_dim, self.value_dim))
            table = jnp.asarray(rng.permutation(3 * width).reshape(3, width), jnp.int32)
            cache = Pages(k, v, table, lengths)
        options: dict[str, Any] = {"mask": SlidingWindow(1400)}
        if self.mods:
            ids = jnp.asarray(np.digitize(np.arange(slots), (30, 700)), jnp.int32)[None]
            of_queries = jnp.array([[2], [0], [1]], jnp.int32)
            mask = Causal() & Segments(
                jnp.tile(of_queries, (1, queries)), kv_ids=jnp.tile(ids, (3, 1))
            )
            options = {"mask": mask, "score": alibi(2 * group)}
        spec, operands = parse_cached(q, cache, **options)
        configure, forward = kernels
        config = configure(spec, device)
        if self.mods:
            # Blocks are listed where a CTA has many.
            config = dataclasses.replace(config, num_sms=min(8, config.num_sms))

        def run(q: Any, k: Any, v: Any, operands: Any) -> tuple:
            return (forward(spec, config, q, k, v, operands)[0],)

        def define(q: Any, k: Any, v: Any, operands: Any) -> tuple:
            call = equivalent_arrays(spec, q, k, v, operands)
            return (reference.forward(equivalent_spec(spec), None, *call)[0],)

        return Case(("out",), run, define, (q, k, v, operands))


type Family = AttentionFamily | DecodeFamily


def families_of(
    spec: CallSpec | CachedSpec, device: Device, forward: ForwardConfig | None = None
) -> tuple[Family, ...]:
    """Return the families whose code a call runs on a device, with this forward or the one that it takes."""
    if isinstance(spec, CachedSpec):
        return (_decode_family(spec),)
    mods = []
    if spec.has_general_mask or spec.scores:
        mods.append(SEGMENTS)
    if spec.has_general_mask or spec.dropout_rate:  # a mask may be precomputed as bits
        mods.append(DROPOUT)
    head_dim, value_dim = configs.kernel_dims(spec.head_dim, spec.value_dim)
    own = forward or configs.forward_config(spec, device)
    short = configs.forward_config(dataclasses.replace(spec, q_len=1), device)
    of_all = spec.deterministic, None if own == short else own
    return tuple(
        AttentionFamily(head_dim, value_dim, spec.dtype.name, x, *of_all) for x in mods or (PLAIN,)
    )


def _decode_family(spec: CachedSpec) -> DecodeFamily:
    launch, call = DecodeSpec.of_call(spec), spec.call
    page = None if spec.page_size is None else page_rows(launch, BLOCK_KV)
    head_dim, value_dim = round_up(call.head_dim, 64), round_up(call.value_dim, 64)
    has_mods = launch.mods is not None
    return DecodeFamily(head_dim, value_dim, call.dtype.name, launch.columns, page, has_mods)
