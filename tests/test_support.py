"""The bench is tested like a product: right kernels pass in silence, each planted bug is caught."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support import compile_gate, gpus, interpreter, shared

F16, F32 = jnp.float16, jnp.float32
TILE = (64, 64)
LAYOUT = plgpu.Layout.WGMMA
RACE = shared.RaceDetected


def smem(*shape, dtype=F16):
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def launch(body, *scratch, out=TILE, threads=1, blocks=1):
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out, F16) if out else (),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        **({"num_threads": threads, "thread_name": "wg"} if threads > 1 else {}),
    )


def load(ref):
    return plgpu.load(ref, layout=LAYOUT, optimized=False)


def filled(value, dtype=F16):
    return plgpu.layout_cast(jnp.full(TILE, value, dtype), LAYOUT)


def store(tile, out, bug=None):
    if bug != "store without a fence":
        plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, out, commit_group=bug != "store in no group")
    if bug != "exit before the store has read":
        plgpu.wait_smem_to_gmem(0)


def tiles(*shape):
    return jax.random.normal(jax.random.key(0), (*shape, *TILE)).astype(F16)


def assert_near(actual, expected):
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=0.01, atol=0.1)


# ------------------------------------------------------- kernels, right unless a bug is named


def ring(bug=None, consumers=1):
    """x -> the sum of x[i] @ x[i], through two slots that one warpgroup keeps filled."""

    def consume(out, slots, result, full, empty):
        def step(i, total):
            slot = lax.rem(i, 2)
            if bug != "wgmma before the load":
                plgpu.barrier_wait(full.at[slot])

            def square(acc):
                plgpu.wgmma(acc, slots.at[slot], slots.at[slot])
                if bug == "wgmma before the load":
                    plgpu.barrier_wait(full.at[slot])
                if bug == "release before the wgmma has read":
                    release()
                return acc[...]

            release = functools.partial(plgpu.barrier_arrive, empty.at[slot])
            total += pl.run_scoped(square, plgpu.ACC(TILE, F32))
            if bug == "release before the registers are read":
                release()
            if "registers" in (bug or ""):
                total += 0 * load(slots.at[slot]).astype(F32)
            if "release before" not in (bug or ""):
                release()
            return total

        total = lax.fori_loop(0, 4, step, filled(0, F32))

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            result[...] = total.astype(F16)
            store(result, out)

    def produce(x, slots, full, empty):
        for i in range(4):
            if i >= 2 and bug != "load before the release":
                plgpu.barrier_wait(empty.at[i % 2])
            plgpu.copy_gmem_to_smem(x.at[i], slots.at[i % 2], full.at[i % 2])
        for slot in range(2):
            plgpu.barrier_wait(empty.at[slot])

    def body(x, out, slots, result, full, empty):
        consumer = lax.axis_index("wg") < consumers
        pl.when(consumer)(functools.partial(consume, out, slots, result, full, empty))
        pl.when(~consumer)(functools.partial(produce, x, slots, full, empty))

    full = plgpu.Barrier(num_barriers=2)
    empty = plgpu.Barrier(num_barriers=2, num_arrivals=consumers)
    return launch(body, smem(2, *TILE), smem(*TILE), full, empty, threads=consumers + 1)


def chain(bug=None):
    """x -> x @ 2x, by one warpgroup."""

    def body(x, out, a, b, result, full):
        plgpu.copy_gmem_to_smem(x, a, full)
        if bug != "read before the load":
            plgpu.barrier_wait(full)
        b[...] = load(a) * 2
        if bug == "read before the load":
            plgpu.barrier_wait(full)
        if bug != "wgmma without a fence":
            plgpu.commit_smem()

        def multiply(acc):
            plgpu.wgmma(acc, a, b)
            if bug == "accumulator read before the wait":
                product = plgpu.wgmma_accumulator_load(acc, wait_n=None)
                plgpu.wgmma_wait(0)
                return product
            return acc[...]

        result[...] = pl.run_scoped(multiply, plgpu.ACC(TILE, F32)).astype(F16)
        store(result, out, bug)

    return launch(body, smem(*TILE), smem(*TILE), smem(*TILE), plgpu.Barrier())


def ones(only_first=False, reduction_op=None):
    """() -> what two blocks make of zeros when each stores a tile of ones there."""

    def body(out, tile):
        block = lax.axis_index("block")
        tile[...] = filled(1)
        # The second block does more, or its clock at the store would be the first one's.
        pl.when(block == 1)(lambda: tile.__setitem__(..., filled(1)))
        plgpu.commit_smem()
        predicate = block == 0 if only_first else None
        plgpu.copy_smem_to_gmem(tile, out, predicate, reduction_op=reduction_op)
        plgpu.wait_smem_to_gmem(0)

    kernel = launch(body, smem(*TILE), out=None, blocks=2)
    return lambda: pl.run_state(kernel)(jnp.zeros(TILE, F16))


def union(bug=None):
    """x -> 2x, by way of two arrays in the same memory."""

    def body(x, out, arrays, full):
        half, single = arrays
        plgpu.copy_gmem_to_smem(x, half, full)
        plgpu.barrier_wait(full)
        value = load(half).astype(F32)
        single[...] = value
        again = half if bug == "read through another alias" else single
        half[...] = (value + load(again).astype(F32)).astype(F16)
        store(half, out)

    return launch(body, plgpu.RefUnion(smem(*TILE), smem(*TILE, dtype=F32)), plgpu.Barrier())


def stuck(threads):
    """Waits for a barrier that nobody completes."""

    def body(x, out, tile, barrier):
        plgpu.barrier_wait(barrier)
        store(tile, out)

    return launch(body, smem(*TILE), plgpu.Barrier(), threads=threads)


def sum_of_squares(x):
    return sum(tile @ tile for tile in np.asarray(x, np.float32))


def double_square(x):
    return np.asarray(x, np.float32) @ np.asarray(2 * x, np.float32)


# ----------------------------------------------------------------------------- the interpreter


@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("bug", [None, "no bug, but read to registers too"])
def test_right_ring(bug, consumers):
    x = tiles(4)
    assert_near(interpreter.run(ring(bug, consumers), x), sum_of_squares(x))


def test_right_chain():
    x = tiles()
    assert_near(interpreter.run(chain(), x), double_square(x))
    assert_near(interpreter.run(chain(), x, detect_races=False), double_square(x))


def test_accumulators_in_every_form():
    def body(x, out, a, b, result, full):
        plgpu.copy_gmem_to_smem(x.at[0], a, full)
        plgpu.copy_gmem_to_smem(x.at[1], b, full)
        plgpu.barrier_wait(full)

        def multiply(first, second):
            first[...] = load(b).astype(F32)
            plgpu.wgmma(first, load(a), b)
            plgpu.wgmma(second, a, b)
            return plgpu.wgmma_accumulator_load(first, wait_n=1) + second[...]

        total = pl.run_scoped(multiply, plgpu.ACC(TILE, F32), plgpu.ACC(TILE, F32))
        total = pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.ACC.init(total))
        result[...] = total.astype(F16)
        store(result, out)

    full = plgpu.Barrier(num_arrivals=2)
    x = tiles(2)
    out = interpreter.run(launch(body, smem(*TILE), smem(*TILE), smem(*TILE), full), x)
    a, b = np.asarray(x, np.float32)
    assert_near(out, 3 * a @ b + b)


def test_stores_of_two_blocks():
    assert_near(interpreter.run(ones(only_first=True)), np.ones(TILE))
    assert_near(interpreter.run(ones(reduction_op="add")), np.full(TILE, 2))
    with pytest.raises(RACE, match="write of GMEM"):
        interpreter.run(ones())


def test_arrays_in_the_same_memory():
    x = tiles()
    assert_near(interpreter.run(union(), x), 2 * np.asarray(x, np.float32))
    with pytest.raises(RACE, match="another alias"):
        interpreter.run(union("read through another alias"), x)


@pytest.mark.parametrize(
    ("bug", "caught"),
    [
        ("release before the wgmma has read", RACE),
        ("release before the registers are read", RACE),
        ("wgmma before the load", RACE),
        # Which of the two depends on how far the consumer has come.
        ("load before the release", (RACE, ValueError)),
    ],
)
def test_bugs_in_a_ring(bug, caught):
    with pytest.raises(caught):
        interpreter.run(ring(bug), tiles(4))


@pytest.mark.parametrize(
    ("bug", "caught", "report"),
    [
        ("wgmma without a fence", RACE, "read of SMEM"),
        ("accumulator read before the wait", RACE, "accumulator read by block 0 warpgroup 0"),
        ("read before the load", RACE, "read of SMEM"),
        ("store without a fence", RACE, "read of SMEM"),
        ("store in no group", ValueError, "no commit group"),
        ("exit before the store has read", ValueError, "copy_smem_to_gmem"),
    ],
)
def test_bugs_in_a_chain(bug, caught, report):
    with pytest.raises(caught, match=report):
        interpreter.run(chain(bug), tiles())


def test_a_race_in_the_first_of_two_kernels_is_kept():
    with pytest.raises(RACE):
        interpreter.run(lambda x: chain()(chain("wgmma without a fence")(x)), tiles())


@pytest.mark.parametrize("threads", [1, 3])
def test_a_deadlock_ends_and_the_next_kernel_runs(threads):
    @jax.jit
    def in_a_while(x):
        slow = lax.fori_loop(0, 10, lambda _, y: y @ y / 1500, jnp.ones((1500, 1500)))
        return x + (0 * slow[0, 0]).astype(F16)

    kernel, x = stuck(threads), tiles()
    for ready in (True, False):  # the second time the kernel is launched first and fails later
        argument = in_a_while(x).block_until_ready() if ready else in_a_while(x)
        with pytest.raises(TimeoutError, match="0 of 1 arrivals"):
            interpreter.run(kernel, argument, barrier_timeout=0.3)
    test_right_chain()


def test_a_kernel_that_raises_raises_that_and_the_next_one_runs():
    def body(x, out, tile):
        tile[...] = load(x.at[lax.axis_index("block") + 4])
        store(tile, out)

    with pytest.raises(IndexError, match="Out-of-bounds"):
        interpreter.run(launch(body, smem(*TILE)), tiles(4))
    test_right_ring(None, consumers=1)


# ---------------------------------------------------------------------------- the compile gate

SHAPE = jax.ShapeDtypeStruct(TILE, F16)


def test_a_clean_kernel_passes_the_gate():
    (report,) = compile_gate.compile_for_h200(chain(), SHAPE)
    compile_gate.assert_clean(report)
    assert report.smem_bytes >= 3 * 64 * 64 * 2
    assert 0 < report.registers <= 255
    if report.sass_path is not None:
        assert report.count("HGMMA") == 4  # 64 in steps of 16
        assert "HGMMA" in report.sass_path.read_text()


def test_a_kernel_is_reported_every_time():
    first, second = (compile_gate.compile_for_h200(chain(), SHAPE) for _ in range(2))
    assert len(first) == len(second) == 1 and first[0].sass == second[0].sass


def test_a_kernel_that_spills_is_refused():
    def body(x, out, a, b, result, full):
        plgpu.copy_gmem_to_smem(x.at[:, pl.ds(0, 64)], a, full)
        plgpu.copy_gmem_to_smem(x, b, full)
        plgpu.barrier_wait(full)

        def multiply(first, second):  # 128 registers each, of the 255 that a thread can have
            plgpu.wgmma(first, a, b)
            plgpu.wgmma(second, a, b)
            return first[...] * second[...]

        acc = plgpu.ACC((64, 256), F32)
        result[...] = pl.run_scoped(multiply, acc, acc).astype(F16)
        store(result, out)

    wide = (64, 256)
    full = plgpu.Barrier(num_arrivals=2)
    kernel = launch(body, smem(*TILE), smem(*wide), smem(*wide), full, out=wide)
    (report,) = compile_gate.compile_for_h200(kernel, jax.ShapeDtypeStruct(wide, F16))
    assert report.spill_stores > 0
    with pytest.raises(AssertionError, match="spills"):
        compile_gate.assert_clean(report)


def test_the_gate_names_what_is_wrong():
    report = compile_gate.KernelReport("forward", 168, 8, 12, 232_449, ("x (C7512) y",), {}, None)
    with pytest.raises(AssertionError) as refusal:
        compile_gate.assert_clean(report)
    for part in ("forward", "8 B", "12 B", "232449", str(gpus.MAX_SHARED_MEMORY_BYTES), "C7512"):
        assert part in str(refusal.value)


SASS = """
        /*0100*/                   ELECT P1, URZ, PT
        /*0110*/                   PLOP3.LUT P1, PT, P2, P1, PT, 0x8, 0x0
        /*0120*/              @!P1 BRA `(.L_x_1)
        /*0130*/                   UTMALDG.5D [UR16], [UR8]
.L_x_1:
        /*0140*/                   {joined} B0
        /*0150*/                   ISETP.NE.U32.AND P1, PT, RZ, UR18, PT
        /*0160*/               @P1 BRA `(.L_x_1)
