"""The benchmark without a GPU: what counts as right, what is kept of a run, what is made of it."""

import dataclasses

import pytest

from benchmarks.shapes import SHAPES, SWEEP, Shape


@pytest.mark.parametrize("t, s", [(16, 16), (5, 16), (16, 5), (1, 16)])
def test_flops_count_the_pairs_that_see_each_other(t, s):
    """As an area: half a pair less for each query on the diagonal."""
    seen = sum(j <= i + s - t for i in range(t) for j in range(s))
    shape = Shape(2, t, s, 3, 1, 8, True)
    assert shape.forward_flops == 4 * 2 * 3 * 8 * (seen - min(t, s) / 2)
    full = dataclasses.replace(shape, causal=False)
    assert full.forward_flops == 4 * 2 * 3 * 8 * t * s


def test_the_sweep_is_that_of_the_papers():
    assert len(SWEEP) == 36
    for name, shape in SWEEP.items():
        assert shape.batch * shape.q_len == 16384 and shape.q_heads * shape.head_dim == 2048
        assert name == f"d{shape.head_dim}_s{shape.kv_len}_{'c' if shape.causal else 'f'}"
    square = SWEEP["d128_s8192_c"]
    assert square.forward_flops == 4 * 2 * 8192**2 * 2048 / 2


def test_shapes_off_the_sweep():
    rest = [shape for name, shape in SHAPES.items() if name not in SWEEP]
    assert {3000, 4097} <= {shape.q_len for shape in rest}
    assert any(shape.kv_heads == 1 for shape in rest) and any(s.head_dim == 96 for s in rest)
    assert {s.causal for s in rest if s.q_len != s.kv_len} == {True, False}
