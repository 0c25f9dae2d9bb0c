"""Attention of a sequence divided over devices is that on one device, and moves no more than it must.

Values and gradients are computed by NumPy, with devices as a mapped axis (`jax.vmap` has the collectives of `shard_map`);
fewer tests compile programs for several devices.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from pallas_fa2.distributed import context_parallel
from pallas_fa2.distributed.reach import gather_reach
from pallas_fa2.distributed.ring import Ring
from pallas_fa2.distributed.ring_schedule import BlockCall
from pallas_fa2.distributed.zigzag import to_sequence_order, to_zigzag_order
from tests.support import compile_gate, programs
from tests.support.hopper import planned_for_h200
from tests.support.tiers import slow

AXIS = "sequence"
B, T, N, K, H = 2, 32, 4, 2, 4
TOKENS, PAIRS, WHOLE = (
    "tokens",
    "pairs",
    "whole",
)  # how data are divided: along T, along T with keys of all, not


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


QUICK = {
    # (case, strategy, layout): each kind of step at least once
    ("causal", "ring", "zigzag"), ("window of documents", "ring", "contiguous"), ("scores with data", "ring", "contiguous"),
    ("causal documents", "ring", "zigzag"), ("dropout", "ring", "zigzag"), ("bias", "ring", "zigzag"),
    ("scores with data", "all_gather", "zigzag"), ("dropout", "all_gather", "contiguous"),
    ("dropout", "ulysses", "zigzag"), ("bias", "ulysses", "zigzag"), ("causal documents", "ulysses", "zigzag"),
    ("explicit positions", "ring", "contiguous"), ("dense mask and sinks", "ring", "contiguous"),
    ("keys of another sequence", "ring", "contiguous"), ("nothing", "ring", "contiguous"),
}  # fmt: skip
ALL = [
    (case, strategy, layout)
    for case in CASES
    for strategy in ("ring", "all_gather", "ulysses")
    for layout in ("contiguous", "zigzag")
]


@pytest.mark.parametrize("name, strategy, layout", [x if x in QUICK else slow(*x) for x in ALL])
def test_devices_equal_one(name: str, strategy: str, layout: str) -> None:
    devices = Devices(4, layout)
    actual = on_devices(name, devices, strategy, "blockwise")
    for x, y in zip(*map(jax.tree.leaves, (actual, on_one_device(name))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "name, reach",
    [("sliding window", (4, 0)), ("window of documents", (10, 4)), ("window with data", (4, 0))],
)
def test_gathered_keys_are_those_that_a_mask_reaches(
    name: str, reach: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of up to three devices before, of the third a part, and of the one behind; the ends of the sequence meet."""
    monkeypatch.setattr("pallas_fa2.distributed.reach.KEYS_OF_A_BLOCK", 2)
    with mock.patch.object(context_parallel, "gather_reach", wraps=gather_reach) as gathered:
        actual = on_devices(name, Devices(8, "contiguous"), "all_gather", "blockwise")
    assert {call.args[3] for call in gathered.call_args_list} == {reach}
    for x, y in zip(*map(jax.tree.leaves, (actual, on_one_device(name))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["scores with data", slow("dense mask and sinks"), slow("causal")])
def test_jax_differentiates_the_reference(name: str) -> None:
    actual = on_devices(name, Devices(2, "zigzag"), "ring", "reference")
    for x, y in zip(*map(jax.tree.leaves, (actual, on_one_device(name))), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def ring_of(
    n: int, layout: str, tokens: int = 4, kv_tokens: int | None = None, **options: Any
) -> Ring:
    """Return the steps that are planned for devices with so many tokens."""
    planned: list[Ring] = []

    def plan_only(ring: Ring, q: Any, k: Any, v: Any, operands: Any) -> tuple:
        planned.append(ring)
        return q, jnp.zeros((1, N, tokens))

    def local(q: jax.Array, kv: jax.Array) -> jax.Array:
        made = {
            name: make() if name == "mask" and callable(make) else make
            for name, make in options.items()
        }
        return fa.context_parallel_attention(
            q, kv, kv, axis_name=AXIS, layout=layout, implementation="blockwise", **made
        )

    shapes = [
        jax.ShapeDtypeStruct((n, 1, t, h, H), jnp.float32)
        for t, h in ((tokens, N), (kv_tokens or tokens, K))
    ]
    with mock.patch.object(context_parallel, "ring_attention", plan_only):
        jax.eval_shape(jax.vmap(local, axis_name=AXIS), *shapes)
    return planned[0]


def ids_of(tokens: int) -> Any:
    return fa.Segments(jnp.zeros((1, tokens), jnp.int32))


def described(ring: Ring) -> list[tuple[int, list[tuple]]]:
    """Return each step's shift and calls: (where it runs, queries, keys, mask, first tokens of both)."""

    def describe(call: BlockCall) -> tuple:
        spec = call.spec
        mask = "data" if spec.has_explicit_positions else spec.causal or str(spec.mask)
        return call.runs, spec.q_len, spec.kv_len, mask, call.q_start, call.k_start

    return [(step.shift, list(map(describe, step.calls))) for step in ring.steps]


ALWAYS = "always"
FAR = ("unwrapped", 4, 4, "None", (0, 0), (0, 0))


def test_causal_zigzag_has_equal_work_and_no_positions_as_data() -> None:
    """After its own step a device has two calls of half its queries on half of the keys, without a mask."""
    halves = [  # wherever the step wraps around, the upper queries on all keys; elsewhere all queries on the lower keys
        (ALWAYS, 2, 2, "None", (0, 2), (0, 0)),
        (ALWAYS, 2, 2, "None", (2, 2), (0, 2)),
    ]
    own = (0, [(ALWAYS, 4, 4, "start", (0, 0), (0, 0))])
    assert described(ring_of(4, "zigzag", is_causal=True)) == [
        own,
        *((i, halves) for i in (1, 2, 3)),
    ]


def test_causal_contiguous_steps_run_on_the_devices_behind() -> None:
    own = (0, [(ALWAYS, 4, 4, "start", (0, 0), (0, 0))])
    assert described(ring_of(3, "contiguous", is_causal=True)) == [own, (1, [FAR]), (2, [FAR])]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_without_a_mask_a_step_is_one_call(layout: str) -> None:
    one = [(ALWAYS, 4, 4, "None", (0, 0), (0, 0))]
    assert described(ring_of(3, layout)) == [(i, one) for i in range(3)]


@pytest.mark.parametrize(
    "mask, shifts",
    [
        (fa.SlidingWindow(2), [0, 1]),
        (fa.SlidingWindow(5), [0, 1]),
        (fa.SlidingWindow(6), [0, 1, 2]),  # query 4 i attends to key 4 i - 5
        (fa.Window(1, 1), [0, 1, 7]),
        (fa.Window(0, 5), [0, 6, 7]),
        (fa.Causal() & fa.Window(0, 5), [0]),
        (fa.SlidingWindow(2) & fa.Prefix(jnp.int32(7)), [0, 1]),
        (~fa.Window(3), list(range(1, 8))),
        (fa.mask_fn(lambda q, k: q.index - k.index > 99), []),
    ],
)
def test_a_window_moves_keys_to_the_devices_that_it_reaches(mask: fa.Mask, shifts: list) -> None:
    assert [step.shift for step in ring_of(8, "contiguous", mask=mask).steps] == shifts


def test_documents_are_evaluated_without_positions() -> None:
    mask = lambda: fa.Causal() & ids_of(4)
    (_, own), *others = described(ring_of(3, "zigzag", mask=mask))
    assert [(call[3], call[1:3]) for call in own] == [
        ("(Causal() & Segments(ids=int32[1,4]))", (4, 4))
    ]
    assert all(call[0] == ALWAYS and call[1:3] == (2, 2) for _, calls in others for call in calls)
    assert {call[3] for _, calls in others for call in calls} == {"Segments(ids=int32[1,4])"}


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
        {"mask": fa.Prefix(3) | fa.Causal()},
        {"is_causal": True, "kv_tokens": 6},
    ],
)
def test_positions_are_data_where_code_reads_more_than_known_distances(options: dict) -> None:
    for layout in ("contiguous", "zigzag"):
        calls = [call for _, step in described(ring_of(3, layout, **options)) for call in step]
        assert {"data"} <= {call[3] for call in calls[1:]} <= {"data", "None", "end"}


