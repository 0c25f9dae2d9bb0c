"""The configurations of the mma.sync kernels, by head dims and the shared memory of a GPU."""

from dataclasses import replace
from typing import Any, NamedTuple

from pallas_fa2.backends.common import limits, split_float32
from pallas_fa2.backends.protocol import Configuration
from pallas_fa2.backends.sm80.backward.config import BackwardConfig, DqConfig
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.backends.sm80.multiprocessor import ctas_at_a_time, smem_bytes
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

SHORT = 1024  # queries, for which 128 keys at a time are 1.17 as fast at H = 64 (docs/decisions/0073-portable-kernels.md)


class Rule[C: (ForwardConfig, DqConfig)](NamedTuple):
    """A configuration of a kernel of query rows, and the calls that take it."""

    config: C
    # Whether it serves only causal calls and those of up to `SHORT` queries.
    only_short: bool = False
    # How many CTAs must fit into the most shared memory that one may have: so many then run on a multiprocessor, and
    # hide each other's softmax.
    ctas: int = 1
    # Whether ptxas compiles it for Blackwell with no more spills than the gate allows.
    on_blackwell: bool = True

    def compiles(self, dims: tuple[int, int], device: Device) -> bool:
        """Return whether the kernel is of these head dims and runs on a device."""
        on_device = self.on_blackwell or float(device.capability) < 10.0
        own_dims = self.config.head_dim, self.config.value_dim
        return own_dims == dims and on_device and self.config.smem_bytes <= smem_bytes(device)

    def serves(self, spec: CallSpec, device: Device) -> bool:
        """Return whether such a call takes it, if no rule before does."""
        dims = kernel_dims(spec.head_dim, spec.value_dim)
        has_room = self.ctas * self.config.smem_bytes <= smem_bytes(device)
        suits = not self.only_short or spec.causal is not None or spec.q_len <= SHORT
        return self.compiles(dims, device) and has_room and suits


LARGE_DIMS = (192, 128), (192, 192), (256, 256)

# For each head dims, the first rule that serves a call is taken, as measured on an H200
# (docs/decisions/0073-portable-kernels.md); `autotune` tries the others as well.
FORWARD_RULES: tuple[Rule[ForwardConfig], ...] = (
    # For Blackwell, more keys at a time spill up to 1752 bytes a thread.
    Rule(ForwardConfig(64, 64, block_kv=128), only_short=True, on_blackwell=False),
    Rule(ForwardConfig(64, 64, q_in_registers=True)),
    Rule(ForwardConfig(64, 64, warpgroups=2, row_tiles=1, q_in_registers=True)),
    # Where two CTAs do not fit, one has 8 warps. For Blackwell, 32 rows a warp spill 1040 bytes at H = 128.
    Rule(ForwardConfig(96, 96), ctas=2, on_blackwell=False),
    Rule(ForwardConfig(96, 96, warpgroups=2, row_tiles=1, q_in_registers=True)),
    Rule(ForwardConfig(128, 128), ctas=2, on_blackwell=False),
    Rule(ForwardConfig(128, 128, warpgroups=2, row_tiles=1, q_in_registers=True)),
    # O takes 128 registers for 64 rows.
    *(Rule(ForwardConfig(*dims, row_tiles=1)) for dims in LARGE_DIMS),
    *(Rule(ForwardConfig(*dims, row_tiles=1, warpgroups=2)) for dims in LARGE_DIMS),
)

