"""The mask, scores and dropout of a call, compiled for kernels with tiles of 64 rows in registers."""

import dataclasses
import hashlib
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.backends.common import compile_mods, mask_bits, pack_inputs
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.block_mask import BlockMask, mark_last_partial, reversed_classes
from pallas_fa2.backends.common.causal_trim import CausalTrim
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.tile_mods import TileDropout, TileMask, TileScore
from pallas_fa2.compilation.launches import LaunchKey
from pallas_fa2.distributed.sharding import Axes
from pallas_fa2.ir import block_classes
from pallas_fa2.ir.call_spec import CallSpec, Operands


class RuntimeAux(NamedTuple):
    """The arrays of a call beside q, k and v, with all batch entries or with those of a launch."""

    aux: AuxInputs | None
    classes: jax.Array | None  # int32 [B, N | 1, T tiles, S tiles], if they depend on data
    # int32 [B]: whether some token of the batch entry may have no partner
    may_have_unattended: jax.Array | None = None

    @property
    def axes(self) -> "RuntimeAux":
        """The axes of each array, as `sharding.Axes` names them."""
        aux: Any = None if self.aux is None else AuxInputs.axes()
        classes: Any = None if self.classes is None else "bn.."
        unattended: Any = None if self.may_have_unattended is None else "b"
        return RuntimeAux(aux, classes, unattended)


class MaskPlan(NamedTuple):
    """How a launch evaluates its mask, and the arrays that it reads for it."""

    kernel_spec: KernelSpec
    aux: AuxInputs | None  # None if only a mask that is precomputed would read it
    classes: Any = None  # of tiles, [B | 1, N | 1, T tiles, S tiles]
    block_mask: BlockMask | None = None  # the key blocks of each tile of queries
    mask_bits: jax.Array | None = None  # of a mask that is precomputed (`mask_bits`)


def mask_forms(spec: CallSpec) -> tuple[bool, bool]:
    """Return whether kernels of a call may evaluate its mask themselves, and whether it may be precomputed.

    That holds for any number of heads and tokens: those of a launch are fewer on one of several devices.
    """
    mask = compile_mods.compile_mask(spec)
    if mask is None:
        return False, False
    if not compile_mods.mask_reads_pairs(spec):
        return True, not spec.scores and any(mask_bits.may_pay_off(mask, axis) for axis in (0, 1))
    if max(spec.head_dim, spec.value_dim) > compile_mods.MAX_DIM_WITH_PAIRWISE:
        return False, True
    return True, not (spec.scores or spec.mask_varies_by_head)


