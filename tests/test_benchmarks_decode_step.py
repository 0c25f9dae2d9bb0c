"""The benchmark of a whole decode step: one program for all lengths, whose kernels are told apart by name."""

import pytest

from benchmarks import decode_step
from benchmarks.decode_step import Sizes


def test_a_step_is_one_program_and_its_kernels_are_grouped(monkeypatch):
    kernels = [("decode_mosaic_gpu_kernel", 4.0), ("nvjet_tst_64x8", 8.0), ("loop_add_fusion", 1.0)]

    def kernel_times(run, args, count):
        run(*args)
        return [kernels] * count

    monkeypatch.setattr(decode_step, "kernel_times", kernel_times)
    sizes = Sizes(layers=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48)
    result = decode_step.report(sizes, batch=2, length=64, steps=2)
    ours = result["with_attention"]
    assert (ours["attention"], ours["matmul"], ours["others"]) == (4.0, 8.0, 1.0)
    assert result["beyond"] == pytest.approx(ours["step"] / 12 - 1, abs=1e-3)
