"""Bulk copies between the shared memories of the two CTAs of a cluster."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.primitives import swizzle
from pallas_fa2.backends.sm90.primitives.thread_values import address, elect_one


@dataclasses.dataclass(frozen=True)
class ClusterCopy:
    """Tiles that the other CTA of a cluster copies here from its shared memory.

    Pallas stores to another CTA from registers, and arrives there with a fence for which the warps wait
    2000 clocks under load; a bulk copy (PTX ISA, cp.async.bulk) needs none.
    """

    tiles: Any  # [stages, rows, columns]
    arrived: Any  # [stages, 2] uint32, an mbarrier each
    dtype: Any

    def _stage(self, step: Any) -> Any:
        return lax.rem(step, I32(self.tiles.shape[0]))

    def init(self) -> None:
        """Before the other CTA is told that this one is there; by one warpgroup."""
        _open_mail(self.arrived, I32(self.tiles.shape[0]))  # pyright: ignore[reportCallIssue]

    def expect_tx(self, step: Any) -> None:
        """By one warpgroup, once the stage is free."""
        size = math.prod(self.tiles.shape[1:]) * jnp.dtype(self.dtype).itemsize
        _expect_mail(self.arrived.at[self._stage(step)], I32(size))  # pyright: ignore[reportCallIssue]

    def send(self, step: Any, tile: Any, cta: Any) -> None:
        """To the same place in another CTA, whose stage is free; `tile` has been committed."""
        stage = self._stage(step)
        operand = swizzle.as_operand(tile)
        send = plgpu.inline_mgpu(arg_types=(operand, operand, plgpu.RefType(), _NUMBER))(_send_mail)
        send(tile, self.tiles.at[stage], self.arrived.at[stage], cta)  # pyright: ignore[reportCallIssue]

    def wait(self, step: Any) -> Any:
        stage = self._stage(step)
        turn = lax.rem(lax.div(step, I32(self.tiles.shape[0])), I32(2))
        _wait_for_mail(self.arrived.at[stage], turn)  # pyright: ignore[reportCallIssue]
        return self.tiles.at[stage]


_NUMBER = plgpu.Layout.WG_SPLAT


def _shared_address(ref: Any) -> Any:
    return address(ref, 32)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NUMBER))
def _open_mail(_: Any, arrived: Any, stages: Any) -> None:
    shape = ir.MemRefType(arrived.type).shape
    each = " ".join(f"@p mbarrier.init.shared::cta.b64 [$1 + {8 * i}], 1;" for i in range(shape[0]))
    elect_one(f"{each} fence.mbarrier_init.release.cluster;", _shared_address(arrived))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NUMBER))
def _expect_mail(_: Any, arrived: Any, size: Any) -> None:
    code = "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;"
    elect_one(code, _shared_address(arrived), size.registers[()])


def _send_mail(_: Any, source: Any, target: Any, arrived: Any, cta: Any) -> None:
    shape = ir.MemRefType(source.type)
    size = math.prod(shape.shape) * mgpu.utils.bytewidth(shape.element_type)
    to, complete = "shared::cluster.shared::cta", "mbarrier::complete_tx::bytes"
    code = (
        "mapa.shared::cluster.u32 a, $2, $4; mapa.shared::cluster.u32 b, $3, $4; "
        f"@p cp.async.bulk.{to}.{complete} [a], [$1], {size}, [b];"
    )
    addresses = [_shared_address(x) for x in (source, target, arrived)]
    elect_one(code, *addresses, cta.registers[()])


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NUMBER))
def _wait_for_mail(_: Any, arrived: Any, turn: Any) -> None:
    code = (
        "{ .reg .pred p; wait: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
        "@p bra done; bra wait; done: }"
    )
    operands = [_shared_address(arrived), turn.registers[()]]
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, code, "r,r", has_side_effects=True)
