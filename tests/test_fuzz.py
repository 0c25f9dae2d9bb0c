"""Random calls of reference and blockwise against dense attention in NumPy; and the fuzzer itself.

`make fuzz` runs more of them, and `python -m tests.fuzz --gpu` those of a GPU.
"""

import random
import sys
from typing import Any

import jax
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2 import api, pytree_fn, trace_mods
from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.xla import blockwise, tile
from pallas_fa2.flax.written_tokens import as_cache
from pallas_fa2.ir import equivalent_call
from tests.fuzz.cached import Cached
from tests.fuzz.cached import explain as explain_cached
from tests.fuzz.case import Case, draw
from tests.fuzz.check import Wrong, implementations, trace
from tests.fuzz.decoding import Decoding
from tests.fuzz.masks import And, Causal, Function, Lengths, Not, Or, Reads, Window
from tests.fuzz.run import cases_of_caches, check, main, nth, parse, run, shrink, simpler
from tests.fuzz.scores import Bias, SoftCap, Temper
from tests.support.hopper import A100, H200
from tests.support.tiers import slow_but

PARTS, PROGRAMS, DRAWS = 10, 3, 10  # 300 cases; compiling them takes most of the time
PLANS, TRACES = 25, 8
BOTH = implementations(gpu=False)


@pytest.mark.timeout(900)  # a failure is shrunk
@pytest.mark.parametrize("part", slow_but(lambda part: part == 0, range(PARTS)))
def test_random_calls(part: int) -> None:
    for n in range(part * PROGRAMS, (part + 1) * PROGRAMS):
        try:
            check(nth(0, n, gpu=False), *BOTH, draws=DRAWS)
        except Wrong as wrong:
            raise shrink(wrong, gpu=False) from None


@pytest.mark.parametrize("part", slow_but(lambda part: part == 0, range(PARTS)))
def test_gpus_that_are_not_there_have_plans_of_calls_on_caches(part: int) -> None:
    for n in range(part * PLANS, (part + 1) * PLANS):
        case = nth(0, cases_of_caches(range(n, n + 1))[0], gpu=True)
        for device in (H200, A100):
            try:
                explanation = explain_cached(case, device)
                assert explanation.implementation in str(explanation)
            except Exception as e:
                raise Wrong(case, f"no plan for {device}: {e!r}") from e


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", slow_but(lambda part: part == 0, range(PARTS)))
def test_gpus_that_are_not_there_have_kernels_of_random_calls(part: int) -> None:
    """They are traced: values and gradients, in all surroundings that a call may have."""
    ran = set()
    for n in range(part * TRACES, (part + 1) * TRACES):
        case = draw(random.Random(f"kernels/{n}").choice, for_hopper=True)
        for device in (H200, A100):
            ran |= trace(case, device)
    assert {"hopper", "ampere"} <= ran


# Found by `python -m tests.fuzz --gpu`, and why.
FOUND = [
    # XLA let the backward of a scan write to slices, and dQ was added to whatever was there
    "Case(seed=765, value_dim=128, dtype='bfloat16', transform='scan')",
    "Case(seed=880, group=2, value_dim=64, dtype='float16', transform='scan')",
    # there Mosaic found arrays that were not aligned
    "Case(q_len=33, kv_len=33, head_dim=64, value_dim=64, dtype='float16', transform='scan')",
    # arrays of no numbers had no place in a batch that vmap makes
    "Case(seed=308, dtype='bfloat16', dropout=0.9, transform='vmap of grad')",
    "Case(seed=506, dtype='float16', mask=Chunked(size=7), transform='vmap of grad')",
    "Case(seed=642, dtype='bfloat16', dropout=0.2, transform='grad of vmap')",
    # Mosaic had no constant to compile for a mask that is one
    "Case(seed=307, dtype='bfloat16', mask=Not(mask=Lengths(q=None, k=None)))",
    # TMA stored columns of the output that do not exist as the first ones
    "Case(seed=711, head_dim=256, dtype='float16', scores=(LearnedCap(),))",
    # tiles that were done again read answers of a mask about which nobody had been asked
    (
        "Case(seed=235, q_len=300, kv_len=300, head_dim=96, value_dim=64, dtype='float16', "
        "mask=And(Causal(), Not(Chunked(size=7))), align='end', poison=float('inf'), asks_first=True)"
    ),
    # of a bias that a batch shares, vmap left the gradient of the first entry alone
    (
        "Case(seed=779, batch=(3,), q_len=7, kv_len=3, head_dim=64, value_dim=64, dtype='bfloat16', "
        "scores=(Bias(axes='ts'),), transform='vmap of grad')"
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("line", FOUND)
@pytest.mark.parametrize("preferred, ran", [(None, "hopper"), ("ampere", "ampere")])
def test_regressions_from_a_gpu(line: str, preferred: str | None, ran: str) -> None:
    assert check(parse(line), preferred).ran == {ran}


def test_an_implementation_runs_what_it_supports() -> None:
    """Other cases run by what is chosen: here, without a GPU, by `blockwise`."""
    case = Case(seed=1, **SMALL)
    assert implementations(True, "ampere") == ("ampere",)
    assert check(case, "ampere").ran == {"blockwise"}
    assert check(case, "reference").ran == {"reference"}


def test_an_implementation_is_one_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "1", "--implementation", "ampere"])
    with pytest.raises(SystemExit):
        main()
    assert "--implementation needs --gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        (
            "Case(seed=525, q_len=100, kv_len=300, kv_heads=2, head_dim=24, sinks='float32', "
            "transform='grad of vmap', rise=7.0)"
        ),
        # a normal number whose terms are not
        (
            "Case(seed=259, q_len=200, kv_len=200, head_dim=16, value_dim=40, mask=Not(mask=Window(left=1, right=0, "
            "static=False)), sinks='float32', scale=-0.3, positions='Q', lse=False, poison=1e+30, rise=7.0)"
        ),
    ],
)
def test_a_gradient_below_normal_numbers(line: str) -> None:
    """A sink far below all scores: its gradient is a few of the smallest float32."""
    check(parse(line), "reference")