def test_equal_steps_are_one_loop() -> None:
    """The length of a program does not depend on the number of devices."""

    def count(jaxpr: Any) -> int:
        inner = (
            getattr(p, "jaxpr", p)
            for e in jaxpr.eqns
            for v in e.params.values()
            for p in jax.tree.leaves(v)
        )
        return len(jaxpr.eqns) + sum(count(p) for p in inner if hasattr(p, "eqns"))

    def length(n: int) -> int:
        x = jax.ShapeDtypeStruct((n, 1, 4, K, H), jnp.float32)
        attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS, layout="zigzag",
                                   is_causal=True, implementation="blockwise")  # fmt: skip
        return count(jax.make_jaxpr(jax.vmap(attend, axis_name=AXIS))(x, x, x).jaxpr)

    assert length(5) == length(9)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,) * len(axes)
    devices = jax.devices()[: np.prod(list(axes.values()))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=devices)


def moved(text: str) -> dict[str, list[int]]:
    """Return how many bytes each collective of a StableHLO program has on one device, by its kind."""
    sizes: dict[str, list[int]] = {}
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if kind := re.search(
            r'"stablehlo\.(collective_permute|all_gather|all_to_all|reduce_scatter|all_reduce)"',
            line,
        ):
            # The type of an operation with a region is behind it.
            typed = next(x for x in lines[i:] if ") -> " in x)
            shape, dtype = re.findall(r"tensor<([\dx]+)x(\w+)>", typed.split(" : ")[-1])[0]
            itemsize = {"f32": 4, "bf16": 2, "i32": 4}[dtype]
            sizes.setdefault(kind[1], []).append(
                int(np.prod([*map(int, shape.split("x"))])) * itemsize
            )
    return sizes


