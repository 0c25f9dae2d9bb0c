"""The types of the arguments of `flash_attention` and `dot_product_attention`."""

from collections.abc import Callable
from typing import Literal, TypedDict

from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pallas_fa2.masks import Mask
from pallas_fa2.scores import Score

Query = Float[Array, "*B T N H"]
Key = Float[Array, "*B S K H"]
Value = Float[Array, "*B S K Hv"]
Out = Float[Array, "*B T N Hv"]

Implementation = Literal["reference", "blockwise", "hopper", "ampere", "fused"]
Scores = Score | Callable | tuple[Score | Callable, ...]
MaskLike = Mask | Callable | Bool[Array, "..."]


class _SharedOptions(TypedDict, total=False):
    """The keyword arguments that both functions take with the same meaning."""

    is_causal: bool
    score: Scores | None
    scale: float | Float[Array, ""] | None
    sinks: Float[Array, " N"] | None
    dropout_rate: float
    dropout_rng: PRNGKeyArray | None
    align: Literal["start", "end"]
    q_positions: Int[Array, "*B T"] | None
    kv_positions: Int[Array, "*B S"] | None
    deterministic_gradients: bool


class Options(_SharedOptions, total=False):
    """The options of `flash_attention` without `return_lse`, for annotations: `**options: Unpack[Options]`."""

    mask: MaskLike | None
    implementation: Implementation | None


class DropInOptions(_SharedOptions, total=False):
    """The keyword arguments of `dot_product_attention` without `return_residual`."""

    query_seq_lengths: Int[Array, " B"] | None
    key_value_seq_lengths: Int[Array, " B"] | None
    local_window_size: int | tuple[int, int] | None
    implementation: Implementation | Literal["xla"] | None