class CompiledMods(NamedTuple):
    """The mods of a call, as FlexAttention calls them: a mask that is not causal, score functions, and dropout."""

    spec: CallSpec  # with the lengths that `trim` leaves
    trim: CausalTrim
    mask: TileMask | None
    score: TileScore | None
    dropout: TileDropout | None
    classes: np.ndarray | None  # of tiles, [B | 1, N | 1, T tiles, S tiles], if known when traced
    runtime: RuntimeAux

    @classmethod
    def compile(
        cls,
        spec: CallSpec,
        trim: CausalTrim,
        operands: Operands,
        block_q: int,
        block_kv: int,
        needs_grad: tuple[bool, ...] = (),
    ) -> "CompiledMods":
        """Compile the mods of a call, and classify its tiles of so many queries and keys.

        `operands` are trimmed; `needs_grad` says which floating-point inputs of scores need gradients.
        """
        mask, score = compile_mods.compile_mask(spec), compile_mods.compile_score(spec, needs_grad)
        functions = mask, score, compile_mods.compile_dropout(spec)
        spec = trim.spec(spec)
        aux = None
        if functions != (None, None, None):
            aux = pack_inputs.pack(spec, operands, trim.first_query)
        mods = cls(spec, trim, *functions, None, RuntimeAux(aux, None))
        # A mask of pairwise inputs that depend on data is classified as it is precomputed.
        if mask is None or (
            compile_mods.needs_mask_bits(spec) and block_classes.is_traced(operands)
        ):
            return mods
        classes = mods._classify(operands, block_q, block_kv)
        if isinstance(classes, np.ndarray):
            return mods._replace(classes=classes)
        return mods._replace(runtime=RuntimeAux(aux, classes))

    def _classify(self, operands: Operands, block_q: int, block_kv: int) -> Any:
        """Return the classes of tiles, int32 `[B | 1, N | 1, T tiles, S tiles]`: NumPy if known when traced."""
        spec = self.spec
        classes = block_classes.block_classes(spec, operands, block_q, block_kv)
        classes = classes.reshape(classes.shape[0], -1, *classes.shape[3:])
        if spec.kv_len % block_kv:
            classes = mark_last_partial(classes)
        if isinstance(classes, np.ndarray):
            return classes
        return jnp.broadcast_to(classes, (spec.batch, *classes.shape[1:]))

    def launch_key(self, name: str, spec: CallSpec, *static: Hashable) -> LaunchKey:
        """Return the key of a launch with these mods; classes are data if the call's operands are not traced."""
        classes = None
        if self.classes is not None:
            classes = self.classes.shape, hashlib.sha256(self.classes.tobytes()).hexdigest()
        return LaunchKey.of(name, spec, *static, classes)

    def make_kernel_spec(self, batch: int, q_heads: int, kv_heads: int) -> KernelSpec:
        """Return the description of a launch of so many batch entries and heads."""
        return KernelSpec(
            batch=batch,
            q_len=self.trim.q_len,
            kv_len=self.trim.kv_len,
            q_heads=q_heads,
            kv_heads=kv_heads,
            scale=self.spec.scale,
            causal_offset=self.trim.offset,
            mask=self.mask,
            score=self.score,
            dropout=self.dropout,
            q_index_offset=self.trim.first_query,
        )

    def sharded_axes(self, arguments: tuple, results: tuple) -> Axes | None:
        """Return the axes of a launch whose last argument is a `RuntimeAux`, or None if it must not be sharded.

        That is where pairwise gradients are formed, in another way for each number of batch entries.
        """
        if self.score is not None and self.score.diff_inputs_of("pair"):
            return None
        return Axes((*arguments, self.runtime.axes), results)

    def get_classes(self, runtime: RuntimeAux) -> Any:
        """Return the classes of the tiles of a launch, or None if they are not known before the mask is evaluated."""
        return runtime.classes if self.classes is None else self.classes

    def wants_mask_bits(
        self, spec: KernelSpec, classes: Any, tile: tuple[int, int], q_axis: int
    ) -> bool:
        """Return whether a launch precomputes the mask."""
        if spec.mask.visible.pairwise_inputs:
            return compile_mods.needs_mask_bits(self.spec)
        return mask_bits.precompute_pays_off(spec, self.spec.head_dim, classes, tile, q_axis)

    def plan_mask(
        self, spec: KernelSpec, runtime: RuntimeAux, tile: tuple[int, int], q_axis: int
    ) -> MaskPlan:
        """Classify, list and precompute the mask of a launch with tiles of so many queries and keys.

        The rows of a CTA of the attention are queries if `q_axis` is 0, else keys. Where classes are not known,
        the mask is evaluated on all tiles.
        """
        aux, classes = runtime.aux, self.get_classes(runtime)
        if spec.mask is None:
            return MaskPlan(spec, aux)
        assert aux is not None
        bits = block_mask = None
        if classes is None:
            bits, classes = mask_bits.compute_bits_and_classes(spec, aux, tile, q_axis)
            classes = mark_last_partial(classes) if spec.kv_len % tile[1] else classes
        # With the heads of one device, it may not pay off.
        precomputes = bits is None and self.wants_mask_bits(spec, classes, tile, q_axis)
        if q_axis == 0:
            block_mask = BlockMask.from_classes(classes)
        elif precomputes:
            block_mask = BlockMask.from_classes(reversed_classes(classes.swapaxes(2, 3)))
        if precomputes:
            assert block_mask is not None
            bits = mask_bits.compute_bits(spec, aux, block_mask, tile, q_axis)
        if bits is None:
            return MaskPlan(spec, aux, classes, block_mask)
        aux = None if self.score is None and self.dropout is None else aux
        spec = dataclasses.replace(spec, uses_mask_bits=True)
        return MaskPlan(spec, aux, classes, block_mask, bits)
