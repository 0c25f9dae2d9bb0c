"""Room in shared memory for keys and values of 8 bits, on their way to 16."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_fa2.backends.common.inline import asm, asm_words, inline_op
from pallas_fa2.backends.common.primitives.layouts import THREADS
from pallas_fa2.backends.common.primitives.swizzle import as_operand
from pallas_fa2.backends.common.primitives.thread_values import (
    PER_THREAD,
    address,
    sum_i32,
    thread_field,
    thread_value,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers
from pallas_fa2.backends.sm90.primitives.pieces import (
    BYTES,
    COLUMNS,
    WORDS,
    destinations,
    own_row,
    store_piece,
)

STAGES = 2  # of the staging buffer: subtiles that are under way


class Staging(NamedTuple):
    """The staging buffer of K or of V: subtiles of a block are copied to its stages while another one is stored in 16
    bits."""

    pieces: Ref  # int32 [STAGES, pieces, WORDS * THREADS]; a thread reads those that it copies
    scales: Ref  # int32 [THREADS], of all rows of a block, a bfloat16 twice each

    @classmethod
    def allocate(cls, subtile_kv: int, dim: int) -> "Staging":
        """Lay out shared memory for subtiles of so many keys."""
        shape = STAGES, subtile_kv * dim // BYTES, WORDS * THREADS
        return cls(plgpu.SMEM(shape, jnp.int32), plgpu.SMEM((THREADS,), jnp.int32))

    def stage(self, subtile: int) -> Ref:
        """Return the stage of a subtile, which has this index in its block."""
        return self.pieces.at[subtile % STAGES]

    def share(self, scale: jax.Array) -> None:
        """Let all threads read the scale of a row that each has loaded."""
        _share_scales(self.scales, scale)

    def store(self, subtile: int, buffer: Ref, dtype: str) -> None:
        """Store numbers of a subtile times their scales in its rows of a block, `[rows, columns]` of bfloat16 in shared
        memory."""
        targets = list(destinations(buffer))
        types = as_operand(buffer), plgpu.RefType(), plgpu.RefType()
        first_row = subtile * buffer.shape[0]

        @inline_op("store_staged", *types, dtype=dtype, targets=targets, first_row=first_row)
        def store(_, buffer: Ref, stage: Ref, scales: Ref) -> None:
            own_stage, scales_at = own_bytes(stage), address(scales, 32)

            def load(i: int) -> list[MlirValue]:
                band, row = targets[i]
                code = (
                    f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$5 + {i * BYTES}]; "
                    f"ld.shared.b32 $4, [$6 + {4 * (first_row + row)}];"
                )
                scale_at = arith.addi(scales_at, own_row(band, 4))
                return asm_words(WORDS + 1, code, "r,r", own_stage, scale_at, side_effects=True)

            following = load(0)
            for i, target in enumerate(targets):
                *words, scale = following
                if i + 1 < len(targets):
                    following = load(i + 1)  # it is under way while this piece is multiplied
                store_piece(buffer, target, dtype, words, scale)

        store(buffer, self.stage(subtile), self.scales)


@inline_op("share_scales", plgpu.RefType(), PER_THREAD)
def _share_scales(_, scales: Ref, scale: Registers) -> None:
    """Store the scale of each thread twice, and let the warps meet."""
    code = "{ .reg .b32 a; prmt.b32 a, $1, 0, 0x1010; st.shared.b32 [$0], a; }"
    asm(code, "r,r", sum_i32(address(scales, 32), thread_field(0, 7, 4)), thread_value(scale))
    mgpu.utils.warpgroup_barrier()


def own_bytes(pieces: Ref) -> MlirValue:
    """Emit the address of the thread's piece among those of all threads, or of the first of several."""
    return sum_i32(address(pieces, 32), thread_field(0, 7, COLUMNS))