def lowered(
    strategy: str, layout: str, n: int, backward: bool, **options: Any
) -> dict[str, list[int]]:
    attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS, strategy=strategy, layout=layout,
                               implementation="blockwise", **options)  # fmt: skip

    def step(q: Any, k: Any, v: Any) -> Any:
        if not backward:
            return attend(q, k, v)
        return jax.vjp(attend, q, k, v)[1](q)

    spec = P(None, AXIS)
    call = jax.shard_map(
        step,
        mesh=mesh_of(**{AXIS: n}),
        in_specs=(spec,) * 3,
        out_specs=(spec,) * 3 if backward else spec,
    )
    x = [jax.ShapeDtypeStruct((1, 8 * n, heads, 16), jnp.bfloat16) for heads in (4, 2, 2)]
    return moved(jax.jit(call).lower(*x).as_text())


Q_BYTES, KV_BYTES, SUM_BYTES = (
    8 * 4 * 16 * 2,
    8 * 2 * 16 * 2,
    8 * 2 * 16 * 4,
)  # q, k or v, dk or dv of a device


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_ring_sends_keys_on_and_sums_home(layout: str) -> None:
    """Of n devices each sends n - 1 blocks of K and V, in the backward again, and as many of dK and dV in float32."""
    once = [KV_BYTES] * 2
    assert lowered("ring", layout, 3, backward=False, is_causal=True) == {
        "collective_permute": once * 2
    }
    sizes = lowered("ring", layout, 3, backward=True, is_causal=True)
    assert {kind: sorted(x) for kind, x in sizes.items()} == {
        "collective_permute": once * 4 + [SUM_BYTES] * 4
    }


