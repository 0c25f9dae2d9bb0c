"""Calls whose sequences are divided over devices, with the data that masks and scores read.

Devices are a mapped axis (`jax.vmap` has the collectives of `shard_map`), or those of a mesh.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import pallas_fa2 as fa
from tests.support import programs

AXIS = "sequence"
B, T, N, K, H = 2, 32, 4, 2, 4
# How data are divided: along T, along T with keys of all, not.
TOKENS, PAIRS, WHOLE = "tokens", "pairs", "whole"


class Case(NamedTuple):
    """The options of a call from its data, and the data: `name: (how it is divided, array)`."""

    options: Callable[[dict], dict]
    data: dict[str, tuple[str, Any]] = {}  # noqa: RUF012
    kv_len: int = T


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


IDS = np.sort(np.random.default_rng(1).integers(0, 4, (B, T)), 1).astype(np.int32)
POSITIONS = np.broadcast_to((np.arange(T, dtype=np.int32) * 7) % T, (B, T))
DISTANCE = fa.score_fn(
    lambda s, q, k, c: s + q.b * k.b - c.slope * abs(q.index - k.index).astype(s.dtype)
)
CASES = {
    "full": Case(lambda d: {}),
    "causal": Case(lambda d: {"is_causal": True}),
    "sliding window": Case(lambda d: {"mask": fa.SlidingWindow(5)}),
    "window with data": Case(
        lambda d: {"mask": fa.SlidingWindow(5), "score": DISTANCE(tokens={"b": d["b"]}, heads={"slope": d["slope"]})},
        {"b": (TOKENS, random(2, B, T)), "slope": (WHOLE, random(3, N))},
    ),
    "window of documents": Case(
        lambda d: {"mask": fa.Window(9, 3) & fa.Segments(d["ids"])}, {"ids": (TOKENS, IDS)}
    ),
    "causal documents": Case(
        lambda d: {"mask": fa.Causal() & fa.Segments(d["ids"])}, {"ids": (TOKENS, IDS)}
    ),
    "documents by starts": Case(
        lambda d: {"mask": fa.Causal() & fa.Documents(d["starts"])},
        {"starts": (TOKENS, np.repeat([[0, 5, 5, 24], [0, 0, 20, 20]], 8, 1).astype(np.int32))},
    ),
    "prefix": Case(lambda d: {"mask": fa.Prefix(d["n"]) | fa.Causal()}, {"n": (WHOLE, np.int32([5, 11]))}),
    "dropout": Case(lambda d: {"is_causal": True, "dropout_rate": 0.4, "dropout_rng": jax.random.key(3)}),
    "scores with data": Case(
        lambda d: {"is_causal": True, "score": DISTANCE(tokens={"b": d["b"]}, heads={"slope": d["slope"]})},
        {"b": (TOKENS, random(2, B, T)), "slope": (WHOLE, random(3, N))},
    ),
    "bias": Case(lambda d: {"is_causal": True, "score": fa.bias(d["bias"])}, {"bias": (PAIRS, random(4, 1, N, T, T))}),
    "dense mask and sinks": Case(
        lambda d: {"mask": d["dense"], "sinks": d["sinks"]},
        {"dense": (PAIRS, random(5, B, 1, T, T) > 0), "sinks": (WHOLE, random(6, N))},
    ),
    "explicit positions": Case(
        lambda d: {"is_causal": True, "q_positions": d["at"], "kv_positions": d["at"]},
        {"at": (TOKENS, POSITIONS)},
    ),
    "keys of another sequence": Case(lambda d: {"is_causal": True, "align": "end"}, kv_len=2 * T),
    "nothing": Case(lambda d: {"mask": lambda q, k: q.index - k.index > 99}),
}  # fmt: skip


class Devices(NamedTuple):
    """The devices of a mesh axis, and the layout of sequences over them."""

    n: int
    layout: str

    def permutation(self, length: int) -> np.ndarray:
        return (
            fa.zigzag(length, self.n).permutation if self.layout == "zigzag" else np.arange(length)
        )

    def split(self, x: Any, axis: int = 1) -> Any:
        """Return the arrays of all devices, `[n, ...]`."""
        x = np.take(x, self.permutation(x.shape[axis]), axis)
        return np.stack(np.split(x, self.n, axis))

    def join(self, x: Any, axis: int = 1) -> Any:
        """Return the array of a whole sequence from those of all devices."""
        x = np.concatenate(list(np.asarray(x)), axis)
        return np.take(x, np.argsort(self.permutation(x.shape[axis])), axis)

    def split_data(self, how: str, x: Any) -> Any:
        if how == WHOLE:
            return np.stack([np.asarray(x)] * self.n)
        if how == TOKENS:
            return self.split(x)
        return self.split(np.take(x, self.permutation(x.shape[3]), 3), 2)

    def join_gradient(self, how: str, x: Any) -> Any:
        if how == WHOLE:
            return np.sum(x, 0)
        if how == TOKENS:
            return self.join(x)
        x = self.join(x, 2)
        return np.take(x, np.argsort(self.permutation(x.shape[3])), 3)


def inputs(case: Case) -> dict[str, np.ndarray]:
    shapes = {"q": (B, T, N, H), "k": (B, case.kv_len, K, H), "v": (B, case.kv_len, K, H + 2)}
    arrays = {name: random(i, *shape) for i, (name, shape) in enumerate(shapes.items(), 10)}
    return arrays | {"dout": random(20, B, T, N, H + 2), "dlse": random(21, B, N, T)}


def results(attend: Callable, case: Case, x: dict, data: dict) -> tuple:
    """Return out, lse and the gradients of q, k, v and of the floating-point data."""
    floats = {name: y for name, y in data.items() if jnp.issubdtype(y.dtype, jnp.floating)}

    def call(q: Any, k: Any, v: Any, floats: dict) -> Any:
        return attend(q, k, v, return_lse=True, **case.options({**data, **floats}))

    (out, lse), pull = jax.vjp(call, x["q"], x["k"], x["v"], floats)
    dlse = jnp.where(lse == -jnp.inf, 0.0, x["dlse"])
    return out, lse, pull((x["dout"], dlse))


@functools.cache
def on_one_device(name: str) -> tuple:
    case = CASES[name]
    attend = functools.partial(fa.flash_attention, implementation="reference")
    data = {name: x for name, (_, x) in case.data.items()}
    return programs.evaluate(lambda x, data: results(attend, case, x, data), inputs(case), data)


def on_devices(name: str, devices: Devices, strategy: str, implementation: str) -> tuple:
    """Return what `results` does, with devices as a mapped axis."""
    case = CASES[name]
    attend = functools.partial(
        fa.context_parallel_attention,
        axis_name=AXIS, strategy=strategy, layout=devices.layout, implementation=implementation,
    )  # fmt: skip
    x = {name: devices.split(y, 2 if name == "dlse" else 1) for name, y in inputs(case).items()}
    data = {name: devices.split_data(*y) for name, y in case.data.items()}
    local = jax.vmap(lambda x, data: results(attend, case, x, data), axis_name=AXIS)
    out, lse, (*dqkv, ddata) = programs.evaluate(local, x, data)
    ddata = {name: devices.join_gradient(case.data[name][0], dx) for name, dx in ddata.items()}
    return devices.join(out), devices.join(lse, 2), (*map(devices.join, dqkv), ddata)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(axes)
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=devices)
