"""Runs a case through the library and holds it against the dense definition."""

import contextlib
import copy
import dataclasses
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from pallas_fa2 import api
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.backends.xla import blockwise
from pallas_fa2.planning import plan
from tests.contract.rule import FACTOR, FLOOR
from tests.fuzz import dense, masks
from tests.fuzz.case import Arguments, Case, Cotangents
from tests.fuzz.dense import Results
from tests.support.hopper import asking_first, planned_for, storing_first, whole_heads

# XLA's CPU compiler leaves a few products of bfloat16 with tiny axes to a runtime that has none.
XLAS_OWN = "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32"

# Normal numbers begin here: smaller ones have fewer bits, or are flushed to 0, as each term of a sum may be.
# Those of float16 are not, and are its multiples of this.
SMALLEST = {"bfloat16": 2.0**-126, "float16": 2.0**-24, "float32": 2.0**-126, "float64": 2.0**-1022}

FAR = 3  # tokens of poison around a sliced array


def implementations(gpu: bool, preferred: str | None = None) -> tuple[str | None, ...]:
    """Return what runs each case: on a GPU the preferred one where it takes the call, and otherwise what is chosen."""
    return (preferred,) if gpu else ("reference", "blockwise")


def attend(case: Case, implementation: str | None, args: Arguments) -> tuple:
    """The call itself: `(out, lse)`, or `(out,)` where no logsumexp is asked for."""
    q, k, v = (_view(case, x) for x in args[:3])
    options: dict[str, Any] = {} if case.align == "start" else {"align": case.align}
    names = {"q": "q_positions", "k": "kv_positions"}
    options |= {names[side]: x for side, x in args.positions.items()}
    token = masks.DESCRIBE.set(functools.partial(fa.explain, q, k, v, **options))
    if case.mask is not None:
        options["mask"] = _made(case, case.mask.ours(args.mask))
    if case.scores:
        pairs = zip(case.scores, args.scores, strict=True)
        options["score"] = tuple(_made(case, score.ours(data)) for score, data in pairs)
    masks.DESCRIBE.reset(token)
    if case.sinks:
        options["sinks"] = args.sinks
    if case.dropout:
        options |= {"dropout_rate": case.dropout, "dropout_rng": args.key}
    if case.deterministic:
        options["deterministic_gradients"] = True
    results = fa.flash_attention(
        q, k, v, scale=case.scale, return_lse=case.lse, implementation=implementation, **options
    )
    return results if case.lse else (results,)


def _made(case: Case, thing: Any) -> Any:
    """A mask or score as it comes out of a pickle or a copy; what cannot be pickled, a function's own globals or
    cells, as it is."""
    if case.made == "fresh" or "Reads" in repr((case.mask, case.scores)):
        return thing
    leaves, tree = jax.tree.flatten(thing)
    still = jax.tree.unflatten(tree, [np.zeros((), np.int32)] * len(leaves))  # no tracers
    again = copy.deepcopy(still) if case.made == "copied" else pickle.loads(pickle.dumps(still))
    return jax.tree.unflatten(jax.tree.structure(again), leaves)


def _view(case: Case, x: Any) -> Any:
    """The array that a call sees of the one in memory."""
    if case.layout == "swapped":
        return jnp.swapaxes(x, -2, -3)
    return x[..., FAR:-FAR, :, :] if case.layout == "sliced" else x


def _lay(case: Case, x: np.ndarray) -> np.ndarray:
    """The array in memory: `_view`'s inverse, with poison around a slice."""
    if case.layout == "swapped":
        return np.ascontiguousarray(np.swapaxes(x, -2, -3))
    if case.layout == "sliced":
        around = [(0, 0)] * (x.ndim - 3) + [(FAR, FAR), (0, 0), (0, 0)]
        return np.pad(x, around, constant_values=_poison(case, x.dtype))
    return x


def _poison(case: Case, dtype: Any) -> Any:
    with np.errstate(over="ignore"):  # 1e30 is infinite in float16
        return np.asarray(case.poison).astype(dtype)


def gradients(case: Case, implementation: str | None) -> Callable:
    """`(arguments, cotangents) -> (values, gradients of what it differentiates)`."""

    def call(args: Arguments) -> tuple:
        return attend(case, implementation, args)

    transformed = {
        "checkpoint": jax.checkpoint(call),
        "grad of vmap": jax.vmap(call, (case.mapped_axes,)),
        "scan": functools.partial(_scanned, case, call),
        "shard_map": functools.partial(in_shard_map, call),
    }.get(case.transform, call)

    def run(args: Arguments, cotangents: Cotangents) -> tuple:
        results, pull = jax.vjp(lambda *x: transformed(Arguments(*x, *args[5:])), *args[:5])
        return results, pull(tuple(cotangents)[: len(results)])

    return jax.vmap(run, (case.mapped_axes, 0)) if case.transform == "vmap of grad" else run


