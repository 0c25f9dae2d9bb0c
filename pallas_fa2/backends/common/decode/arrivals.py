"""Words in device memory that count the CTAs which have stored their splits of a tile.

docs/design/decode.md, "The merge", says why they need no zeros before the kernel.
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives import thread_values
from pallas_fa2.backends.common.primitives.layouts import LANES, THREADS
from pallas_fa2.backends.common.primitives.named_barriers import NamedBarrier
from pallas_fa2.backends.common.primitives.types import Ref, Registers

# What the upper 48 bits of a word are while it counts; the lower 16 are the arrivals. XLA does not initialize outputs,
# and a word that looked like one that counts would stay so. As bfloat16, float16, float32 or float64 this is NaN, with
# bits that no instruction makes. Of words of random bits, as keys of 8 bits may be, 2^-48 have it: with the 264 words
# of tiles that are split, at most one for each CTA, one launch in 10^12.
COUNTS = 0xFFF7_7FF7_FFA2
MAX_SPLITS = 1 << 16  # of a tile


@inline_op("prepare_arrivals", plgpu.RefType())
def prepare(_, word: Ref) -> None:
    """Begin to count in a word of device memory, if it does not count. A thread of the last warp does, so that the
    first one, which may begin to load, need not wait for the word."""
    code = (
        f"{{ .reg .pred p; .reg .b64 v, u; setp.ne.s32 p, $0, {THREADS - LANES}; @p bra done; "
        f"ld.relaxed.gpu.global.b64 v, [$1]; shr.u64 u, v, 16; setp.eq.u64 p, u, {COUNTS}; "
        f"@p bra done; atom.relaxed.gpu.global.cas.b64 u, [$1], v, {COUNTS << 16}; done: }}"
    )
    asm(code, "r,l", thread_values.warpgroup_thread_index(), thread_values.address(word))


@inline_op(
    "arrive_last",
    *[plgpu.RefType()] * 3,
    *[plgpu.Layout.WG_SPLAT] * 2,
    result=thread_values.SCALAR_I32,
)
def arrive(
    _, word: Ref, word2: Ref, flags: Ref, others: Registers, others2: Registers
) -> Registers:
    """Count an arrival in one word of device memory, or two. For the last one, after `others`, which sets the word to
    0, the result has bit 0 set, or bit 1 for the second word. With negative `others` none is counted. `flags`, int32
    `[2]`, is shared memory that nothing else uses.

    Threads 0 and 32 add 1 to a word. If it does not count, what was there is replaced by a count of 1, unless another
    thread has added or replaced in between: then the addition is lost, and made again.

    What all threads of the CTA have stored before is released, and what the CTAs that arrived before have stored is
    acquired: the barriers carry that between the threads and those that count (PTX ISA, memory consistency model:
    causality order). Two reductions by barriers instead of the words in shared memory take 460 clocks. The shuffle
    tells ptxas that the result is the same in all threads (see `votes`).
    """
    barrier = f"barrier.cta.sync {int(NamedBarrier.VOTE)}, {THREADS};"
    code = (
        "{ .reg .pred p, q; .reg .b32 n, v, w, last; .reg .b64 word, old, u; "
        f"{barrier} setp.eq.s32 p, $1, 0; setp.eq.s32 q, $1, {LANES}; mov.b32 v, 0; "
        "selp.s32 n, $5, $6, p; selp.b64 word, $2, $3, p; selp.s32 last, 0, 4, p; add.s32 last, last, $4; "
        "or.pred q, p, q; @!q bra done; setp.lt.s32 p, n, 0; @p bra store; "
        "again: atom.acq_rel.gpu.global.add.u64 old, [word], 1; "
        f"shr.u64 u, old, 16; setp.eq.u64 p, u, {COUNTS}; @p bra counted; add.u64 old, old, 1; "
        f"atom.acq_rel.gpu.global.cas.b64 u, [word], old, {COUNTS << 16 | 1}; "
        "setp.ne.b64 p, u, old; @p bra again; mov.b64 old, 0; "
        "counted: cvt.u32.u64 v, old; and.b32 v, v, 0xffff; setp.eq.s32 p, v, n; selp.s32 v, 1, 0, p; "
        "@p st.relaxed.gpu.global.b64 [word], 0; "
        f"store: st.shared.b32 [last], v; done: {barrier} ld.shared.v2.b32 {{v, w}}, [$4]; "
        "shl.b32 w, w, 1; or.b32 v, v, w; shfl.sync.idx.b32 $0, v, 0, 31, -1; }"
    )
    word_type = ir.IntegerType.get_signless(32)
    operands: Any = (
        thread_values.warpgroup_thread_index(),
        *(thread_values.address(x) for x in (word, word2)),
        thread_values.address(flags, 32),
        *(x.registers[()] for x in (others, others2)),
    )
    return thread_values.splat(asm(code, "=r,r,l,l,r,r,r", *operands, result=word_type))
