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
from pallas_fa2.backends import dense
from pallas_fa2.backends.common.compiled_mods import mask_forms
from pallas_fa2.backends.common.decode.arrays import page_rows
from pallas_fa2.backends.common.decode.spec import BLOCK_KV, DecodeSpec
from pallas_fa2.backends.sm80 import configs
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.caches import Cache, Pages
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.call_spec import CallSpec, split_floats
from pallas_fa2.masks import Causal, Dense, Segments, SlidingWindow
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.parse_call import parse_call
from pallas_fa2.scores import alibi, bias

# What the kernels of a family apply to scores. Under "segments" blocks come from lists that are made on the device, the
# mask is evaluated by the attention, and a score reads data of pairs; with "dropout" the mask is precomputed as bits.
PLAIN, SEGMENTS, DROPOUT = "no mods", "segments and a bias", "mask bits and dropout"
RATE = 0.25  # of dropout
WINDOW = 1400  # of a step of decoding, which the longest sequence exceeds


class Case(NamedTuple):
    """A small call: a function of arrays, all that it compiles, and what its results by their names are to be."""

    kernels: Callable[..., dict[str, jax.Array]]
    arrays: tuple
    expected: dict[str, np.ndarray]


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

    def _data(self, rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
        """Return what the mods of a call on so many queries and keys, of two heads, read."""
        if self.mods == SEGMENTS:
            # The third block of 128 queries sees nothing of the first block of keys, and all of some others.
            ids = np.digitize(np.arange(length), (100, 128))[None].astype(np.int32)
            return {"ids": ids, "bias": rng.standard_normal((1, 2, length, length), np.float32)}
        if self.mods == DROPOUT:
            visible = rng.random((1, 1, length, length)) < 0.5
            visible[..., :128, 64:192], visible[..., 128:, :64] = False, True
            return {"visible": visible, "seed": np.array([5, 7], np.uint32)}
        return {}

    def _options(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the mask, the score and the dropout of a call that reads these data."""
        options: dict[str, Any] = {"mask": Causal() if self.forward is None else None}
        if self.mods == SEGMENTS:
            options = {"mask": Causal() & Segments(data["ids"]), "score": bias(data["bias"])}
        elif self.mods == DROPOUT:
            dropout = {"dropout_rate": RATE, "dropout_rng": data["seed"]}
            options = {"mask": Dense(data["visible"])} | dropout
        return options | {"deterministic_gradients": self.deterministic}

    def _definition(self, data: dict[str, np.ndarray], length: int) -> dict[str, Any]:
        """Return the same as `_options` does as arrays of pairs."""
        causal = np.tri(length, dtype=bool)
        if self.mods == SEGMENTS:
            ids = data["ids"][0]
            return {"keep": causal & (ids[:, None] == ids), "bias": data["bias"]}
        if self.mods == DROPOUT:
            factor = dense.dropout_factor(RATE, data["seed"], 1, 2, length, length)
            return {"keep": data["visible"], "factor": factor}
        return {"keep": causal if self.forward is None else True}

    def case(self, kernels: tuple[Callable, Callable], device: Device) -> Case:
        """Return a call whose lengths are no multiples of a tile's, of two heads that share one of keys.

        `kernels` are a backend's forward and backward.
        """
        rng = np.random.default_rng(self.head_dim)
        length = 200 if self.mods == PLAIN else 330
        q, k, v, dout = (
            _normal(rng, (1, length, heads, dim), self.dtype)
            for heads, dim in (
                *((2, self.head_dim), (1, self.head_dim)),
                *((1, self.value_dim), (2, self.value_dim)),
            )
        )
        data = self._data(rng, length)
        forward, backward = kernels

        def run(q: Any, k: Any, v: Any, dout: Any, data: Any) -> dict[str, jax.Array]:
            # All of a call is traced: by itself, each operation on arrays is a program that XLA compiles.
            spec, operands = parse_call(q, k, v, **self._options(data))
            configuration = configs.configure(spec, device)
            if self.forward is not None:
                configuration = configuration._replace(forward=self.forward)
            out, lse = forward(spec, configuration.forward, q, k, v, operands)
            if configuration.backward is None:
                return {"out": out}
            num_floats = len(split_floats(operands.scores)[0])
            needs_grad = (configuration.score_gradients is None,) * num_floats
            saved = out, lse, dout, None, operands, needs_grad
            *gradients, dscores = backward(spec, configuration.backward, q, k, v, *saved)
            results = dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))
            return results | ({"dscore": dscores[0]} if any(needs_grad) else {})

        expected = dense.attention(q, k, v, dout, **self._definition(data, length))
        return Case(run, (q, k, v, dout, data), expected)


class DecodeFamily(NamedTuple):
    """The decode kernels of these head dims, as blocks of K and V have them, of so many columns of queries, and with so
    many keys of a page that one copy brings."""

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

    def _options(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the mask and the score of a step that reads these data."""
        if not self.mods:
            return {"mask": SlidingWindow(WINDOW)}
        mask = Causal() & Segments(data["ids"], kv_ids=data["kv_ids"])
        return {"mask": mask, "score": alibi(data["slopes"])}

    def _definition(self, data: dict[str, np.ndarray], queries: int, slots: int) -> dict[str, Any]:
        """Return the same as `_options` does, and which slots have a token, as arrays of pairs."""
        lengths = data["lengths"][:, None, None, None]
        i, j = lengths - queries + np.arange(queries)[:, None], np.arange(slots)
        keep = (j < lengths) & (j <= i)
        if not self.mods:
            return {"keep": keep & (i - j < WINDOW)}
        same = data["ids"][:, None, :, None] == data["kv_ids"][:, None, None]
        return {"keep": keep & same, "bias": -data["slopes"][:, None, None] * np.abs(i - j)}

    def case(self, kernels: tuple[Callable, Callable], device: Device) -> Case:
        """Return a step on caches of three sequences: one has no token, and a tile of the longest has several splits.

        `kernels` are a backend's `CachedForward.configure` and `forward`.
        """
        rng = np.random.default_rng(self.head_dim)
        slots = 1536
        # A group has one head less than columns.
        queries = 1 if self.columns % 16 else 2
        heads = 2 * (self.columns // queries - 1)
        dims = self.head_dim, self.value_dim
        q = _normal(rng, (3, queries, heads, self.head_dim), self.dtype)
        data: dict[str, np.ndarray] = {"lengths": np.array([1500, 0, 77], np.int32)}
        if self.page_size is None:
            k, v = contiguous = [_normal(rng, (3, slots, 2, dim), self.dtype) for dim in dims]
        else:
            width = slots // self.page_size
            pool = 3 * width, self.page_size, 2
            k, v = (_normal(rng, (*pool, dim), self.dtype) for dim in dims)
            table = rng.permutation(3 * width).reshape(3, width).astype(np.int32)
            contiguous = [x[table].reshape(3, slots, 2, -1) for x in (k, v)]
            data["table"] = table
        if self.mods:
            ids = np.digitize(np.arange(slots), (30, 700)).astype(np.int32)
            data["ids"] = np.tile(np.array([[2], [0], [1]], np.int32), (1, queries))
            data["kv_ids"] = np.tile(ids, (3, 1))
            # By the least slope, the farthest keys still count.
            data["slopes"] = np.geomspace(0.5, 0.004, heads).astype(np.float32)
        configure, forward = kernels

        def run(q: Any, k: Any, v: Any, data: Any) -> dict[str, jax.Array]:
            if self.page_size is None:
                cache = Cache(k, v, data["lengths"])
            else:
                cache = Pages(k, v, data["table"], data["lengths"])
            spec, operands = parse_cached(q, cache, **self._options(data))
            config = configure(spec, device)
            if self.mods:
                # Blocks are listed where a CTA has many.
                config = dataclasses.replace(config, num_sms=min(8, config.num_sms))
            return {"out": forward(spec, config, q, k, v, operands)[0]}

        expected = dense.attention(q, *contiguous, **self._definition(data, queries, slots))
        return Case(run, (q, k, v, data), expected)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


type Family = AttentionFamily | DecodeFamily


def families_of(
    spec: CallSpec | CachedSpec, device: Device, forward: ForwardConfig | None = None
) -> tuple[Family, ...]:
    """Return the families whose code a call runs on a device, with this forward or the one that it takes."""
    if isinstance(spec, CachedSpec):
        return (_decode_family(spec),)
    mods = []
    evaluates, precomputes = mask_forms(spec)
    if evaluates or spec.scores:
        mods.append(SEGMENTS)
    if precomputes or spec.dropout_rate:
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