def test_a_window_sends_one_block() -> None:
    options = {"mask": fa.SlidingWindow(9)}
    assert lowered("ring", "contiguous", 4, False, **options) == {
        "collective_permute": [KV_BYTES] * 2
    }
    sizes = lowered("ring", "contiguous", 4, True, **options)["collective_permute"]
    assert sorted(sizes) == [KV_BYTES] * 4 + [SUM_BYTES] * 2


def test_a_window_gathers_the_keys_that_it_reaches() -> None:
    """Four tokens of the device before, of eight, and their ids; their dK and dV come back in float32, and those of own keys
    do not move."""
    options = {"mask": fa.SlidingWindow(5) & fa.Segments(jnp.zeros((1, 8), jnp.int32))}
    with mock.patch("pallas_fa2.distributed.reach.KEYS_OF_A_BLOCK", 4):
        sizes = lowered("all_gather", "contiguous", 4, True, **options)
    assert {kind: sorted(x) for kind, x in sizes.items()} == {
        "collective_permute": [4 * 4] + [KV_BYTES // 2] * 2 + [SUM_BYTES // 2] * 2
    }


def test_gathered_keys_are_not_kept_and_sums_are_scattered_in_float32() -> None:
    assert lowered("all_gather", "zigzag", 2, False, is_causal=True) == {
        "all_gather": [KV_BYTES] * 2
    }
    sizes = lowered("all_gather", "zigzag", 2, True, is_causal=True)
    assert sizes == {"all_gather": [KV_BYTES] * 4, "reduce_scatter": [2 * SUM_BYTES] * 2}


def test_ulysses_exchanges_each_array_once() -> None:
    """Where a key head is on several devices it is sent to each."""
    sizes = lowered("ulysses", "contiguous", 2, False, is_causal=True)
    assert sizes == {"all_to_all": [Q_BYTES, KV_BYTES, KV_BYTES, Q_BYTES]}
    sizes = lowered("ulysses", "contiguous", 4, False, is_causal=True)
    assert sizes["all_to_all"][:3] == [Q_BYTES, 2 * KV_BYTES, 2 * KV_BYTES]


MESHES = {
    # the mesh, the axes of batch entries, tokens and heads, whether types say over which axes arrays vary
    "sequence": ({AXIS: 4}, (None, AXIS, None), True),
    "data and sequence": ({"data": 2, AXIS: 2}, ("data", AXIS, None), False),
    "data, sequence and heads": ({"data": 2, AXIS: 2, "heads": 2}, ("data", AXIS, "heads"), True),
    "sequence over two axes": ({"x": 2, "y": 2}, (None, ("x", "y"), None), True),
}


@pytest.mark.parametrize(
    "mesh",
    ["data, sequence and heads", *map(slow, sorted(MESHES.keys() - {"data, sequence and heads"}))],
)
@pytest.mark.parametrize("strategy", ["ring", slow("all_gather"), slow("ulysses")])
def test_compiled_on_a_mesh(mesh: str, strategy: str) -> None:
    """XLA's collectives are those that `jax.vmap` has; a gradient of shared data is summed over all devices."""
    axes, (batch, tokens, heads), check_vma = MESHES[mesh]
    case = CASES["scores with data"]
    x = {name: y[..., :H] if name in ("v", "dout") else y for name, y in inputs(case).items()}
    x.pop("dlse")
    data = {name: y for name, (_, y) in case.data.items()}
    attend = functools.partial(
        fa.context_parallel_attention, axis_name=tokens, strategy=strategy, layout="zigzag"
    )

    def local(attend: Callable, x: dict, data: dict) -> Any:
        out, pull = jax.vjp(lambda q, k, v, data: attend(q, k, v, implementation="blockwise", **case.options(data)),
                            x["q"], x["k"], x["v"], data)  # fmt: skip
        return out, pull(x["dout"])

    spec = P(batch, tokens, heads)
    specs = dict.fromkeys(x, spec), {"b": P(batch, tokens), "slope": P(heads)}
    on_mesh = jax.shard_map(functools.partial(local, attend), mesh=mesh_of(**axes), in_specs=specs, check_vma=check_vma,
                            out_specs=(spec, (spec, spec, spec, specs[1])))  # fmt: skip
    order, inverse = fa.zigzag(T, int(np.prod([axes[name] for name in jax.tree.leaves(tokens)])))

    def permuted(order: Any, tree: Any) -> Any:
        return jax.tree.map(lambda y: y[:, order] if y.ndim > 1 else y, tree)

    actual = permuted(inverse, jax.jit(on_mesh)(*permuted(order, (x, data))))
    expected = programs.evaluate(functools.partial(local, fa.flash_attention), x, data)
    if not check_vma:  # then a gradient of what devices share is that of each
        actual[1][3].pop("slope"), expected[1][3].pop("slope")
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-5)


