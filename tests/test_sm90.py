"""The Hopper kernels without a GPU: interpreted with race detection, and compiled for an H200."""

import dataclasses
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import causal_trim, limits
from pallas_fa2.backends.sm90.configs import FORWARD_CONFIGS, ConfigRule
from pallas_fa2.parse_call import parse_call
from tests.contract import suite
from tests.contract.cases import MASKED, PLAIN, Case
from tests.support import compile_gate, interpreter
from tests.support.compile_gate import KernelReport
from tests.support.hopper import (
    arrays,
    attend_and_differentiate,
    each_variant,
    is_first,
    name,
    packed,
    planned_for_h200,
    planned_with,
    storing_first,
    whole_heads,
)
from tests.support.masks import causal_end
from tests.support.tiers import slow, slow_but

# The others run on the GPU: long ones, and those whose like is here.
LIKE_OTHERS = re.compile(r"(full|causal)_(3|63)|rising_4_.*")
SHORT = [case for case in PLAIN if case.q_len < 1000 and not LIKE_OTHERS.fullmatch(case.name)]
MASKS = {"full": None, "start": fa.Causal(), "end": causal_end}
# One for each kind of mask and of kernel, and small: interpreting takes long.
LENGTHS = {
    "packed_h256": (200, 200),
    "packed_h192": (130, 130),
    "packed_h136": (70, 70),
    "packed_hv_smaller": (139, 139),
    "lengths_h64": (200, 330),
    "window_h96": (130, 130),
    "capped_h96": (130, 130),
    "capped_hv_smaller": (139, 139),
    "additive_h128": (300, 261),
    "additive_causal_h64": (300, 261),
    "rising_documents_h128": (130, 260),
    "rising_grid_h128": (130, 260),
    "rising_extremes_h128": (130, 260),
    "rising_grid_h256": (70, 130),
    "grid_h96": (200, 331),
    "holes_h256": (70, 130),
    "holes_hv_smaller": (70, 130),
}
TOLD_APART = [
    dataclasses.replace(case, q_len=LENGTHS[case.name][0], kv_len=LENGTHS[case.name][1])
    for case in MASKED
    if case.name in LENGTHS
]
FORWARDS = [t for t in FORWARD_CONFIGS if not t.for_mods]


def of_dims(tuned: ConfigRule) -> str:
    return f"h{tuned.config.head_dim}_hv{tuned.config.value_dim}_{name(tuned)}"


# Every kernel, at odd lengths and with rows that must be done again; of each mask and score what is cheapest.
QUICK = re.compile(
    r"full_1|(more|causal_end_more)_keys|causal_more_queries|grouped|scaled|hv_a_third|hv_larger|h192_causal"
    r"|odd_(h64|h96|h128|h200|h256)|rising_7_(h64|h80|h128|h136|h_a_quarter|hv_smaller|hv_a_quarter)"
    r"|window_h96|packed_(h136|h192|hv_smaller)|holes_(h256|hv_smaller)|lengths_h64|capped_(h96|hv_smaller)"
    r"|rising_(documents_h128|extremes_h128|grid_h256)|additive_causal_h64"
)


INTERPRETED = each_variant([*SHORT, *TOLD_APART])
QUICKLY = [(case, tuned) for case, tuned in INTERPRETED if QUICK.fullmatch(case.name)]


def test_every_forward_is_interpreted_by_make_test() -> None:
    # Those for wide data of pairs differ by their block alone, and in test_sm90_scores there is one of them.
    general = [t for t in FORWARD_CONFIGS if t.for_mods and t.config.head_dim <= 128]
    wide = {t for t in general if t.config.block_kv == 64}
    assert {tuned for _, tuned in QUICKLY} >= set(FORWARD_CONFIGS) - wide


@pytest.mark.parametrize(
    "case, tuned", [x if x in QUICKLY else slow(*x) for x in INTERPRETED], ids=name
)
def test_contract_interpreted(case: Case, tuned: ConfigRule) -> None:
    gradients = is_first(case, tuned)
    # A CTA takes several tiles; whole heads it takes in test_dq_head_per_cta.
    with planned_for_h200(cores=3), planned_with(tuned), whole_heads(False):
        suite.check(case, "hopper", jit=interpreter.jit, gradients=gradients)


def compile_forward(tuned: ConfigRule, mask: str, length: int) -> KernelReport:
    query_length = 2048 if mask == "end" else length
    dims = tuned.config.head_dim, tuned.config.value_dim
    query, key, value, _ = arrays(query_length, length, dims)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return fa.flash_attention(q, k, v, mask=MASKS[mask], implementation="hopper")

    with planned_for_h200(), planned_with(tuned):
        (report,) = compile_gate.compile_for_h200(attend, query, key, value)
    return report