# For each head dims, the first that fits: 32 keys a warp where registers and shared memory have room, see `key_tiles`.
BACKWARD_CONFIGS = (
    BackwardConfig(64, 64, warpgroups=1, key_tiles=2, score_queries=32),
    BackwardConfig(96, 96, warpgroups=1),  # columns are no whole panels of two warpgroups
    BackwardConfig(128, 128, divides_columns=True, key_tiles=2),
    BackwardConfig(128, 128, divides_columns=True),
    *(BackwardConfig(*dims, divides_columns=True) for dims in LARGE_DIMS),
)
# The same where dQ has a kernel of its own: a second buffer of Q and dO takes the room of dS. The last ones serve all
# calls where 100 KB of shared memory have no room for blocks of K, V, Q and dO. They form scores of 16 queries at a
# time: of 32 they spill up to 1408 bytes where ptxas compiles for Blackwell, and with 32 keys a warp up to 1840. (Not
# measured.)
KEY_CONFIGS = (
    *(replace(config, stages=2) for config in BACKWARD_CONFIGS),
    *BACKWARD_CONFIGS,
    *(BackwardConfig(*dims, warpgroups=1, score_queries=16, apart=True) for dims in LARGE_DIMS),
)
# The kernel of dQ alone. (Not measured.)
DQ_RULES: tuple[Rule[DqConfig], ...] = (
    Rule(DqConfig(64, 64, row_tiles=2)),
    Rule(DqConfig(96, 96, row_tiles=2, score_keys=32)),
    # For Blackwell, 32 rows a warp spill 1160 bytes under a mask of documents.
    Rule(DqConfig(128, 128, row_tiles=2, score_keys=32), ctas=2, on_blackwell=False),
    Rule(DqConfig(128, 128, warpgroups=2)),
    *(Rule(DqConfig(*dims)) for dims in LARGE_DIMS),
    *(Rule(DqConfig(*dims, score_keys=16, dout_in_registers=True)) for dims in LARGE_DIMS),
)

# Of float32 inputs, whose operands take twice the shared memory. From H = 128 on, the gradients of 64 keys in one
# warpgroup spill 3000 to 5000 bytes. Beyond (192, 192) no operands of 64 rows fit, and `blockwise` forms the gradients.
SPLIT_DIMS = (128, 128), (192, 128), (192, 192)  # beyond (96, 96)
SPLIT_BACKWARD_CONFIGS = (
    BackwardConfig(64, 64, warpgroups=1, terms=split_float32.TERMS),
    BackwardConfig(96, 96, warpgroups=1, score_queries=32, terms=split_float32.TERMS),
    *(
        BackwardConfig(*dims, divides_columns=True, terms=split_float32.TERMS)
        for dims in SPLIT_DIMS
    ),
)
# The same where dQ has a kernel of its own. The last one serves all calls at H = 128 where a CTA has 100 KB.
SPLIT_KEY_CONFIGS = (
    *(replace(config, stages=2) for config in SPLIT_BACKWARD_CONFIGS),
    *SPLIT_BACKWARD_CONFIGS,
    BackwardConfig(128, 128, warpgroups=1, score_queries=16, apart=True, terms=split_float32.TERMS),
)
SPLIT_DQ_RULES: tuple[Rule[DqConfig], ...] = (
    *(
        Rule(DqConfig(*dims, terms=split_float32.TERMS))
        for dims in ((64, 64), (96, 96), *SPLIT_DIMS)
    ),
    Rule(DqConfig(128, 128, score_keys=16, dout_in_registers=True, terms=split_float32.TERMS)),
)


def kernel_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the dims of the smallest kernels that take these."""
    return next(dims for dims in limits.KERNEL_DIMS if dims[0] >= head_dim and dims[1] >= value_dim)


def _first_that_serves(rules: tuple[Rule, ...], spec: CallSpec, device: Device) -> Any:
    return next((rule.config for rule in rules if rule.serves(spec, device)), None)


def _on_device[C: (ForwardConfig, DqConfig, BackwardConfig)](config: C, device: Device) -> C:
    """Return the configuration with the number of CTAs that run at the same time."""
    count = ctas_at_a_time(device, config.smem_bytes, config.warpgroups)
    return replace(config, num_ctas=count)


def terms(spec: CallSpec) -> int:
    """Return how many 16-bit numbers an element of q, k or v is the sum of."""
    return split_float32.TERMS if spec.dtype.itemsize == 4 else 1


def forward_config(spec: CallSpec, device: Device) -> ForwardConfig:
    """Return the forward's configuration."""
    if terms(spec) > 1:
        return _on_device(_split_forward_config(spec, device), device)
    return _on_device(_first_that_serves(FORWARD_RULES, spec, device), device)