def hlo_on_two_gpus(layout: str, mask: fa.Mask, strategy: Any = "ring") -> str:
    """Compile the forward and the backward of 2048 tokens for two H200s."""
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), (AXIS,))
    spec = P(None, AXIS)
    attend = functools.partial(
        fa.context_parallel_attention, axis_name=AXIS, layout=layout, mask=mask, strategy=strategy
    )

    def step(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return pull(out)

    specs = {"in_specs": (spec,) * 3, "out_specs": (spec,) * 3}
    run = jax.shard_map(step, mesh=mesh, **specs, check_vma=False)
    x = [
        jax.ShapeDtypeStruct((1, 2048, heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for heads in (4, 2, 2)
    ]
    with planned_for_h200():
        return compile_gate.hlo_for_h200s(run, *x)


@pytest.mark.slow
def test_on_gpus_keys_arrive_before_kernels_compute() -> None:
    """Both would take the same SMs: a kernel of a step runs neither beside a transfer nor before it."""
    events = ""
    for line in hlo_on_two_gpus("zigzag", fa.Causal()).splitlines():
        if start := re.search(r" collective-permute(-start)?\(", line):
            events += "<" if start[1] else "<>"
        elif " collective-permute-done(" in line:
            events += ">"
        elif re.search(r'op_name="[^"]*/attention(_gradients)?/mpmd_map"', line):
            events += "k"
    assert events == "<>kkk<>kkk<>", (
        events
    )  # K and V, again in the backward, and the sums that come home


@pytest.mark.slow
def test_a_window_compiles_for_gpus() -> None:
    """Its kernels read no token data: XLA crashed on arrays of size 0."""
    hlo = hlo_on_two_gpus("contiguous", fa.SlidingWindow(300))
    assert len(re.findall(r" collective-permute(?:-start)?\(", hlo)) == 3


@pytest.mark.slow
def test_on_gpus_gradients_in_reach_are_sent_in_16_bits() -> None:
    """They are converted behind the transfer, before they are added; nothing but positions is gathered."""
    hlo = hlo_on_two_gpus("contiguous", fa.SlidingWindow(300), "all_gather")
    sent = " ".join(re.findall(r" = (.*?) collective-permute-done\(", hlo))
    assert re.findall(r"\w+\[[\d,]*\]", sent) == ["bf16[1,384,2,64]"] * 4
    assert not re.search(r" all-gather(?:-start)?\(|reduce-scatter", hlo)


@pytest.mark.gpus
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
@pytest.mark.parametrize("name", ["causal", "documents", "window", "dropout"])
def test_two_gpus_equal_one(name: str, strategy: str) -> None:
    length, heads, spec = 1024, (4, 2, 2, 4), P(None, AXIS)
    keys = jax.random.split(jax.random.key(0), 4)
    x = [
        jax.random.normal(key, (2, length, h, 64), jnp.bfloat16)
        for key, h in zip(keys, heads, strict=True)
    ]
    ids = jnp.sort(jax.random.randint(keys[0], (2, length), 0, 5), 1)
    options: dict[str, Callable] = {
        "causal": lambda ids: {"is_causal": True},
        "documents": lambda ids: {"mask": fa.Causal() & fa.Segments(ids)},
        "window": lambda ids: {"mask": fa.SlidingWindow(200) & fa.Segments(ids)},
        "dropout": lambda ids: {"is_causal": True, "dropout_rate": 0.3, "dropout_rng": keys[1]},
    }

    def step(attend: Callable, q: Any, k: Any, v: Any, dout: Any, ids: Any) -> tuple:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, **options[name](ids)), q, k, v)
        return out, *pull(dout)

    devices = Devices(2, "contiguous" if name == "window" else "zigzag")
    attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS, strategy=strategy,
                               layout=devices.layout, implementation="hopper")  # fmt: skip
    run = jax.shard_map(functools.partial(step, attend), mesh=mesh_of(**{AXIS: 2}), in_specs=(spec,) * 5,
                        out_specs=(spec,) * 4, check_vma=False)  # fmt: skip
    order = devices.permutation(length)
    actual = [y[:, np.argsort(order)] for y in jax.jit(run)(*(y[:, order] for y in (*x, ids)))]
    reference = functools.partial(fa.flash_attention, implementation="reference")
    expected = jax.jit(functools.partial(step, reference))(*x, ids)
    for a, b in zip(actual, expected, strict=True):
        a, b = (np.asarray(y, np.float32) for y in (a, b))
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