def test_slopes_that_are_small_differences() -> None:
    """1 - tanh(s)^2 of large scores: what float32 leaves of it is no more precise for a small result."""
    check(
        parse("Case(seed=374, kv_len=3, head_dim=40, scores=(SoftCap(cap=2.0),), rise=7.0)"),
        "reference",
    )


@pytest.mark.gpu
def test_classes_that_ptxas_computed_wrongly() -> None:
    """max(max(-a, -b), a) without one minus, by ptxas up to 13.3: tiles were taken for empty."""
    reach_or_allowed = Or(Function("reach"), Function("allowed"))
    mask = And(And(reach_or_allowed, Not(Window(3, 5))), Function("dilated"))
    for name in ("blockwise", "ampere"):
        assert check(Case(seed=12, q_len=74, kv_len=300, mask=mask), name).ran == {name}


def drop_dlse(out: Any, dout: Any, dlse: Any, dtype: Any) -> Any:
    return row_delta(out, dout, None, dtype)


def one_more(window: Any, q: Any, k: Any, c: Any) -> Any:
    return (q.index - k.index <= window.left + 1) & (k.index - q.index <= window.right)


def with_zeros(x: jax.Array, axis: int, block: int) -> jax.Array:
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % block)
    return jax.numpy.pad(x, pad)


def one_later(key: Any, value: Any, length: Any, dropout_rate: float) -> Any:
    return as_cache(key, value, length + np.int32(1), dropout_rate)


row_delta, dropout_bits = tile.row_delta, dropout.bits
existing_keys, requests_of = equivalent_call._existing_keys, equivalent_call.requests_of
SMALL = {"q_len": 33, "kv_len": 31, "blocks": (16, 16)}
BUGS = {
    "the cotangent of lse": (tile, "row_delta", drop_dlse, Case(seed=1, **SMALL)),
    "a window": (fa.Window, "visible", one_more, Case(mask=Window(13, 2), **SMALL)),
    "padding": (blockwise, "_pad", with_zeros, Case(scores=(Temper(), SoftCap(3.5)), **SMALL)),
    "masked tokens": (
        tile,
        "zero_masked_tokens",
        lambda x, keep, axis: x,
        Case(mask=Lengths(k=11), **SMALL),
    ),
    "masked data": (
        tile,
        "replace_masked",
        lambda raw, data, keep: (raw, data),
        Case(mask=Lengths(k=11), scores=(Bias(), SoftCap(2.5)), **SMALL),
    ),
    "dropout": (
        dropout,
        "bits",
        lambda keys, column: dropout_bits(keys, column % 16),
        Case(dropout=0.25, **SMALL),
    ),
    "sinks": (api, "add_sinks", lambda out, lse, sinks: (out, lse), Case(sinks="float32")),
    "the position of a token that is decoded": (
        fa.linen,
        "as_cache",
        one_later,
        Decoding(pieces=(5, 1, 1), mask=Window(2)),
    ),
    "the length of a sequence in a cache": (
        equivalent_call,
        "_existing_keys",
        lambda is_packed, lengths, *x: existing_keys(is_packed, lengths + np.int32(1), *x),
        Cached(lengths=(5, 8), new=(1, 1), page=4, mask=None),
    ),
    "the request of a packed query": (
        equivalent_call,
        "requests_of",
        lambda starts, tokens: requests_of(starts + np.int32(1), tokens),
        Cached(lengths=(5, 8), new=(1, 2), packed=True),
    ),
    "what a function reads": (
        pytree_fn,
        "fingerprint",
        lambda value: (),
        Case(mask=Reads("cell"), **SMALL),
    ),
    "the sum over a group": (
        tile,
        "product",
        lambda letters, a, b, dtype: (
            product(letters, a, b, dtype) * (0.5 if letters.endswith("bskh") else 1)
        ),
        Case(group=2, **SMALL),
    ),
}
product = tile.product


