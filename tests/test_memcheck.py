"""No garbage in a cache's lengths, tables and starts makes a kernel read or write outside of its arrays:
compute-sanitizer watches `tests/support/bad_caches.py` on a GPU.

Each process has a few programs, because the sanitizer died after some 12 (CUDA 13.0).
"""

import os
import shutil
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pallas_fa2.backends.common.primitives import launch
from tests.support import bad_caches, compile_gate, hopper

FOUND = 9


def memcheck(*arguments: str) -> subprocess.CompletedProcess:
    tool = shutil.which("compute-sanitizer")
    assert tool, "these tests need compute-sanitizer, of NVIDIA's CUDA toolkit, on the path"
    # Arrays have memory of their own then, and are no parts of one that XLA divides.
    environment = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "PALLAS_FA2_CACHE": "0"}
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), "--print-limit", "3"]
    command += [sys.executable, "-m", "tests.support.bad_caches", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", bad_caches.CASES)
@pytest.mark.parametrize("kernel", bad_caches.KERNELS)
def test_garbage_is_read_and_written_nowhere_else(kernel: str, case: str) -> None:
    result = memcheck(kernel, case)
    assert result.returncode == 0 and "done" in result.stdout, result.stdout[-3000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout + result.stderr


@pytest.mark.gpu
def test_a_read_past_the_end_is_found() -> None:
    assert memcheck("planted", "").returncode == FOUND


def test_the_read_past_the_end_compiles() -> None:
    arrays = jnp.zeros(128, jnp.int32), jnp.zeros(1, jnp.int32)
    assert compile_gate.compile_for_h200(bad_caches.read_beyond, *arrays)


@pytest.mark.parametrize("kernel", bad_caches.KERNELS)
def test_kernels_read_the_caches(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is refused, and none is computed otherwise."""
    monkeypatch.setattr(bad_caches, "execute", jax.eval_shape)
    launched = mock.Mock(wraps=launch.build_kernel)
    monkeypatch.setattr("pallas_fa2.backends.common.decode.launch.build_kernel", launched)
    with hopper.planned_for_h200():
        for case in bad_caches.CASES:
            launched.reset_mock()
            (kv, options), *_ = bad_caches.calls(kernel, case)
            bad_caches.attend(kernel, kv, **options)
            assert "decode" in str(launched.call_args_list), case