ERRORS = {
    "axis": ({"axis_name": "x"}, "axis_name must be an axis over which jax.shard_map divides"),
    "strategy": ({"strategy": "all"}, "strategy must be one of 'ring', 'all_gather', 'ulysses', but it is 'all'"),
    "layout": ({"layout": "striped"}, "layout must be one of 'contiguous', 'zigzag', but it is 'striped'"),
    "odd": ({"layout": "zigzag"}, "layout 'zigzag' needs an even number of tokens on each device, but T/n is 3"),
    "heads": ({"strategy": "ulysses"}, r"'ulysses' divides heads over the 3 devices.* N \(= 4\)"),
    "pairs": (
        {"mask": np.ones((1, 1, 3, 3), bool)}, r"mask must have shape .* T = 3, S = 9, but it has shape \(1, 1, 3, 3\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument_and_the_remedy(name: str) -> None:
    options, message = ERRORS[name]
    attend = functools.partial(fa.context_parallel_attention, **{"axis_name": AXIS, **options})
    q, kv = jnp.zeros((3, 1, 3, N, H)), jnp.zeros((3, 1, 3, K, H))
    with pytest.raises(ValueError, match=message):
        jax.vmap(attend, axis_name=AXIS)(q, kv, kv)


def test_the_ring_outside_of_jit_is_an_error_that_names_jit() -> None:
    """JAX runs no `custom_vjp` with symbolic zeros in a `shard_map` that is not compiled."""
    spec, x = P(None, AXIS), jnp.zeros((1, 4, K, H))
    attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS)
    run = jax.shard_map(attend, mesh=mesh_of(**{AXIS: 1}), in_specs=(spec,) * 3, out_specs=spec)
    with pytest.raises(NotImplementedError, match=r"strategy 'ring', .*jax\.jit\(jax\.shard_map"):
        run(x, x, x)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_forward_mode_names_the_implementation_that_has_it(strategy: str) -> None:
    x = jnp.ones((2, 1, 4, 2, H))
    attend = functools.partial(fa.context_parallel_attention, axis_name=AXIS, strategy=strategy)

    def tangent(implementation: str | None) -> Any:
        local = functools.partial(attend, implementation=implementation)
        return jax.vmap(lambda x: jax.jvp(local, (x,) * 3, (x,) * 3)[1], axis_name=AXIS)(x)

    assert jax.eval_shape(lambda: tangent("reference")).shape == x.shape
    for implementation, who in (("blockwise", "'blockwise' has"), (None, "implementations have")):
        with pytest.raises(TypeError, match=f"{who} no forward-mode .*implementation='reference'"):
            tangent(implementation)


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_an_empty_batch_has_empty_results_and_gradients(strategy: str) -> None:
    spec = P(None, AXIS)

    def local(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        def attend(*args: Any) -> Any:
            return fa.context_parallel_attention(
                *args[:3], axis_name=AXIS, strategy=strategy, is_causal=True, sinks=args[3], return_lse=True
            )  # fmt: skip

        results, pull = jax.vjp(attend, q, k, v, sinks)
        return results, pull(results)

    arrays = [jnp.zeros((0, 8, heads, dim)) for heads, dim in ((N, H), (K, H), (K, H + 2))]
    results = (spec, P(None, None, AXIS)), (spec, spec, spec, P())
    run = jax.shard_map(
        local, mesh=mesh_of(**{AXIS: 2}), in_specs=(*(spec,) * 3, P()), out_specs=results
    )
    (out, lse), gradients = jax.eval_shape(run, *arrays, jnp.zeros(N))
    assert (out.shape, lse.shape) == ((0, 8, N, H + 2), (0, N, 8))
    assert [dx.shape for dx in gradients] == [*(x.shape for x in arrays), (N,)]


def test_sums_of_many_blocks_are_in_float32() -> None:
    """A key whose gradient is the sum of those of 8 devices is rounded to bfloat16 once for each, not with each sum."""
    n, tokens = 8, 1
    x = jnp.ones((n, 1, tokens, 1, 8), jnp.bfloat16)
    # dV is the sum of 1/8 dO of all queries: 1 + 7/256 is no sum of bfloat16, which has 1/128 there.
    dout = jnp.full_like(x, 1 / 32).at[0].set(8)
    for strategy in ("ring", "all_gather"):
        attend = functools.partial(
            fa.context_parallel_attention,
            axis_name=AXIS,
            strategy=strategy,
            implementation="blockwise",
        )
        local = lambda x, dout: jax.vjp(lambda v: attend(x, x, v), x)[1](dout)[0]  # noqa: B023
        dv = programs.evaluate(jax.vmap(local, axis_name=AXIS), x, dout)
        np.testing.assert_array_equal(
            np.asarray(dv, np.float32), np.asarray(jnp.bfloat16(1 + 7 / 256), np.float32)
        )


@pytest.mark.parametrize("length, n", [(12, 3), (8, 1), (64, 4)])
def test_zigzag_gives_each_device_a_chunk_of_both_ends(length: int, n: int) -> None:
    order = fa.zigzag(length, n)
    chunks = np.arange(length).reshape(2 * n, -1)
    expected = [np.concatenate([chunks[i], chunks[2 * n - 1 - i]]) for i in range(n)]
    np.testing.assert_array_equal(order.permutation, np.concatenate(expected))
    np.testing.assert_array_equal(order.permutation[order.inverse], np.arange(length))
    x = jnp.asarray(order.permutation)[None]
    np.testing.assert_array_equal(to_sequence_order(x, 1, n)[0], np.arange(length))
    np.testing.assert_array_equal(to_zigzag_order(jnp.arange(length), 0, n), order.permutation)


@pytest.mark.parametrize(
    "length, n, message",
    [
        (10, 3, r"length must be a multiple of 2 \* shards = 6, but it is 10"),
        (8, 0, "shards must be at least 1, but it is 0"),
        (8.0, 4, "length must be an integer, but it is 8.0"),
        (8, True, "shards must be an integer, but it is True"),
    ],
)
def test_zigzag_needs_whole_chunks(length: Any, n: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fa.zigzag(length, n)


def test_arguments_that_flash_attention_has_not_are_named() -> None:
    x = jnp.zeros((1, 4, 1, 8))
    with pytest.raises(TypeError, match="context_parallel_attention has no argument 'causal'"):
        fa.context_parallel_attention(x, x, x, axis_name="sequence", causal=True)  # pyright: ignore
    for names in ((), ("a", "a")):
        with pytest.raises(ValueError, match="axis_name must be one axis or a tuple of different"):
            fa.context_parallel_attention(x, x, x, axis_name=names)
