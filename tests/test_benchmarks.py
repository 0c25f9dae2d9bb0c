"""The benchmark without a GPU: what counts as right, and what is kept of a run."""

import dataclasses
import functools
import itertools
import json
import os
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from benchmarks import jobs, kernels, measure, record, rivals, run
from benchmarks.rivals import Implementation
from benchmarks.shapes import SHAPES, SHORT, SWEEP, Shape
from tests.support.tiers import slow

TINY = Shape(2, 24, 24, 4, 2, 16, True)
PREFILL = Shape(1, 8, 24, 2, 1, 16, True)


@pytest.mark.parametrize("t, s", [(16, 16), (5, 16), (16, 5), (1, 16)])
def test_flops_count_the_pairs_that_attend(t, s):
    """Causal pairs are an area: half a pair less for each query on the diagonal."""
    visible = sum(j <= i + s - t for i in range(t) for j in range(s))
    shape = Shape(2, t, s, 3, 1, 8, True)
    assert shape.forward_flops == 4 * 2 * 3 * 8 * (visible - min(t, s) / 2)
    full = dataclasses.replace(shape, causal=False)
    assert full.forward_flops == 4 * 2 * 3 * 8 * t * s
    assert full.both_flops == 3.5 * full.forward_flops


def test_flops_count_the_products_of_each_head_dim():
    shape = Shape(1, 16, 16, 1, 1, 24, False, value_dim=8)
    assert shape.forward_flops == 2 * 16 * 16 * (24 + 8)
    assert shape.both_flops == 2 * 16 * 16 * (4 * 24 + 3 * 8)
    assert [x.shape[-1] for x in measure.inputs(shape)] == [24, 24, 8, 8]


def test_the_sweep_has_the_shapes_of_the_papers():
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


def test_short_shapes_need_a_flag():
    assert all(shape.q_len < 512 for shape in SHORT.values())
    assert run.parse(["--short"]).shapes == list(SHORT) and run.parse([]).shapes is None


def attend(implementation):
    """(shape, q, k, v) -> out on a CPU."""

    def run(shape, q, k, v):
        mask = rivals.mask_of(shape)
        align = rivals.align_of(shape)
        return fa.flash_attention(q, k, v, mask=mask, align=align, implementation=implementation)

    return run


def test_each_rival_is_called_as_its_authors_intend(monkeypatch):
    calls = {}

    def fake(name, path, attribute):
        def attention(q, k, v, **options):
            calls[name] = options
            return q

        monkeypatch.setitem(sys.modules, path, types.SimpleNamespace(**{attribute: attention}))

    fake("fa3", "dew_flash_attn", "flash_mha")
    fake("tokamax", "tokamax", "dot_product_attention")
    fake("jla", "jla.ops.mosaic_gpu.attention", "flash_attention")
    mosaic = types.SimpleNamespace(attention=sys.modules["jla.ops.mosaic_gpu.attention"])
    for name, module in {"jla": mosaic, "jla.ops": mosaic, "jla.ops.mosaic_gpu": mosaic}.items():
        monkeypatch.setitem(sys.modules, name, module)
    q = k = v = jnp.zeros(1)
    rivals.IMPLEMENTATIONS["tokamax_triton"].attention(TINY, q, k, v)
    assert calls.pop("tokamax") == {"is_causal": True, "implementation": "triton"}
    for name in ("fa3", "tokamax", "jla"):
        rivals.IMPLEMENTATIONS[name].attention(TINY, q, k, v)
    assert calls == {
        "fa3": {"is_causal": True},
        "tokamax": {"is_causal": True, "implementation": "mosaic"},
        "jla": {"backward": "fused"},
    }
    with pytest.raises(NotImplementedError, match="causal only"):
        rivals.jla(dataclasses.replace(TINY, causal=False), q, k, v)


