"""The mma.sync kernels, compiled for GPUs from Ampere to Blackwell without one.

Mosaic keeps the first architecture of a process, so each has one of its own.
"""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from pallas_fa2.backends.sm80 import configs
from tests.support import gpus
from tests.support.portable_gate import CALLS, CANDIDATES
from tests.support.tiers import slow

# Bytes that a thread stores and loads: of constants of a loop most of all, a few times in a step of hundreds of
# instructions. ptxas 13.0 needs more registers for Blackwell.
MAX_SPILL_BYTES = {"8.0": 450, "8.6": 450, "8.9": 450, "9.0": 450, "10.0": 900, "12.0": 900}
# Of float32 inputs: 624 under a general mask at H = 128 on 8.6, 544 at H = 256 on 8.0. S and P have twice the registers.
MAX_SPILL_BYTES_FLOAT32 = {x: max(700, most) for x, most in MAX_SPILL_BYTES.items()}
# For `make test`: both kinds of shared memory, all branches of a step.
QUICK = {"8.0": ("h128_128", "scored", "documents", "deterministic_128", "float32_h128")}


def _compiled(name: str, capability: str) -> bool:
    """Return whether a call or a candidate of `autotune` has kernels on such a GPU."""
    device = gpus.device(capability)
    if name in CANDIDATES:
        dims, forward = CANDIDATES[name].dims, CANDIDATES[name].forward
        return any(r.config == forward and r.compiles(dims, device) for r in configs.FORWARD_RULES)
    # The backward at (256, 256), and float32 beyond H = 128, take more than 100 KB of shared memory.
    most = 128 if CALLS[name].dtype == jnp.float32 else 192
    return max(CALLS[name].dims) <= most or gpus.GPUS[capability].smem_per_block > 160_000


def _kernels(name: str) -> list[str]:
    if name in CANDIDATES or CALLS[name].dtype == jnp.float32:
        return ["attention"]
    return ["attention", "attention_gradients"] + ["attention_dq"] * name.startswith(
        "deterministic"
    )


@pytest.mark.parametrize(
    "capability, calls",
    [*QUICK.items(), *(slow(capability, (*CALLS, *CANDIDATES)) for capability in gpus.GPUS)],
    ids=str,
)
def test_kernels_compile(capability: str, calls: tuple[str, ...]) -> None:
    environment = {**os.environ, "PALLAS_FA2_GATE": capability, "JAX_PLATFORMS": "cpu"}
    calls = tuple(name for name in calls if _compiled(name, capability))
    command = [sys.executable, "-m", "tests.support.portable_gate", *calls]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {(x["call"], x["kernel"]) for x in kernels} == {
        (name, kernel) for name in calls for kernel in _kernels(name)
    }
    for kernel in kernels:
        assert kernel["smem_bytes"] <= gpus.GPUS[capability].smem_per_block, kernel
        is_float32 = CALLS[kernel["call"]].dtype == jnp.float32
        bounds = MAX_SPILL_BYTES_FLOAT32 if is_float32 else MAX_SPILL_BYTES
        assert kernel["spill_bytes"] <= bounds[capability], kernel
