"""What a mask says of tiles that it cuts, asked once for all heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import block_mask, mask_bits, pack_inputs
from pallas_fa2.backends.common.block_mask import BlockMask
from pallas_fa2.backends.common.causal_trim import causal_trim
from pallas_fa2.backends.common.compiled_mods import CompiledMods, mask_forms
from pallas_fa2.backends.sm90 import configs
from pallas_fa2.ir import block_classes
from pallas_fa2.parse_call import parse_call
from tests.contract.rule import assert_as_dense
from tests.support import compile_gate, interpreter
from tests.support.hopper import (
    asking_first,
    attend_and_differentiate,
    planned_for_h200,
    whole_heads,
)
from tests.support.tiers import slow

B, T, S = 2, 200, 330
IDS = jnp.sort(jax.random.randint(jax.random.key(0), (B, T), 0, 5), 1)
OF_KEYS = jnp.sort(jax.random.randint(jax.random.key(1), (B, S), 0, 5), 1)


@fa.mask_fn
def grid(q, k, c):
    """A neighborhood on a grid, of the same document."""
    rows, columns = q.index // 20 - k.index // 20, q.index % 20 - k.index % 20
    near = (abs(rows) <= c.reach) & (abs(columns) <= c.reach)
    return near & (q.id <= k.id + 1)


GRID = grid(q_tokens={"id": IDS}, k_tokens={"id": OF_KEYS}, params={"reach": jnp.int32(4)})
ONE_ENTRY = fa.mask_fn(lambda q, k: ((q.index * 7 - k.index) % 5 < 3) | (q.index - k.index == 3))
# The first 128 keys are seen by nobody, but a kernel meets a block of queries with them.
UNSEEN = ONE_ENTRY & (lambda q, k: k.index >= 140)
DENSE = fa.Dense(jax.random.bernoulli(jax.random.key(2), 0.3, (B, 1, T, S)))


def described(mask, q_heads=4, dim=64, **options):
    q = jax.ShapeDtypeStruct((B, T, q_heads, dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((B, S, q_heads, dim), jnp.bfloat16)
    return parse_call(q, k, k, mask=mask, **options)


def extras_of(mask, **options):
    spec, operands = described(mask, **options)
    return CompiledMods.compile(spec, causal_trim(spec), operands, 128, 128)


def problem_of(extras):
    return extras.make_kernel_spec(B, extras.spec.q_heads, extras.spec.q_heads)


def dense(mask):
    spec, operands = described(mask)
    index = jnp.arange(T).reshape(1, 1, 1, T, 1), jnp.arange(S).reshape(1, 1, 1, 1, S)
    return np.asarray(spec.mask.on_leading_axes(*index, operands.mask))[:, 0, 0]


def hidden(words):
    """`[B | 1, tiles, blocks, rows, columns]` of answers: thread 32 w + 4 g + t has rows 16 w + g and 8 more, and
    columns 2 t and the next of each eight (PTX ISA, wgmma's D fragment)."""
    bits = np.asarray(words).astype(np.uint32)[..., None] >> np.arange(31, -1, -1, dtype=np.uint32)
    entries, tiles, blocks, rows, columns = words.shape[:5]
    bits = (bits & 1).reshape(entries, tiles, blocks, rows, columns, 4, 8, 4, 8, 2, 2)
    # squares, warps, halves, groups; squares, eights, threads, elements
    bits = bits.transpose(0, 1, 2, 3, 5, 9, 6, 4, 8, 7, 10)
    return bits.reshape(entries, tiles, blocks, rows * 64, columns * 64)


# Tiles of queries and keys, and whether queries or keys are rows.
TILES = pytest.mark.parametrize(
    "q_axis, tile", [(0, (128, 128)), (0, (128, 64)), (1, (64, 128)), (1, (128, 128))]
)
BLOCKS = np.zeros((B, 1, T, S), bool)
BLOCKS[0, :, 64:, :128] = BLOCKS[1, :, :, 256:] = True
BLOCKS[1, :, 5, 70] = BLOCKS[0, :, 199, 329] = True
of_pairs = fa.mask_fn(lambda q, k, p: p.x > 0)
# Masks that read arrays of pairs, and in how many entries they differ.
OF_PAIRS = [
    (fa.Dense(jnp.asarray(BLOCKS)), B),
    (fa.Dense(jnp.asarray(BLOCKS[1:])), 1),
    (of_pairs(pairs={"x": jnp.where(BLOCKS, jnp.bfloat16(0.5), -1)}), B),
    (fa.mask_fn(lambda q, k, p: ~p.x)(pairs={"x": jnp.asarray(BLOCKS)}), B),
    (fa.Dense(jnp.asarray(BLOCKS[:1])) & fa.Window(100), 1),
]
UNREAD = fa.mask_fn(lambda q, k: abs(q.index - k.index) < 100)(pairs={"x": jnp.asarray(BLOCKS)})


@pytest.mark.parametrize("mask", [GRID, ONE_ENTRY, DENSE], ids=["grid", "one entry", "dense"])
@TILES
def test_answers_are_those_of_the_mask(mask, q_axis, tile):
    spec, operands = described(mask)
    problem = problem_of(extras_of(mask))
    classes = np.array(block_classes.block_classes(spec, operands, *tile)[:, 0])
    seen = BlockMask.from_classes(
        classes if q_axis == 0 else block_mask.reversed_classes(classes.swapaxes(2, 3))
    )

    def ask(data, seen):
        return mask_bits.compute_bits(problem, data, seen, tile, q_axis)

    data = pack_inputs.pack(spec, operands, 0)
    found = interpreter.run(ask, data, BlockMask(*map(jnp.asarray, seen)))
    assert np.sum(classes == block_classes.PARTIAL) >= 3
    check(found, mask, classes, tile, q_axis)


def check(words, mask, classes, tile, q_axis):
    """What is said of tiles that are cut."""
    found, expected = hidden(words), ~dense(mask)
    if q_axis == 1:
        found = found.transpose(0, 2, 1, 4, 3)
    for entry, _, row, column in zip(*np.nonzero(classes == block_classes.PARTIAL), strict=True):
        q, k = (np.s_[i * n : (i + 1) * n] for i, n in zip((row, column), tile, strict=True))
        got, want = found[entry, row, column], expected[entry, q, k]
        assert np.array_equal(got[: want.shape[0], : want.shape[1]], want)
        if q_axis == 0:  # keys past the end
            assert got[:, want.shape[1] :].all()


each_of_pairs = pytest.mark.parametrize(
    "mask", OF_PAIRS, ids=["blocks", "shared", "floats", "not", "and window"]
)


@TILES
@each_of_pairs
def test_a_mask_of_pairs_is_classified_by_what_it_answers(mask, q_axis, tile):
    check_all(*mask, q_axis, tile, interpreter.run)


@pytest.mark.gpu
@TILES
@each_of_pairs
def test_a_mask_of_pairs_is_classified_on_a_gpu(mask, q_axis, tile):
    check_all(*mask, q_axis, tile, lambda fn, *args: jax.jit(fn)(*args))


def check_all(mask, entries, q_axis, tile, run):
    problem = problem_of(extras_of(mask))
    spec, operands = described(mask)
    data = pack_inputs.pack(spec, operands, 0)
    words, classes = run(
        lambda data: mask_bits.compute_bits_and_classes(problem, data, tile, q_axis), data
    )
    assert len(words) == len(classes) == entries
    sees = dense(mask)
    for entry, _, row, column in np.ndindex(classes.shape):
        q, k = (np.s_[i * n : (i + 1) * n] for i, n in zip((row, column), tile, strict=True))
        part = sees[entry, q, k]
        some = block_classes.EMPTY if not part.any() else block_classes.PARTIAL
        if part.shape == tile:
            assert classes[entry, 0, row, column] == (block_classes.FULL if part.all() else some)
        else:  # what there is not may be seen or hidden
            assert classes[entry, 0, row, column] >= some
    check(words, mask, np.asarray(classes), tile, q_axis)


SLOPES = jnp.arange(4)
PER_HEAD = fa.mask_fn(
    lambda q, k, c: ((q.index * 7 - k.index) % 5 < 3) | (q.index - k.index < c.n)
)(heads={"n": SLOPES})


def is_asked(extras, classes=None, q_axis=0):
    classes = extras.get_classes(extras.runtime) if classes is None else classes
    return extras.wants_mask_bits(problem_of(extras), classes, (128, 128), q_axis)


@pytest.mark.parametrize(
    "mask, options, asked",
    [
        (GRID, {}, True),
        (ONE_ENTRY, {}, True),
        (DENSE, {}, True),
        (GRID, {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, True),
        (PER_HEAD, {}, False),
        (GRID, {"score": fa.soft_cap(3.0)}, False),
        (fa.Window(9, 0), {}, False),
        (DENSE, {"score": fa.soft_cap(3.0)}, False),
        (DENSE, {"score": fa.soft_cap(3.0), "dim": 256}, True),
    ],
)
def test_who_can_be_asked(mask, options, asked):
    extras = extras_of(mask, **options)
    with asking_first():
        assert is_asked(extras) == asked
    evaluates, precomputes = mask_forms(extras.spec)
    assert precomputes if asked else evaluates


def test_who_is_worth_asking():
    """By the heads that share a mask, its operations, and the tiles that it cuts."""
    grid, cheap = extras_of(GRID), extras_of(fa.mask_fn(lambda q, k: q.index ^ k.index > 9))
    cut = np.full((1, 1, 64, 64), block_classes.PARTIAL, np.int32)
    few = np.where(np.arange(64) < 1, cut, block_classes.FULL)
    assert not is_asked(grid) and is_asked(extras_of(DENSE))
    assert is_asked(grid, cut) and is_asked(grid, cut, q_axis=1)
    assert is_asked(cheap, cut) and not is_asked(cheap, cut, q_axis=1)
    assert not is_asked(cheap, few) and not is_asked(cheap, jnp.asarray(cut[:, :, :8]))
    assert is_asked(grid, jnp.asarray(cut))
    assert not is_asked(extras_of(ONE_ENTRY, q_heads=1), cut)
    (config,) = (t.config for t in configs.forward_configs(96, 96) if t.config.warpgroups == 3)
    assert not grid.wants_mask_bits(
        problem_of(grid), cut, config.tile, 0
    )  # its tiles are no squares


@pytest.mark.slow
def test_answers_are_applied_before_products():
    """Of scores that are there, 64 selections: 2 % of a mask of cut blocks, and 6 % more before all exponentials."""
    x = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    mask = fa.Causal() & (lambda q, k: (q.index * 7 - k.index) % 5 < 3)

    def attend(q, k, v):
        return fa.flash_attention(q, k, v, mask=mask, implementation="hopper")

    with planned_for_h200(), asking_first():
        reports = {x.name: x for x in compile_gate.compile_for_h200(attend, x, x, x)}
    compile_gate.assert_clean(reports["attention"])
    assert max(compile_gate.selections_under_products(reports["attention"])) < 16


@pytest.mark.parametrize("drops", [False, True])
def test_an_attention_that_reads_answers_reads_no_data_of_the_mask(monkeypatch, drops):
    monkeypatch.setattr(mask_bits, "compute_bits", lambda *args: "answers")
    dropout = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)} if drops else {}
    extras = extras_of(GRID, **dropout)
    with asking_first():
        problem, data, *_, found = extras.plan_mask(
            problem_of(extras), extras.runtime, (128, 64), 0
        )
    assert found == "answers" and problem.uses_mask_bits and (data is None) == (not drops)
    assert (
        not problem.loads_key_aux()
        and not problem.pairwise_inputs()
        and not problem.token_inputs("q", masked=True)
    )
    assert problem.reads_index("k", masked=True) == drops