QUICK = (
    "the cotangent of lse",
    "the position of a token that is decoded",
    "the length of a sequence in a cache",
    "the request of a packed query",
    "what a function reads",
)


@pytest.mark.parametrize("bug", slow_but(QUICK.__contains__, BUGS))
def test_a_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer reports each planted bug, and the same case passes without it."""
    module, name, broken, case = BUGS[bug]

    def forget() -> None:
        jax.clear_caches()
        trace_mods._trace.cache_clear()

    forget()
    with monkeypatch.context() as patched:
        patched.setattr(module, name, broken)
        with pytest.raises(Wrong):
            check(case, "blockwise")
    forget()
    check(case, "blockwise")


def test_a_case_is_printed_as_the_line_that_replays_it() -> None:
    for n in range(300):
        case = nth(7, n, gpu=n % 2 == 0)
        assert repr(parse(repr(case))) == repr(case)
        assert '"' not in repr(case)
        assert repr(nth(7, n, gpu=n % 2 == 0)) == repr(case)
    with pytest.raises(TypeError, match="a case looks like"):
        parse("(1,)")


@pytest.mark.parametrize("gpu", [False, True])
def test_calls_on_caches_can_be_drawn_alone(gpu: bool) -> None:
    numbers = cases_of_caches(range(1, 4))
    assert list(numbers) == [8, 13, 18]
    kinds = [isinstance(nth(0, n, gpu), Cached) for n in range(20)]
    assert [n for n, x in enumerate(kinds) if x] == [3, *numbers]


def test_a_failure_is_shrunk_and_printed_as_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case, *names: str) -> None:
        if case.q_len > 20 and "Window" in repr(case.mask):
            raise Wrong(case, "a window")

    monkeypatch.setattr("tests.fuzz.run.check", wrong)
    mask = Or(Causal(), Not(Window(3, static=False)))
    case = Case(q_len=111, kv_len=65, mask=mask, dropout=0.2, transform="scan", batch=(2, 2))
    message = str(shrink(Wrong(case, "a window"), gpu=False))
    assert message.count("\n") == 1
    line = 'python -m tests.fuzz "Case(q_len=21, mask=Window(left=3, right=None, static=False))"'
    assert message.endswith(line)


def test_a_failure_is_printed_before_it_is_shrunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The failing case is printed first, as shrinking takes minutes on a GPU."""
    wrong = Wrong(Case(q_len=111), "a window")
    monkeypatch.setattr("tests.fuzz.run.check", lambda *_: (_ for _ in ()).throw(wrong))
    monkeypatch.setattr("tests.fuzz.run.shrink", lambda wrong, *_: capsys.readouterr().out)
    ran, why = run(3, seed=5, gpu=True)
    assert not ran and why == f"case 3 of seed 5 is wrong, and will be shrunk: {wrong}\n"


def test_simplified_cases_differ() -> None:
    rng = random.Random(3)
    for _ in range(50):
        case = draw(rng.choice)
        assert all(repr(other) != repr(case) for other in simpler(case))
    assert simpler(Case()) == []


def test_poison_is_only_in_masked_tokens() -> None:
    from tests.fuzz.check import poisoned

    case = Case(kv_heads=2, group=2, mask=Lengths(q=20, k=11), scores=(Temper(),), **SMALL)
    (entry,) = case.entries()
    visible = case.inputs(*entry).visible
    ((args, cotangents),) = poisoned(case, [entry], [visible])
    for x in (args.k, args.v, args.scores[0]["gain"]):
        assert np.isnan(x[11:]).all() and not np.isnan(x[:11]).any()
    for x in (args.q, cotangents.out, args.scores[0]["heat"]):
        assert np.isnan(x[20:]).all() and not np.isnan(x[:20]).any()