"""


@pytest.mark.parametrize("joined, stray", [("BSYNC", 0), ("UIADD3", 1)])
def test_the_gate_sees_a_thread_that_goes_astray(joined, stray):
    assert compile_gate.stray_threads(SASS.format(joined=joined)) == stray


def test_hlo_shows_the_buffers_outside_kernels():
    def scores(x):
        return jax.nn.softmax(x @ x.T, axis=1) @ x

    assert "[256,256]" in compile_gate.hlo_for_h200(scores, jax.ShapeDtypeStruct((256, 64), F16))
    assert "[256,256]" not in compile_gate.hlo_for_h200(chain(), SHAPE)


def test_a_missing_plugin_is_an_error(monkeypatch):
    monkeypatch.setattr(compile_gate, "_WHEELS", ("jax-cuda13-plugin", "no-such-wheel"))
    compile_gate.h200s.cache_clear()
    with pytest.raises(RuntimeError, match="needs no-such-wheel"):
        compile_gate.hlo_for_h200(chain(), SHAPE)


def test_memory_of_a_block_that_is_not_there_is_told() -> None:
    """A copy into the other CTA's, with what keeps the two together left out, came as a KeyError now and then."""
    memory = shared.Memory.__new__(shared.Memory)
    memory.mem = {}
    key = shared.Key(1, 0, 1, 0, 1, 7)
    with pytest.raises(RACE, match="before its CTA begins, or after it has ended"):
        memory.get_buffer_content(key, None, None)
