"""Bulk copies between the shared memories of the two CTAs of a cluster."""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.thread_values import address, elect_one
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers, Scalar

_SCALAR = plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True)
class ClusterCopy:
    """Buffers that the other CTA of a cluster fills from its shared memory.

    Pallas stores to another CTA from registers, and arrives there with a fence for which the warps wait
    2000 clocks under load; a bulk copy (PTX ISA, cp.async.bulk) needs none.
    """

    tiles: Ref  # [stages, rows, columns]
    arrived: Ref  # [stages, 2] uint32, an mbarrier each
    dtype: DTypeLike

    def _stage(self, step: Scalar) -> Scalar:
        return lax.rem(step, I32(self.tiles.shape[0]))

    def init(self) -> None:
        """Initialize the barriers, by one warpgroup, before the other CTA is told that this one has begun."""
        _init(self.arrived, I32(self.tiles.shape[0]))

    def expect_tx(self, step: Scalar) -> None:
        """Expect a tile at a step's barrier, by one warpgroup, once the stage is free."""
        size = math.prod(self.tiles.shape[1:]) * jnp.dtype(self.dtype).itemsize
        _expect_tx(self.arrived.at[self._stage(step)], I32(size))

    def send(self, step: Scalar, tile: Ref, cta: Scalar) -> None:
        """Copy a committed tile to the same stage in another CTA, where it is free."""
        stage = self._stage(step)
        operand = swizzle.as_operand(tile)
        send = inline_op("cluster_send", operand, operand, plgpu.RefType(), _SCALAR)(_send)
        send(tile, self.tiles.at[stage], self.arrived.at[stage], cta)

    def wait(self, step: Scalar) -> Ref:
        """Return the tile of a step, once it is there."""
        stage = self._stage(step)
        phase = lax.rem(lax.div(step, I32(self.tiles.shape[0])), I32(2))
        _wait(self.arrived.at[stage], phase)
        return self.tiles.at[stage]


def _shared_address(ref: Ref) -> MlirValue:
    return address(ref, 32)


@inline_op("cluster_init", plgpu.RefType(), _SCALAR)
def _init(_, arrived: Ref, stages: Registers) -> None:
    shape = ir.MemRefType(arrived.type).shape
    init = " ".join(f"@p mbarrier.init.shared::cta.b64 [$1 + {8 * i}], 1;" for i in range(shape[0]))
    elect_one(f"{init} fence.mbarrier_init.release.cluster;", _shared_address(arrived))


@inline_op("cluster_expect_tx", plgpu.RefType(), _SCALAR)
def _expect_tx(_, arrived: Ref, size: Registers) -> None:
    code = "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;"
    elect_one(code, _shared_address(arrived), size.registers[()])


def _send(_, source: Ref, target: Ref, arrived: Ref, cta: Registers) -> None:
    kind = ir.MemRefType(source.type)
    size = math.prod(kind.shape) * mgpu.utils.bytewidth(kind.element_type)
    to, complete = "shared::cluster.shared::cta", "mbarrier::complete_tx::bytes"
    code = (
        "mapa.shared::cluster.u32 a, $2, $4; mapa.shared::cluster.u32 b, $3, $4; "
        f"@p cp.async.bulk.{to}.{complete} [a], [$1], {size}, [b];"
    )
    addresses = [_shared_address(x) for x in (source, target, arrived)]
    elect_one(code, *addresses, cta.registers[()])


@inline_op("cluster_wait", plgpu.RefType(), _SCALAR)
def _wait(_, arrived: Ref, phase: Registers) -> None:
    code = (
        "{ .reg .pred p; wait: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
        "@p bra done; bra wait; done: }"
    )
    asm(code, "r,r", _shared_address(arrived), phase.registers[()])
