"""The configurations of the backward's kernels."""

import dataclasses
from typing import Any, ClassVar

from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import round_up


@dataclasses.dataclass(frozen=True)
class DqConfig:
    """Tile sizes of the kernel of dQ alone. A CTA computes dQ of `block_q` query rows of one head."""

    head_dim: int  # of queries and keys: a multiple of 32 up to 256; arrays may have less
    value_dim: int
    warpgroups: int = 1
    # Tiles of 64 query rows a warpgroup: two share each fragment of K and V, as in the forward.
    row_tiles: int = 1
    # Keys of a block whose scores are formed at once: S and dP take a register a thread for every 2 keys of a tile,
    # each.
    score_keys: int = 64
    stages: int = 1  # buffers of K and of V
    # Whether fragments of dO are kept in registers, 64 of them at Hv = 256, and pass through V's buffer. One tile of
    # rows.
    dout_in_registers: bool = False
    # float16 numbers whose sum an element of an operand is: 2 for float32 inputs (`split_float32`).
    terms: int = 1
    num_ctas: int = 1  # that run at the same time, as `ForwardConfig.num_ctas`

    @property
    def is_split(self) -> bool:
        """Whether inputs are float32, as sums of float16 numbers."""
        return self.terms > 1

    @property
    def panel_columns(self) -> int:
        """Return the columns of a swizzled panel at most: fragments of a panel are loaded at once, and of two terms
        they take twice the registers (4500 bytes of spills instead of 3700, or 650 instead of 390, H = 128)."""
        return 32 if self.is_split else 64

    @property
    def block_q(self) -> int:
        return 64 * self.row_tiles * self.warpgroups

    @property
    def block_kv(self) -> int:
        return 64  # a fragment of mask bits

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    @property
    def smem_bytes(self) -> int:
        """Return the bytes of shared memory that a CTA takes."""
        dims = self.head_dim + self.value_dim
        row_dims = self.head_dim if self.dout_in_registers else dims
        powers = 2 * 4 * self.stages * self.block_kv if self.is_split else 0
        return (
            2 * self.terms * (self.block_q * row_dims + self.stages * self.block_kv * dims) + powers
        )


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes of one backward kernel. A CTA computes dK and dV of `block_kv` keys of one head."""

    head_dim: int  # of queries and keys: a multiple of 32 up to 256; arrays may have less
    value_dim: int
    warpgroups: int = 2
    # Tiles of 64 keys a warpgroup: 16 or 32 keys a warp. Two share each fragment of Q and dO, which halves most of the
    # traffic of shared memory.
    key_tiles: int = 1
    stages: int = 1  # buffers of Q and of dO
    # Queries of a block whose scores are formed at once, where warpgroups divide the keys.
    score_queries: int = 64
    # Whether warpgroups divide the columns of dK and dV, and not the keys: at H = 128 a warp then has 32 keys, and
    # beyond, the gradients of 64 keys would take more registers than a warpgroup has.
    divides_columns: bool = False
    # Whether dQ is added 16 bytes at a time: from compute capability 9.0 on.
    vector_atomics: bool = False
    # The kernel of dQ alone, whose sums have one order, or where shared memory has no room for dS of dQ. Without one,
    # this kernel adds to dQ in any order.
    dq: DqConfig | None = None
    # Whether dK and dV have a kernel each: where shared memory has no room for blocks of K, V, Q and dO, the one has V
    # in registers (64 of them at Hv = 256), and the other needs no V. 8 products then, for 5. One tile of keys.
    apart: bool = False
    formed: tuple[bool, bool] = (True, True)  # dK, dV
    # float16 numbers whose sum an element of an operand is: 2 for float32 inputs (`split_float32`).
    terms: int = 1
    num_ctas: int = 1  # that run at the same time, as `ForwardConfig.num_ctas`
    block_q: ClassVar[int] = 64

    @property
    def block_kv(self) -> int:
        return 64 * self.key_tiles * (1 if self.divides_columns else self.warpgroups)

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    @property
    def is_split(self) -> bool:
        """Whether inputs are float32, as sums of float16 numbers."""
        return self.terms > 1

    @property
    def panel_columns(self) -> int:
        """Return the columns of a swizzled panel at most, as `DqConfig.panel_columns`."""
        return 32 if self.is_split else 64

    @property
    def adds_dq(self) -> bool:
        return self.dq is None

    @property
    def forms_dk(self) -> bool:
        return self.formed[0]

    @property
    def v_in_registers(self) -> bool:
        return self.formed == (True, False)

    @property
    def launches(self) -> list["BackwardConfig"]:
        """Return the configurations of the kernels of dK and dV."""
        if not self.apart:
            return [self]
        formed = (True, False), (False, True)
        return [dataclasses.replace(self, apart=False, formed=x) for x in formed]

    @property
    def score_columns(self) -> int:
        """Return of how many queries a warpgroup forms scores at once."""
        return self.block_q // self.warpgroups if self.divides_columns else self.score_queries

    def panel(self, dim: int, divided: bool) -> int:
        """Return the columns of a swizzled panel of rows of `dim` columns, which warpgroups may have divided among
        them: the columns of each are whole panels."""
        columns = dim // self.warpgroups if divided else dim
        return min(64 if columns % 64 == 0 else 32, self.panel_columns)

    def share(self, dim: int, warpgroup: Any) -> Any:
        """Return a warpgroup's columns of dQ, and where columns are divided, of dK or dV."""
        size = dim // self.warpgroups
        return pl.ds(warpgroup * size, size)

    @property
    def column_shares(self) -> int:
        """Return into how many parts warpgroups divide the columns of dK and dV."""
        return self.warpgroups if self.divides_columns else 1

    @property
    def stored_tiles(self) -> int:
        """Return how many tiles of keys by queries go through shared memory: dS for dQ; P and dS for dV and dK where
        columns are divided. dQ and dK read the same dS, unless it is split."""
        if self.is_split:
            return 2 * self.divides_columns + self.adds_dq
        return 2 if self.divides_columns else int(self.adds_dq)

    @property
    def pieces(self) -> int:
        """Return into how many pieces of queries a block is divided whose scores are formed at once."""
        return self.block_q // self.score_columns

    @property
    def rows_multiple(self) -> int:
        """Return the multiple to which values of query rows are padded: whole blocks of each kernel."""
        return self.block_q if self.dq is None else max(self.block_q, self.dq.block_q)

    @property
    def multiples(self) -> tuple[int, int]:
        """Return the multiples to which values of queries and of keys are padded: whole blocks of each kernel."""
        return self.rows_multiple, self.block_kv

    @property
    def smem_bytes(self) -> int:
        """Return the bytes of shared memory that a CTA takes: the most of any kernel of the backward."""
        if self.apart:
            return max(config.smem_bytes for config in self.launches)
        dims = self.head_dim + self.value_dim
        key_dims = dims if all(self.formed) else self.head_dim
        operands = self.block_kv * key_dims + self.stages * self.block_q * dims
        tiles = self.stored_tiles * self.block_kv * self.block_q
        vectors = 4 if self.is_split else 2  # lse, delta, and the powers of q and dO, in float32
        own = 2 * self.terms * (operands + tiles) + 4 * vectors * self.stages * self.block_q
        if self.is_split:
            # the powers of stored tiles: every buffer begins at a multiple of 1024 bytes
            own += round_up(4 * self.stored_tiles * self.pieces * self.block_kv, 1024)
        return own if self.dq is None else max(own, self.dq.smem_bytes)