@pytest.mark.parametrize("mask, length", [slow("full", 4000), ("start", 4096), slow("end", 4000)])
@pytest.mark.parametrize(
    "tuned", slow_but(lambda tuned: tuned.config.head_dim in (64, 128), FORWARDS), ids=of_dims
)
def test_every_forward_compiles_clean(tuned: ConfigRule, mask: str, length: int) -> None:
    """Nothing spills or is serialized, and all exponentials come before the wait for P V."""
    report = compile_forward(tuned, mask, length)
    compile_gate.assert_clean(report)
    unmasked, *masked = compile_gate.exponentials_under_products(report)  # one number a loop
    each_thread = tuned.config.block_kv // 2  # of 64 rows by 128 threads
    assert unmasked == each_thread
    if mask != "full":
        assert masked == [each_thread]
    else:  # the keys of the last block are counted when it is compiled
        left = length % tuned.config.block_kv // 2
        # ptxas may count in those of the rescaling, one for each of a thread's two rows
        assert masked in ([[left + n] for n in range(3)] if left else [[]])


def compile_both(run: Any, *args: Any) -> tuple[KernelReport, KernelReport]:
    """The forward and the backward, with tiles dealt one by one and dQ added to zeros; the passes around that are
    clean."""
    with planned_for_h200(), storing_first(False):
        reports = {x.name: x for x in compile_gate.compile_for_h200(run, *args)}
    forward, backward = (reports.pop(name) for name in ("attention", "attention_gradients"))
    assert {"prepare_gradients", "finish_gradients"} <= reports.keys()
    for report in reports.values():
        compile_gate.assert_clean(report)
    return forward, backward


def assert_clean(forward: KernelReport, backward: KernelReport) -> None:
    """The backward may put aside what only the end of a tile needs: 8 values, none in its loops."""
    compile_gate.assert_clean(forward)
    assert compile_gate.spills_while_multiplying(backward) == 0
    assert backward.spill_stores <= 32
    assert backward.spill_loads <= (64 if jax.__version_info__ < (0, 12) else 80)
    compile_gate.assert_clean(dataclasses.replace(backward, spill_stores=0, spill_loads=0))


@pytest.mark.parametrize("mask, length", [slow("full", 4000), ("start", 4096), slow("end", 4000)])
@pytest.mark.parametrize("dims", slow_but(lambda dims: dims == (128, 128), limits.KERNEL_DIMS))
def test_every_backward_compiles_clean(dims: Any, mask: str, length: int) -> None:
    args = arrays(2048 if mask == "end" else length, length, dims)
    assert_clean(*compile_both(attend_and_differentiate(MASKS[mask]), *args))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 256])
def test_float16_multi_query_and_one_head_compile_clean(head_dim: int) -> None:
    args = arrays(1000, 1000, (head_dim, head_dim), jnp.float16, 3, 1)
    assert_clean(*compile_both(attend_and_differentiate(fa.Causal()), *args))


@pytest.mark.slow
@pytest.mark.parametrize("mask, length", [("start", 4097), ("full", 1001)])
@pytest.mark.parametrize("tuned", FORWARDS, ids=of_dims)
def test_odd_lengths_compile_clean(tuned: ConfigRule, mask: str, length: int) -> None:
    compile_gate.assert_clean(compile_forward(tuned, mask, length))


@pytest.mark.slow
@pytest.mark.parametrize("mask, length", [("start", 4097), ("full", 1001)])
@pytest.mark.parametrize("dims", limits.KERNEL_DIMS)
def test_odd_lengths_compile_clean_backward(dims: Any, mask: str, length: int) -> None:
    args = arrays(length, length, dims)
    forward, backward = compile_both(attend_and_differentiate(MASKS[mask]), *args)
    # At H = 64, causal, the loop that the gate finds is that of the tiles: at their ends, it may be.
    if spilled := max(compile_gate.spills_while_multiplying(backward), 0):
        assert (dims, mask) == ((64, 64), "start") and spilled <= 2
    # A tile's end has the most code here: gradients in two numbers each, copied by pieces.
    assert backward.spill_stores <= 96 and backward.spill_loads <= 192
    compile_gate.assert_clean(forward)
    compile_gate.assert_clean(dataclasses.replace(backward, spill_stores=0, spill_loads=0))