def _scanned(case: Case, call: Callable, args: Arguments) -> Any:
    mapped = [None if a is None else x for x, a in zip(args, case.mapped_axes, strict=True)]

    def step(carry: None, xs: list) -> tuple[None, tuple]:
        each = zip(args, xs, strict=True)
        return carry, call(Arguments(*(shared if x is None else x for shared, x in each)))

    return jax.lax.scan(step, None, mapped)[1]


def in_shard_map(call: Callable, *args: Any) -> Any:
    """Call inside `shard_map` on one device, where arrays vary over the mesh's axis: a check of types, not of sums over
    devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    specs = jax.tree.map(lambda x: P("x") if jnp.ndim(x) else P(), args)
    return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("x"))(*args)


def _stacked(case: Case, entries: list) -> tuple[Arguments, Cotangents]:
    """The arguments of the whole call: what is mapped has its axis, in memory's layout."""
    laid = [Arguments(*(_lay(case, x) for x in args[:3]), *args[3:]) for args, _ in entries]
    cotangents = [c for _, c in entries]
    if not case.mapped:
        return laid[0], cotangents[0]

    def join(axis: int | None, *xs: Any) -> Any:
        return xs[0] if axis is None else jax.tree.map(lambda *x: np.stack(x, axis), *xs)

    args = Arguments(*(join(*x) for x in zip(case.mapped_axes, *laid, strict=True)))
    return args, join(0, *cotangents)


def poisoned(case: Case, entries: list, visible: list[np.ndarray]) -> list:
    """Return the same calls with poison in what no visible pair of tokens reads.

    An array that all entries share is poisoned where none of them reads it.
    """
    shape, batch = case.shape, case.batch
    any_entry = np.logical_or.reduce(visible)
    axes = case.mapped_axes

    def queries(alive: np.ndarray) -> np.ndarray:  # [*B, T, N]
        return np.moveaxis(alive.any(-1), 1, 2).reshape(*batch, case.q_len, shape.q_heads)

    def keys(alive: np.ndarray) -> np.ndarray:  # [*B, S, K]: a group shares its keys
        by_group = alive.reshape(-1, case.kv_heads, case.group, *alive.shape[2:]).any((2, 3))
        return np.moveaxis(by_group, 1, 2).reshape(*batch, case.kv_len, case.kv_heads)

    def put(x: np.ndarray, alive: np.ndarray) -> np.ndarray:
        return np.where(alive, x, _poison(case, x.dtype))

    built = []
    for (args, cotangents), own in zip(entries, visible, strict=True):
        of_q, of_k, of_v, of_scores = (any_entry if axis is None else own for axis in axes[:4])
        scores = tuple(
            {n: put(x, shape.gather(score.kinds[n], of_scores, x, np.any)) for n, x in data.items()}
            for score, data in zip(case.scores, args.scores, strict=True)
        )
        new = args._replace(
            q=put(args.q, queries(of_q)[..., None]),
            k=put(args.k, keys(of_k)[..., None]),
            v=put(args.v, keys(of_v)[..., None]),
            scores=scores,
        )
        dead = queries(own)
        dlse = cotangents.lse  # with sinks every row has one
        dlse = dlse if case.sinks else put(dlse, np.moveaxis(dead, -1, -2))
        built.append((new, Cotangents(put(cotangents.out, dead[..., None]), dlse)))
    return built


def _combine(case: Case, results: list[Results], add: Callable) -> Results:
    """Combine the results of entries: stack values, and sum gradients of shared inputs by `add`."""
    if not case.mapped:
        return results[0]
    axes = case.mapped_axes
    summed = [case.transform != "vmap of grad" and a is None for a in axes[:5]]

    def join(is_summed: bool, *xs: Any) -> Any:
        merge = add if is_summed else lambda x: np.stack(x)
        return jax.tree.map(lambda *x: merge(np.asarray(x)), *xs)

    joined = (join(*x) for x in zip((False, False, *summed), *results, strict=True))
    return Results(*joined)


def _as_results(case: Case, result: tuple) -> Results:
    """Return results in the form of the dense definition: batch axes are merged, a mapped axis is first."""
    values, (*gradients, dscores, dsinks) = jax.tree.map(np.asarray, result)

    def merged(x: np.ndarray, rest: int, mapped: bool) -> np.ndarray:
        lead = x.shape[:1] if mapped else ()
        return x.reshape(*lead, case.shape.pairs[0], *x.shape[x.ndim - rest :])

    def reduce_to_input(x: np.ndarray, axis: int | None) -> np.ndarray:
        # The gradient of an argument lies as the argument does; vmap puts its results first.
        axis = axis if case.transform != "vmap of grad" else 0
        mapped = case.mapped and axis is not None
        x = np.moveaxis(x, axis, 0) if mapped else x
        return merged(np.asarray(_view(case, x)), 3, mapped)

    out = merged(values[0], 3, case.mapped)
    lse = merged(values[1], 2, case.mapped) if case.lse else None
    return Results(out, lse, *map(reduce_to_input, gradients, case.axes[:3]), dscores, dsinks)


def _named(results: Results) -> dict[str, Any]:
    named = {n: x for n, x in results._asdict().items() if n != "dscores" and x is not None}
    for n, by in enumerate(results.dscores):
        named |= {f"gradient of scores[{n}].{name}": x for name, x in by.items()}
    return named