def test_answers_take_no_more_memory_than_queries():
    """Of each entry 200 x heads x 8 x 2 bytes, and 200 x 330 bits."""
    for heads, asked in ((2, False), (3, True)):
        assert is_asked(extras_of(DENSE, q_heads=heads, dim=8)) == asked


@pytest.mark.parametrize(
    "mask, head_dim",
    [
        (GRID, 64),
        slow(GRID, 128),
        slow(GRID, 256),
        slow(ONE_ENTRY, 128),
        (UNSEEN, 128),
        slow(DENSE, 64),
        (DENSE, 128),
    ],
    ids=["grid 64", "grid 128", "grid 256", "one entry 128", "unseen", "dense 64", "dense 128"],
)
def test_attention_is_that_of_the_mask(mask, head_dim):
    keys = jax.random.split(jax.random.key(3), 4)
    shapes = [(B, n, heads, head_dim) for n, heads in ((T, 4), (S, 2), (S, 2), (T, 4))]
    args = [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True)]

    with planned_for_h200(cores=4), asking_first():
        got = interpreter.run(attend_and_differentiate(mask), *args)
    assert_as_dense(got, attend_and_differentiate(mask, "reference"), args, run=interpreter.run)


@pytest.mark.parametrize("bad", [jnp.nan, slow(jnp.inf)])
def test_what_is_added_to_minus_infinity_stays_hidden(bad):
    """Also scores that are NaN or infinite."""
    keys = jax.random.split(jax.random.key(5), 3)
    shapes = [(B, n, heads, 64) for n, heads in ((T, 4), (S, 2), (S, 2))]
    q, k, v = (jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True))
    k = k.at[:, 200].multiply(bad)

    def attend(implementation, q, k, v):
        return fa.flash_attention(
            q, k, v, mask=GRID, return_lse=True, implementation=implementation
        )

    with planned_for_h200(cores=4), asking_first():
        out, lse = interpreter.run(functools.partial(attend, "hopper"), q, k, v)
    expected, expected_lse = interpreter.run(functools.partial(attend, "reference"), q, k, v)
    hidden = ~np.isnan(expected_lse)
    assert hidden.any() and not hidden.all()
    np.testing.assert_array_equal(np.isnan(lse), ~hidden)
    rows = hidden.swapaxes(1, 2)
    np.testing.assert_allclose(out[rows], expected[rows], rtol=0.1, atol=0.05)