def nobody_known(ids: Any) -> Any:
    """Of which it is not known that every token takes part; a value of each kind."""
    see = fa.mask_fn(lambda q, k, c: (q.index // 3 == k.index % 5) | (q.a < k.b) | (k.index < c.n))
    number = jnp.float32(0.5)
    near = see(q_tokens={"a": ids}, k_tokens={"b": ids}, params={"n": jnp.int32(8)})
    far = fa.mask_fn(lambda q, k, c: (abs(q.index - k.index) > 9) & (c.w > 0.1))
    return near | far(params={"w": number})


def by_head(ids: Any) -> Any:
    """Two arrays of keys' tokens, of which every head asks by itself."""
    see = fa.mask_fn(lambda q, k, c: (q.a == k.a) & (q.b >= k.b) & (q.index - k.index >= c.least))
    return see(tokens={"a": ids, "b": ids}, heads={"least": jnp.arange(4)})


@pytest.mark.parametrize(
    "head_dim, make, length, stored_forward",
    [
        (64, packed, 4096, 0),
        slow(128, nobody_known, 4001, 136),
        slow(128, by_head, 4096, 8),
        slow(192, by_head, 4096, 0),
    ],
)
def test_masks_compile_without_spills_in_loops(
    head_dim: int, make: Any, length: int, stored_forward: int
) -> None:
    args = arrays(length, length, (head_dim, head_dim))
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def run(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        return attend_and_differentiate(make(ids))(q, k, v, dout)

    forward, backward = compile_both(run, *args, ids)
    if stored_forward == 0:
        compile_gate.assert_clean(forward)
    assert compile_gate.spills_while_multiplying(forward) == 0
    # At H = 64 a step has twice the queries: of what a mask reads of them, four values are put aside.
    assert compile_gate.spills_while_multiplying(backward) <= (4 if head_dim == 64 else 0)
    for report, stores in ((forward, stored_forward), (backward, 312)):  # once a tile
        assert report.spill_stores <= stores
        compile_gate.assert_clean(dataclasses.replace(report, spill_stores=0, spill_loads=0))


@pytest.mark.parametrize(
    "head_dim, make, data",
    [
        slow(128, lambda _: fa.soft_cap(50.0), ()),
        slow(64, fa.alibi, (4,)),
        slow(128, fa.bias, (1, 4, 4096, 4096)),
    ],
)
def test_scores_compile_without_spills_in_loops(head_dim: int, make: Any, data: Any) -> None:
    args = *arrays(4096, 4096, (head_dim, head_dim)), jax.ShapeDtypeStruct(data, jnp.float32)

    def attend(q: Any, k: Any, v: Any, data: Any) -> Any:
        score = make(data)
        return fa.flash_attention(q, k, v, mask=fa.Causal(), score=score, implementation="hopper")

    def run(q: Any, k: Any, v: Any, dout: Any, data: Any) -> Any:
        out, pull = jax.vjp(attend, q, k, v, data)
        return out, pull(dout)

    forward, backward = compile_both(run, *args)
    assert compile_gate.spills_while_multiplying(forward) == 0
    assert forward.spill_stores <= 48
    # At H = 64 a step has twice the queries, and a slope beside each probability; jax 0.12 spills more.
    in_loops, stores = (170, 720) if jax.__version_info__ >= (0, 12) else (130, 600)
    assert compile_gate.spills_while_multiplying(backward) <= (in_loops if head_dim == 64 else 0)
    # Outside of the loops, once a tile.
    assert backward.spill_stores <= (stores if head_dim == 64 else 64 if data else 16)
    for report in (forward, backward):
        compile_gate.assert_clean(dataclasses.replace(report, spill_stores=0, spill_loads=0))


@pytest.mark.slow
@pytest.mark.parametrize("by", ["rows", "numbers"])
def test_no_extremes_of_three(by: str) -> None:
    """ptxas up to 13.3 computes max(max(a, -b), c) so, without the minus."""

    def low(q: Any, k: Any, c: Any) -> Any:
        of = q if by == "rows" else c
        return jnp.maximum(jnp.maximum(of.a, -of.b), of.c)

    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        names = ("a", "b", "c")
        mask = fa.mask_fn(lambda q, k, c: low(q, k, c) <= k.index)(
            tokens=dict(zip(names, ids, strict=True)),
            params=dict(zip(names, ids[:, 0], strict=True)),
        )
        return fa.flash_attention(q, k, v, mask=mask, implementation="hopper")

    def both(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, ids), q, k, v)
        return out, pull(dout)

    ids = jax.ShapeDtypeStruct((3, 256), jnp.int32)
    with planned_for_h200():
        reports = compile_gate.compile_for_h200(both, *arrays(256, 256, (64, 64)), ids)
    for report in reports:
        assert report.count("VIMNMX3") == 0, report.name


@pytest.mark.slow
def test_selected_numbers_stay_signed() -> None:
    """Mosaic (jax 0.11.2) takes what a column's truth selects for unsigned, if it is one number."""

    def attend(q: Any, k: Any, v: Any, near: Any, n: Any) -> Any:
        mask = fa.mask_fn(lambda q, k, c: q.place >= jnp.where(k.near, c.n, -5))(
            q_tokens={"place": near}, k_tokens={"near": near > 0}, params={"n": n}
        )
        return fa.flash_attention(q, k, v, mask=mask, implementation="hopper")

    def both(q: Any, k: Any, v: Any, dout: Any, *data: Any) -> Any:
        out, pull = jax.vjp(lambda *x: attend(*x, *data), q, k, v)
        return out, pull(dout)

    data = jax.ShapeDtypeStruct((256,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    reports = compile_both(both, *arrays(256, 256, (64, 64)), *data)
    assert len(reports) == 2
    for report in reports:
        unsigned = [name for name in report.sass if re.match(r"ISETP\.(G|L)[TE]\.U32", name)]
        assert not unsigned, (report.name, unsigned)


@pytest.mark.slow
def test_pieces_of_cut_rows_compile() -> None:
    """Of an output of 72 columns the second piece is cut."""

    def attend(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return fa.flash_attention(q, k, v, mask=packed(ids), implementation="hopper")

    ids = jax.ShapeDtypeStruct((2, 129), jnp.int32)
    with planned_for_h200():
        reports = compile_gate.compile_for_h200(attend, *arrays(129, 129, (136, 72))[:3], ids)
    (report,) = (x for x in reports if x.name == "attention")
    assert compile_gate.spills_while_multiplying(report) == 0 and report.spill_stores <= 16
    compile_gate.assert_clean(dataclasses.replace(report, spill_stores=0, spill_loads=0))


@pytest.mark.slow
def test_a_constant_mask_compiles() -> None:
    forward, backward = compile_both(
        attend_and_differentiate(~fa.Lengths()), *arrays(128, 128, (64, 64))
    )
    assert_clean(forward, backward)


def test_second_derivatives_are_refused_by_name() -> None:
    def norm(q: Any, k: Any) -> Any:
        out = fa.flash_attention(q, k, k, implementation="hopper")
        return jnp.sum(out.astype(jnp.float32) ** 2)

    def slope(q: Any, k: Any) -> Any:
        return jnp.sum(jax.grad(norm)(q, k).astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    with planned_for_h200():
        jax.make_jaxpr(jax.jit(jax.grad(norm)))(x, x)
        with pytest.raises(NotImplementedError, match="implementation='blockwise'"):
            jax.make_jaxpr(jax.grad(slope))(x, x)


@pytest.mark.parametrize("t, s", [(5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize("align", ["start", "end"])
def test_trim_keeps_what_takes_part(align: Any, t: int, s: int) -> None:
    q, k = jax.ShapeDtypeStruct((1, t, 1, 64), jnp.bfloat16), (1, s, 1, 64)
    k = jax.ShapeDtypeStruct(k, jnp.bfloat16)
    spec, _ = parse_call(q, k, k, mask=fa.Causal(), align=align)
    part = causal_trim.causal_trim(spec)
    shift = s - t if align == "end" else 0
    seen = [[j <= i + shift for j in range(s)] for i in range(t)]
    queries = [i for i in range(t) if any(seen[i])]
    keys = [j for j in range(s) if any(row[j] for row in seen)]
    assert queries == list(range(part.first_query, part.first_query + part.q_len))
    assert keys == list(range(part.kv_len))
    assert part.offset is not None
    for i in queries:
        assert sum(seen[i]) == min(i - part.first_query + part.offset + 1, part.kv_len)


@pytest.mark.parametrize("t, s", [(70, 200)])
def test_given_positions(t: int, s: int) -> None:
    """As a cache or a shard has them; the mask reads them as it reads all data of tokens."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((1, t, 2, 64), (1, s, 1, 64), (1, s, 1, 64))
    args = [jax.random.normal(x, n, jnp.bfloat16) for x, n in zip(keys, shapes, strict=True)]
    q_positions, kv_positions = 2 * jnp.arange(t) + 40, jnp.arange(s)[::-1]

    def loss(implementation: str) -> Any:
        def run(*args: Any) -> Any:
            out = fa.flash_attention(
                *args, mask=fa.Causal(), q_positions=q_positions, kv_positions=kv_positions,
                implementation=implementation,
            )  # fmt: skip
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(run, (0, 1, 2))

    with planned_for_h200(cores=3):
        got = interpreter.run(loss("hopper"), *args)
    chex.assert_trees_all_close(got, interpreter.run(loss("reference"), *args), rtol=0.1, atol=0.05)
