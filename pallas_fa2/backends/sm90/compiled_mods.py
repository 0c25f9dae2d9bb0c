"""The mask, scores and dropout of a call, compiled for the sm90 kernels."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.causal_trim import CausalTrim
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.tile_mods import TileDropout, TileMask, TileScore
from pallas_fa2.backends.sm90 import block_mask, compile_mods, mask_bits, pack_inputs
from pallas_fa2.distributed.sharding import Axes
from pallas_fa2.ir import block_classes
from pallas_fa2.ir.call_spec import CallSpec, Operands


class MaskPlan(NamedTuple):
    """What a kernel of attention finds of a mask."""

    kernel_spec: KernelSpec
    data: AuxInputs | None  # without the mask's, if it has been asked
    classes: Any = None  # of tiles, [B | 1, N | 1, T tiles, S tiles]
    block_mask: Any = None  # `block_mask.BlockMask` of queries
    mask_bits: jax.Array | None = None  # of a mask that has been asked (`mask_bits`)


class CompiledMods(NamedTuple):
    """What a call has beside q, k and v: a mask that is not causal, score functions, and dropout."""

    spec: CallSpec  # of the rows and keys that take part
    trim: CausalTrim
    mask: TileMask | None
    score: TileScore | None
    dropout: TileDropout | None
    classes: np.ndarray | None  # of tiles, [B | 1, N | 1, T tiles, S tiles], if known when traced
    runtime: "RuntimeAux"
    kv_subblocks: int = (
        1  # that a block of keys has where the mask is asked: classes are those of parts
    )

    @classmethod
    def compile(
        cls,
        spec: CallSpec,
        part: CausalTrim,
        operands: Operands,
        block_q: int,
        block_kv: int,
        wanted: tuple[bool, ...] = (),
        may_have_parts: bool = False,
    ) -> "CompiledMods":
        """Of a call that has tiles of so many queries and keys. Where its mask will be asked, blocks of keys
        `may_have_parts`, of 64 keys each, if tiles visit fewer of them so.
        """
        mask, score = compile_mods.compile_mask(spec), compile_mods.compile_score(spec, wanted)
        functions = mask, score, compile_mods.compile_dropout(spec)
        spec = part.spec(spec)
        data = None
        if functions != (None, None, None):
            data = pack_inputs.pack(spec, operands, part.first_query)
        extras = cls(spec, part, *functions, None, RuntimeAux(data, None))
        if mask is None or (
            compile_mods.needs_mask_bits(spec) and block_classes.is_traced(operands)
        ):
            return extras
        classes = extras._classify(operands, block_q, block_kv)
        parts = block_kv // mask_bits.FRAGMENT
        if (
            may_have_parts
            and parts > 1
            and extras._uses_mask_bits_only(classes, (block_q, block_kv))
        ):
            of_parts = extras._classify(operands, block_q, mask_bits.FRAGMENT)
            of_parts = block_mask.pad_subblocks(of_parts, parts)
            if block_mask.subblocks_pay_off(of_parts, classes, parts):
                classes, extras = of_parts, extras._replace(kv_subblocks=parts)
        if isinstance(classes, np.ndarray):
            return extras._replace(classes=classes)
        return extras._replace(runtime=RuntimeAux(data, classes))

    def _classify(self, operands: Operands, block_q: int, block_kv: int) -> Any:
        spec = self.spec
        classes = block_classes.block_classes(spec, operands, block_q, block_kv)
        classes = classes.reshape(classes.shape[0], -1, *classes.shape[3:])
        if spec.kv_len % block_kv:
            classes = block_mask.mark_last_partial(classes)
        if isinstance(classes, np.ndarray):
            return classes
        return jnp.broadcast_to(classes, (spec.batch, *classes.shape[1:]))

    def _uses_mask_bits_only(self, classes: Any, tile: tuple[int, int]) -> bool:
        """Whether the forward, in a launch of all heads, asks the mask, and has no other use for the numbers of
        keys."""
        spec = self.spec
        problem = self.kernel_spec(spec.batch, spec.q_heads, spec.kv_heads)
        others = self.score is not None or self.dropout is not None
        return not others and self.wants_mask_bits(problem, classes, tile, q_axis=0)

    def kernel_spec(self, batch: int, q_heads: int, kv_heads: int) -> KernelSpec:
        """Of a launch, of some batch entries and heads."""
        spec, part = self.spec, self.trim
        return KernelSpec(
            batch=batch,
            q_len=part.q_len,
            kv_len=part.kv_len,
            q_heads=q_heads,
            kv_heads=kv_heads,
            scale=spec.scale,
            causal_offset=part.offset,
            mask=self.mask,
            score=self.score,
            dropout=self.dropout,
            q_index_offset=part.first_query,
        )

    def sharded_axes(self, arguments: tuple, results: tuple) -> Axes | None:
        """Of a kernel's call, whose last argument is `traced`; None where it stays whole.

        So it does where gradients of data of pairs are formed, in another way for each number of entries.
        """
        if self.score is not None and self.score.diff_inputs_of("pair"):
            return None
        return Axes((*arguments, self.runtime.axes), results)

    def classes_of(self, traced: "RuntimeAux") -> Any:
        return traced.classes if self.classes is None else self.classes

    def wants_mask_bits(
        self, problem: KernelSpec, classes: Any, tile: tuple[int, int], q_axis: int
    ) -> bool:
        """Whether the mask is asked before the attention."""
        if problem.mask.visible.pairwise_inputs:
            return compile_mods.needs_mask_bits(self.spec)
        return mask_bits.precompute_pays_off(problem, self.spec.head_dim, classes, tile, q_axis)

    def plan_mask(
        self, problem: KernelSpec, traced: "RuntimeAux", tile: tuple[int, int], q_axis: int
    ) -> MaskPlan:
        """Of tiles of so many queries and keys. A CTA of attention has those of `q_axis`.

        Where the classes of tiles are not known, the mask is asked about all of them.
        """
        if problem.mask is None:
            return MaskPlan(problem, traced.data)
        classes, found = self.classes_of(traced), None
        seen: Any = None
        assert traced.data is not None
        if classes is None:
            found, classes = mask_bits.compute_bits_and_classes(problem, traced.data, tile, q_axis)
            classes = block_mask.mark_last_partial(classes) if problem.kv_len % tile[1] else classes
        whole = block_mask.merge_subblocks(classes, self.kv_subblocks)
        asks = found is None and self.wants_mask_bits(problem, whole, tile, q_axis)
        if asks:
            problem = dataclasses.replace(problem, kv_subblocks=self.kv_subblocks)
        else:  # with the heads of one device, it may not be worth it
            classes = whole
        if q_axis == 0:
            seen = block_mask.BlockMask.from_classes(classes, problem.kv_subblocks)
        elif asks:
            seen = block_mask.BlockMask.from_classes(
                block_mask.reversed_classes(classes.swapaxes(2, 3))
            )
        if asks:
            found = mask_bits.compute_bits(problem, traced.data, seen, tile, q_axis)
        if found is None:
            return MaskPlan(problem, traced.data, classes, seen)
        data = None if self.score is None and self.dropout is None else traced.data
        return MaskPlan(
            dataclasses.replace(problem, uses_mask_bits=True), data, classes, seen, found
        )


class RuntimeAux(NamedTuple):
    """Arrays with all batch entries, or with those of a launch."""

    data: AuxInputs | None
    classes: jax.Array | None
    may_have_unattended: jax.Array | None = (
        None  # int32 [B]: whether tokens may take part in nothing
    )

    @property
    def axes(self) -> "RuntimeAux":
        """As `sharding.Axes` has them."""
        data: Any = None if self.data is None else AuxInputs.axes()
        classes: Any = None if self.classes is None else "bn.."
        in_doubt: Any = None if self.may_have_unattended is None else "b"
        return RuntimeAux(data, classes, in_doubt)