@pytest.mark.parametrize(
    "mask, head_dim, whole",
    [
        (OF_PAIRS[0], 128, False),
        slow(OF_PAIRS[1], 64, False),
        slow(OF_PAIRS[3], 96, False),
        slow(OF_PAIRS[0], 64, True),
        (OF_PAIRS[4], 128, True),
    ],
    ids=["blocks", "shared", "not", "blocks, whole heads", "and window, whole heads"],
)
def test_attention_of_an_array_that_only_the_device_knows(mask, head_dim, whole):
    """Of one entry there are rows and keys without a partner."""
    mask, _ = mask
    keys = jax.random.split(jax.random.key(3), 4)
    shapes = [(B, n, heads, head_dim) for n, heads in ((T, 4), (S, 2), (S, 2), (T, 4))]
    args = [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True)]

    def run(mask, *args, implementation="hopper"):
        return attend_and_differentiate(mask, implementation)(*args)

    with planned_for_h200(cores=4), whole_heads(whole):
        got = interpreter.run(run, mask, *args)
    assert_as_dense(
        got, functools.partial(run, implementation="reference"), [mask, *args], run=interpreter.run
    )


@pytest.mark.parametrize(
    "mask, options, asked",
    [
        (DENSE, {}, True),
        (DENSE, {"q_heads": 1}, False),
        (DENSE, {"q_heads": 1, "dim": 256}, True),  # there is no room for its data
        (DENSE, {"score": fa.soft_cap(3.0), "dim": 192}, True),
        (OF_PAIRS[4][0], {}, True),
        (fa.Dense(jnp.broadcast_to(DENSE.array, (B, 4, T, S))), {}, False),
        (DENSE, {"score": fa.soft_cap(3.0)}, False),
        (GRID, {}, False),
        (UNREAD, {}, False),
    ],
)
def test_who_is_asked_about_all_tiles(mask, options, asked):
    found = []
    jax.make_jaxpr(lambda mask: found.append(extras_of(mask, **options)))(mask)
    (extras,) = found
    assert (extras.get_classes(extras.runtime) is None) == asked
    known = extras_of(mask, **options)
    assert known.get_classes(known.runtime) is not None


@pytest.mark.parametrize("known", [slow(True), False])
@pytest.mark.parametrize("dims", [(256, 256), slow((192, 128))])
def test_scores_beside_an_array_where_there_is_no_room_for_it(dims, known):
    """The array is asked about before; scores read data of their own."""
    keys = jax.random.split(jax.random.key(4), 5)
    shapes = [
        (B, n, heads, dim)
        for n, heads, dim in ((T, 2, dims[0]), (S, 2, dims[0]), (S, 2, dims[1]), (T, 2, dims[1]))
    ]
    args = [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=False)]
    slopes = jax.random.uniform(keys[4], (2,))
    score = fa.alibi(slopes), fa.soft_cap(20.0)

    def run(mask, *args, implementation="hopper"):
        mask = DENSE if known else mask
        attend = functools.partial(
            fa.flash_attention, mask=mask, score=score, implementation=implementation
        )
        out, pull = jax.vjp(attend, *args[:3])
        return out, pull(args[3])

    with planned_for_h200(cores=4):
        got = interpreter.run(run, DENSE, *args)
    assert_as_dense(
        got, functools.partial(run, implementation="reference"), [DENSE, *args], run=interpreter.run
    )