def deviation(x: Any, expected: np.ndarray) -> float:
    """The largest; infinite where infinities or NaN differ."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    infinite = np.isinf(expected)
    if x.shape != expected.shape:
        raise AssertionError(f"shape {x.shape} where {expected.shape} is due")
    if np.isnan(x).any() or not np.array_equal(x[infinite], expected[infinite]):
        return float("inf")
    return float(np.abs(x[~infinite] - expected[~infinite]).max(initial=0.0))


class Wrong(AssertionError):
    """A case that failed, with the line that runs it again."""

    def __init__(self, case: Any, why: str):
        super().__init__(f'{why}\n  python -m tests.fuzz "{case}"')
        self.case = case


class Checked(NamedTuple):
    share: float  # the largest error, of what it may be
    ran: set[str]  # implementations


def check(case: Case, *names: str | None, draws: int = 1) -> Checked:
    """Raises `Wrong` where an implementation is; None stands for the one that is chosen.

    Compilation is most of a case's time: `draws` are so many draws of data for one program.
    """
    ran: set[str] = set()
    seeds = range(case.seed, case.seed + draws)
    cases = [dataclasses.replace(case, seed=seed) for seed in seeds]
    shares = []
    with _surroundings(case, ran):
        for name in names:
            run = jax.jit(gradients(case, name))
            for drawn in cases:
                try:
                    shares.append(_check(drawn, name or "what was chosen", run))
                except Exception as e:
                    if XLAS_OWN in str(e):
                        continue
                    why = e if isinstance(e, AssertionError) else f"{type(e).__name__}: {e}"
                    raise Wrong(drawn, str(why)) from e
    return Checked(max(shares, default=0.0), ran)


@contextlib.contextmanager
def _surroundings(case: Case, ran: set[str]) -> Iterator[None]:
    """Plan a call as the case says, without warnings, and add what runs it: an implementation where it takes the call,
    and otherwise what is chosen."""

    def planned(spec: Any, device: Any, name: Any) -> plan.Plan:
        if name is not None and BACKENDS[name].unsupported_reason(spec, device) is not None:
            name = None
        built = plan.make_plan(spec, device, name)
        ran.add(built.implementation)
        return built

    with (
        mock.patch.object(api, "make_plan", planned),
        warnings.catch_warnings(action="ignore", category=fa.FallbackWarning),
        mock.patch.object(blockwise, "block_sizes", lambda spec: case.blocks),
        jax.enable_x64(case.dtype == "float64"),
        asking_first() if case.asks_first else contextlib.nullcontext(),
        whole_heads() if case.whole_heads else contextlib.nullcontext(),
        storing_first() if case.stores_first and not case.whole_heads else contextlib.nullcontext(),
    ):
        yield


def trace(case: Case, device: fa.Device) -> set[str]:
    """Trace the call and its gradients for a device, of which none need be there, and return what would run; raises
    `Wrong`."""
    args, cotangents = _stacked(case, case.entries())
    ran: set[str] = set()
    try:
        with _surroundings(case, ran), planned_for(device):
            jax.eval_shape(gradients(case, None), args, cotangents)
    except Exception as e:
        raise Wrong(case, f"not traced for {device.kind}: {type(e).__name__}: {e}") from e
    return ran


def _check(case: Case, name: str, run: Callable) -> float:
    entries = case.entries()
    goal, unfused, noise, visible = [], [], [], []
    for entry in entries:
        a = case.inputs(*entry)
        results, steps = dense.truth(a, case.shape, case.softmax_scale)
        goal.append(results)
        noise.append(dense.noise(a, case.shape, case.softmax_scale, results, steps))
        unfused.append(dense.same_dtype(a, case.shape, case.softmax_scale))
        visible.append(a.visible)
    goal, unfused = (_combine(case, x, lambda x: x.sum(0)) for x in (goal, unfused))
    noise = _combine(case, noise, lambda x: np.sqrt((x**2).sum(0)))
    shares = [0.0]
    sums = "float64" if case.dtype == "float64" else "float32"
    flushed = len(entries) * max(case.q_len, case.kv_len) * SMALLEST[sums]
    for what, calls in (("", entries), (", poisoned", poisoned(case, entries, visible))):
        actual = _as_results(case, run(*_stacked(case, calls)))
        for key, x in _named(actual).items():
            expected, same, by_chance = (_named(y)[key] for y in (goal, unfused, noise))
            size = np.abs(np.where(np.isinf(expected), 0, expected)).max(initial=0.0)
            twice = 0.0 if key == "lse" else FACTOR * deviation(same, expected)
            rounding = max(FLOOR[str(x.dtype)] * size, SMALLEST[str(x.dtype)])
            limit = max(twice, rounding, flushed, float(np.max(by_chance, initial=0.0)))
            off = deviation(x, expected)
            assert off <= limit, f"{key} by {name}{what}: off by {off:.3g} where {limit:.3g} may be"
            shares.append(off / limit if off else 0.0)
    return max(shares)