@pytest.mark.parametrize("name", ["cudnn", "tokamax", "xla"])
def test_an_unsupported_alignment_is_an_error(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", types.ModuleType("tokamax"))
    q = k = v = jnp.zeros(1)
    with pytest.raises(NotImplementedError, match="first key"):
        rivals.IMPLEMENTATIONS[name].attention(PREFILL, q, k, v)


def test_dense_scores_have_a_limit():
    q = k = v = jnp.zeros(1)
    with pytest.raises(NotImplementedError, match="34 GB"):
        rivals.xla(SHAPES["d64_s16384_c"], q, k, v)


def test_ours_is_aligned_to_the_last_key_where_that_matters():
    assert rivals.mask_of(dataclasses.replace(TINY, causal=False)) is None
    assert [rivals.align_of(shape) for shape in (TINY, PREFILL)] == ["start", "end"]


def row_of(attention, problem, iterations, backward):
    """Measure a function of q, k, v and data."""
    programs = measure.Programs.compile(attention, problem.shape, backward)
    return measure.measure_programs({"it": programs}, problem, iterations)["it"]


@pytest.fixture
def cpu(monkeypatch):
    """Implementations that a CPU runs, and a clock that needs no GPU."""
    implementations = {
        "ours": Implementation(attend("blockwise"), "pallas_fa2", "jax"),
        "dense": Implementation(attend("reference"), "jax", "jax"),
        "absent": Implementation(attend("reference"), "no_such_module", "no-such-package"),
    }
    monkeypatch.setattr(rivals, "IMPLEMENTATIONS", implementations)
    monkeypatch.setattr(measure, "total_times", lambda fn, args, n: n * [0.5 * len(args)])
    monkeypatch.setattr(measure, "matmul", lambda n: 800.0)
    monkeypatch.setattr(run, "SHAPES", {"tiny": TINY, "prefill": PREFILL})


@pytest.fixture(scope="module")
def problem():
    return measure.compile_problem(PREFILL)()


def test_a_run_on_a_cpu(cpu, tmp_path, capsys):
    path = tmp_path / "made by the run" / "cpu.json"
    run.main(["--json", str(path), "--shapes", "tiny", "--commit", "abc"])
    output = capsys.readouterr()
    assert "without absent: ModuleNotFoundError" in output.err
    saved = record.load(path)
    assert saved["setup"]["implementations"] == {"ours": fa.__version__, "dense": jax.__version__}
    assert saved["runs"][0]["commit"] == "abc" and saved["runs"][0]["matmul"] == 800.0
    assert saved["runs"][0]["shapes"] == list(saved["results"]) == ["tiny"]
    result = saved["results"]["tiny"]
    assert Shape(**result["shape"]) == TINY
    assert len(result["allowed"]) == 4 and all(1e-3 < e < 2e-2 for e in result["allowed"])
    flops = TINY.forward_flops
    for row in result["rows"].values():
        forward, both = row["forward"], row["both"]
        assert forward["ms"] == 1.5 and both["ms"] == 2.0
        assert len(forward["error"]) == 1 and len(both["error"]) == 4
        assert forward["tflops"] == pytest.approx(flops / 1.5e-3 * 1e-12, rel=1e-3)
        assert both["tflops"] == pytest.approx(3.5 * flops / 2e-3 * 1e-12, rel=1e-3)
    assert "| tiny | 0 | 0 | 1.00 |" in output.out


def wrong_out(q, k, v):
    return 1.02 * attend("reference")(PREFILL, q, k, v)


def not_a_number(q, k, v):
    return jnp.full_like(q, float("nan"))


def wrong_in_the_last_head(q, k, v):
    out = attend("reference")(PREFILL, q, k, v)
    return out.at[-1, :, -1].set(0)


@pytest.mark.parametrize("attention", [wrong_out, not_a_number, wrong_in_the_last_head])
def test_a_wrong_result_gets_no_speed(cpu, problem, attention):
    row = row_of(attention, problem, 10, backward=True)
    assert set(row) == {"forward"}
    assert row["forward"]["refused"] == "wrong result" and len(row["forward"]["error"]) == 1
    assert "tflops" not in row["forward"]


def test_a_wrong_gradient_leaves_the_forward_its_speed(cpu, problem):
    @jax.custom_vjp
    def attention(q, k, v):
        return attend("reference")(PREFILL, q, k, v)

    def forward(q, k, v):
        return jax.vjp(lambda *x: attend("reference")(PREFILL, *x), q, k, v)

    def backward(pull, dout):
        dq, dk, dv = pull(dout)
        return dq, 1.02 * dk, dv

    attention.defvjp(forward, backward)
    row = row_of(attention, problem, 10, backward=True)
    assert "tflops" in row["forward"]
    assert row["both"]["refused"] == "wrong result"
    assert [e > limit for e, limit in zip(row["both"]["error"], problem.allowed, strict=True)] == [
        False, False, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "ms, bursts",
    [
        (0.5, [1, 10, 10]),
        (11.0, [1, 2, 2, 2, 2, 2]),  # 30 milliseconds
        (40.0, [1] * 10),
    ],
)
def test_bursts_are_short_and_each_is_followed_by_a_rest(cpu, monkeypatch, problem, ms, bursts):
    """The first launch of a burst is not counted, but it warms the GPU as well."""
    burst_sizes, rests = [], []

    def totals(fn, args, n):
        burst_sizes.append(n)
        return n * [ms]

    monkeypatch.setattr(measure, "total_times", totals)
    monkeypatch.setattr(measure.time, "sleep", rests.append)
    attention = functools.partial(attend("blockwise"), problem.shape)
    assert row_of(attention, problem, 10, backward=False)["forward"]["ms"] == ms
    assert burst_sizes == bursts
    assert rests == pytest.approx([3e-3 * ms * (n + 1) for n in bursts])


def test_implementations_take_turns_and_the_median_counts(cpu, monkeypatch, problem):
    clock, order = iter([9.0, *range(1, 100)]), []

    def totals(fn, args, n):
        order.append(fn)
        return [next(clock) for _ in range(n)]

    monkeypatch.setattr(measure, "total_times", totals)
    monkeypatch.setattr(measure.time, "sleep", lambda _: None)
    both = {
        name: measure.Programs.compile(
            functools.partial(attend(name), problem.shape), problem.shape, False
        )
        for name in ("blockwise", "reference")
    }
    results = measure.measure_programs(both, problem, 2)
    a, b = (program.forward.run for program in both.values())
    assert order == [a, b, b, a, a, b]
    assert results["blockwise"]["forward"]["ms"] == 6.0  # 9, 4, 5, 6, 7
    assert results["reference"]["forward"]["ms"] == 3.0  # 1, 2, 3, 8, 9


def test_a_failing_rival_does_not_end_the_run(cpu, problem):
    def broken(q, k, v):
        raise NotImplementedError("not\n  this shape")

    expected = {"forward": {"refused": "NotImplementedError: not this shape"}}
    assert row_of(broken, problem, 10, backward=True) == expected


def test_a_dead_device_ends_the_run(cpu, problem):
    dead = [x.copy() for x in problem.args]
    for x in dead:
        x.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        row_of(wrong_out, dataclasses.replace(problem, args=tuple(dead)), 10, True)


def test_edge_heads_are_those_of_the_first_and_the_last_key_head():
    shape = Shape(3, 2, 2, 6, 3, 1, False, bias=True)
    queries = jnp.arange(3.0 * 2 * 6).reshape(3, 2, 6, 1)
    bias = jnp.arange(6.0 * 2 * 2).reshape(1, 6, 2, 2)
    results = measure.edge_heads((queries, queries[:, :, :3], queries, queries, bias), shape)
    assert results[0][2, 1, :, 0].tolist() == [30, 31, 34, 35]
    assert results[1][0, 1, :, 0].tolist() == [6, 8]
    assert results[4][0, :, 1, 1].tolist() == [3, 7, 19, 23]


def cell(tflops, work=1.0, errors=1):
    ms = work / tflops
    return {"tflops": tflops, "ms": ms, "first_call_s": 1.0, "error": [2e-3] * errors}


def row(tflops):
    return {"forward": cell(tflops), "both": cell(0.8 * tflops, 3.5, 4)}


def result(shape, **speeds):
    """Return a result like that of `measure.measure`; None stands for no speed."""
    refused = {"forward": {"refused": "NotImplementedError: no"}}
    rows = {name: refused if x is None else row(x) for name, x in speeds.items()}
    fields = dataclasses.asdict(shape) | {"documents": list(shape.documents)}
    return {"shape": fields, "allowed": [4e-3] * 4, "rows": rows}


@pytest.fixture
def measured(cpu, monkeypatch):
    """The shapes that were measured; one that is among `fatal` ends the process instead."""
    visible = types.SimpleNamespace(shapes=[], fatal=None)

    def fake(shape, implementations, iterations, backward):
        if shape == visible.fatal:
            raise KeyboardInterrupt
        visible.shapes.append(shape)
        return result(shape, ours=500.0, dense=400.0)

    monkeypatch.setattr(measure, "measure", fake)
    return visible


def test_results_are_written_after_every_shape_and_resumed(measured, tmp_path):
    path, more = tmp_path / "cut.json", tmp_path / "more.json"
    measured.fatal = PREFILL
    with pytest.raises(KeyboardInterrupt):
        run.main(["--json", str(path)])
    assert list(record.load(path)["results"]) == ["tiny"]
    measured.fatal = None
    run.main(["--resume", str(path), "--json", str(more)])
    assert measured.shapes == [TINY, PREFILL]
    saved = record.load(more)
    assert list(saved["results"]) == ["tiny", "prefill"]
    assert [r["shapes"] for r in saved["runs"]] == [["tiny"], ["prefill"]]
    assert list(record.load(path)["results"]) == ["tiny"]
    run.main(["--resume", str(path)])
    assert list(record.load(path)["results"]) == ["tiny", "prefill"]
    run.main(["--resume", str(path)])  # nothing is missing
    assert len(measured.shapes) == 3 and len(record.load(path)["runs"]) == 2


@pytest.mark.parametrize("what", ["device", "sources", "iterations", "implementations"])
def test_results_of_another_setup_are_not_extended(measured, tmp_path, what):
    path = tmp_path / "other.json"
    run.main(["--json", str(path), "--shapes", "tiny"])
    saved = record.load(path)
    saved["setup"][what] = "another"
    record.write(path, saved)
    with pytest.raises(ValueError, match=f"`{what}` .*another"):
        run.main(["--resume", str(path)])
    assert record.load(path) == saved


def test_a_budget_ends_the_run_early(measured, tmp_path, capsys):
    path = tmp_path / "some.json"
    run.main(["--json", str(path), "--budget", "-1"])
    assert measured.shapes == [] and not path.exists()
    assert "for lack of time: tiny, prefill" in capsys.readouterr().out
    run.main(["--json", str(path), "--budget", "100"])
    assert len(measured.shapes) == 2


def hold_the_turn(name):
    """When it began and ended, in whose process."""
    with measure.Gpu.lock:
        begun = time.monotonic()
        time.sleep(0.2)
        return os.getpid(), begun, time.monotonic()


@pytest.mark.slow
def test_processes_take_turns():
    results = dict(jobs.run_all(hold_the_turn, ["a", "b", "c"], 2))
    assert set(results) == {"a", "b", "c"}
    pids, *_ = zip(*results.values(), strict=True)
    assert len({os.getpid(), *pids}) == 4
    spans = sorted((begun, ended) for _, begun, ended in results.values())
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def fail(name):
    raise RuntimeError(name)


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_a_failure_in_a_process_ends_the_run(processes):
    with pytest.raises(RuntimeError, match="a"):
        list(jobs.run_all(fail, ["a"], processes))


@pytest.mark.slow
def test_no_process_starts_after_the_end():
    assert list(jobs.run_all(fail, ["a", "b"], 2, time.monotonic())) == []


def test_only_a_full_run_has_a_default_file(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    run.main(["--shapes", "tiny"])
    run.main(["--rivals", "dense"])
    assert list(tmp_path.iterdir()) == []
    run.main([])
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.json"]
    assert record.default_path("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


def test_unknown_names_are_errors(cpu, capsys):
    with pytest.raises(SystemExit):
        run.main(["--shapes", "tiny,huge"])
    assert "['huge'] not among ['tiny', 'prefill']" in capsys.readouterr().err


def test_a_row_is_a_line_of_the_file(tmp_path):
    saved = {"results": {"tiny": result(TINY, ours=1.0, dense=None)}, "odd": 'a "{" and [ ] }'}
    record.write(tmp_path / "x.json", saved)
    assert record.load(tmp_path / "x.json") == saved
    lines = [line.strip(" ,") for line in (tmp_path / "x.json").read_text().splitlines()]
    forward, both = (line for line in lines if '"tflops"' in line)
    assert json.loads(f"{{{forward}}}") == {"forward": row(1.0)["forward"]}
    assert json.loads(f"{{{both}}}") == {"both": row(1.0)["both"]}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_the_digest_is_of_the_sources(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("a = 1\n")
    monkeypatch.setattr(fa, "__file__", str(package / "__init__.py"))
    one = record.sources()
    assert record.sources() == one
    (package / "__init__.py").write_text("a = 2\n")
    assert record.sources() != one


def test_the_forward_alone(cpu, problem):
    assert set(row_of(functools.partial(attend("reference"), PREFILL), problem, 10, False)) == {
        "forward"
    }


def test_kernels_of_implementations_that_support_the_shape(cpu, monkeypatch, capsys):
    def launches(fn, args, iterations):
        raise ValueError("only tiny heads")

    monkeypatch.setattr(kernels, "kernel_times", launches)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    kernels.main(["tiny"])
    assert capsys.readouterr().out == "tiny, ours: ValueError: only tiny heads\n"


def test_a_dead_device_ends_the_breakdown_too(cpu, monkeypatch):
    def launches(fn, args, iterations):
        args[0].delete()
        raise ValueError("a fault")

    monkeypatch.setattr(kernels, "kernel_times", launches)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    with pytest.raises(RuntimeError, match="deleted"):
        kernels.main(["tiny"])


def test_time_by_kernels(cpu, monkeypatch, capsys):
    def launches(fn, args, iterations):
        assert jax.eval_shape(fn, *args)[0].shape == args[0].shape
        rest = [("tiny", 0.0005), ("attention", 0.05)]
        return [[("attention", 0.1 * i), *rest] for i in range(1, iterations + 1)]

    monkeypatch.setattr(kernels, "kernel_times", launches)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    kernels.main(["tiny", "--iterations", "3"])
    assert capsys.readouterr().out.splitlines() == [
        "tiny, ours: 250 us",
        "     250.0  attention",
        "       0.5  others",
    ]