def _split_forward_config(spec: CallSpec, device: Device) -> ForwardConfig:
    """Return the forward's configuration for float32 inputs; no other was measured
    (docs/decisions/0075-split-float32.md).

    A warp has 16 rows: S, P and P V_j take twice the registers of 16-bit inputs, and 32 rows spill 1100 bytes a thread.
    So do 64 keys at a time at H = 256; but bits of masks are of 64 keys.
    """
    dims = kernel_dims(spec.head_dim, spec.value_dim)
    block_kv = 32 if dims[0] > 192 and spec.is_plain else 64
    config = ForwardConfig(*dims, row_tiles=1, block_kv=block_kv, terms=split_float32.TERMS)
    wide = replace(config, warpgroups=2)
    available = smem_bytes(device)
    # Where a multiprocessor has no room for two CTAs, 8 warps of one hide each other's softmax.
    return wide if wide.smem_bytes <= available < 2 * config.smem_bytes else config


def backward_config(spec: CallSpec, device: Device) -> BackwardConfig | None:
    """Return the backward's configuration, or None if no kernel fits."""
    dims, available = kernel_dims(spec.head_dim, spec.value_dim), smem_bytes(device)
    vectors = float(device.capability) >= 9.0
    adding, storing, dq_rules = BACKWARD_CONFIGS, KEY_CONFIGS, DQ_RULES
    if terms(spec) > 1:
        adding, storing, dq_rules = SPLIT_BACKWARD_CONFIGS, SPLIT_KEY_CONFIGS, SPLIT_DQ_RULES
    candidates = []
    if not spec.deterministic:  # atomic additions to dQ have no order
        candidates += [replace(config, vector_atomics=vectors) for config in adding]
    dq = _first_that_serves(dq_rules, spec, device)
    if dq is not None:
        candidates += [replace(config, dq=_on_device(dq, device)) for config in storing]
    fitting = (
        _on_device(config, device)
        for config in candidates
        if (config.head_dim, config.value_dim) == dims and config.smem_bytes <= available
    )
    return next(fitting, None)


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    """Return why no kernel of these dims and dtype fits into the shared memory of a device, or None."""
    if terms(spec) == 1:
        return None
    if (needed := forward_config(spec, device).smem_bytes) <= smem_bytes(device):
        return None
    return (
        f"its kernel for float32 and these head dims needs {needed} bytes of shared memory, and {device.kind} has "
        f"{smem_bytes(device)}"
    )


def configure(spec: CallSpec, device: Device) -> Configuration:
    """Return the configurations of a call, and which backend forms the gradients of what scores read."""
    forward, backward = forward_config(spec, device), backward_config(spec, device)
    reason = limits.reason_of_ordered_scores(spec)
    if backward is None:
        reason = (
            f"no kernel of its backward for {spec.dtype} and these head dims fits into the {smem_bytes(device)} bytes of "
            f"shared memory of {device.kind}"
        )
    score_gradients = None if reason is None else "blockwise"
    return Configuration(forward, backward, score_gradients, reason)


def candidates(spec: CallSpec, device: Device) -> list[ForwardConfig]:
    """Return the forward configs that `autotune` tries: those of the call's head dims that the device can run."""
    if terms(spec) > 1:
        return [forward_config(spec, device)]
    dims = kernel_dims(spec.head_dim, spec.value_dim)
    rules = (rule for rule in FORWARD_RULES if rule.compiles(dims, device))
    return [_on_device(rule.config, device) for rule in rules]
