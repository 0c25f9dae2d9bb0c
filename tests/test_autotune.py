"""The fastest kernel of those measured serves the calls that follow."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.sm80 import configs as sm80_configs
from pallas_fa2.backends.sm90 import configs
from pallas_fa2.parse_call import parse_call
from pallas_fa2.planning import autotune, plan, tuned
from tests.support import gpus
from tests.support.hopper import H200


@pytest.fixture
def measured(monkeypatch):
    """Kernels of an H200, of which later ones are faster; nothing runs."""
    times = iter(range(100, 0, -1))
    monkeypatch.setattr(tuned, "CONFIGS", {})
    monkeypatch.setattr(autotune, "device_of", lambda array: H200)
    monkeypatch.setattr(autotune, "median_ms", lambda fn, args, n: float(next(times)))


def inputs(head_dim, length=256):
    return (jnp.zeros((2, 3, length, 4, head_dim), jnp.bfloat16),) * 3


def planned(x, **options):
    spec, _ = parse_call(x, x, x, **options)
    return plan.make_plan(spec, H200).forward


@pytest.mark.parametrize("head_dim, kernels", [(64, 2), (80, 2), (128, 1), (256, 1)])
@pytest.mark.parametrize("mask", [None, fa.Causal()])
def test_the_fastest_is_used_for_the_same_call_afterwards(measured, head_dim, kernels, mask):
    x, *_ = inputs(head_dim)
    other, *_ = inputs(head_dim, 128)
    default, of_other = planned(x, mask=mask), planned(other, mask=mask)
    tuning = fa.autotune(x, x, x, mask=mask)
    assert len(tuning.times) == kernels * (1 if mask is None else len(configs.L2_BUDGETS))
    assert default in dict(tuning.times)
    assert [ms for _, ms in tuning.times] == sorted(ms for _, ms in tuning.times)
    assert planned(x, mask=mask) == tuning.best == tuning.times[0][0]
    assert planned(other, mask=mask) == of_other


def test_deterministic_gradients_do_not_change_the_tuning_key(measured):
    x, *_ = inputs(64)
    default = planned(x, deterministic_gradients=True)
    tuning = fa.autotune(x, x, x)
    assert planned(x, deterministic_gradients=True) == tuning.best != default
    tuned.CONFIGS.clear()
    tuning = fa.autotune(x, x, x, deterministic_gradients=True)
    assert planned(x) == tuning.best != default
    assert planned(x, scale=0.5) == default


OPTIONS = {
    "is_causal": True,
    "score": fa.soft_cap(3.0),
    "scale": 0.3,
    "sinks": jnp.zeros(4),
    "dropout_rate": 0.1,
    "dropout_rng": jax.random.key(0),
    "align": "end",
    "q_positions": jnp.arange(256) + 1,
    "kv_positions": jnp.arange(256),
    "deterministic_gradients": True,
    "implementation": "fused",
    "mask": fa.Window(5),
}


def test_autotune_takes_every_argument_of_the_call(measured):
    assert set(OPTIONS) == set(fa.Options.__annotations__)
    x, *_ = inputs(64)
    for left_out in ("align", "q_positions"):  # not both at once
        options = {name: value for name, value in OPTIONS.items() if name != left_out}
        tuning = fa.autotune(x, x, x, return_lse=True, **options)
        described = {n: y for n, y in options.items() if n not in ("sinks", "implementation")}
        assert planned(x, **described) == tuning.best


def test_the_table_lists_the_measurements(measured):
    text = str(fa.autotune(*inputs(64), mask=fa.Causal()))
    assert "NVIDIA H200" in text and "bfloat16" in text
    assert text.count(" ms  ForwardConfig(") == 2 * len(configs.L2_BUDGETS)


def test_a_call_without_fused_kernels_is_an_error():
    x = jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="does not support this call: it needs a Hopper GPU"):
        fa.autotune(x, x, x)


def test_a_backend_without_candidates_is_an_error():
    x = jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
    with pytest.raises(
        ValueError, match=r"implementation must be one whose kernels .*'blockwise'.*; leave"
    ):
        fa.autotune(x, x, x, implementation="blockwise")


@pytest.mark.parametrize("options", [{"is_causal": True}, {"score": fa.soft_cap(3.0)}], ids=str)
def test_configurations_are_saved_and_loaded(measured, tmp_path, options):
    x, *_ = inputs(64)
    default = planned(x, **options)
    tuning = fa.autotune(x, x, x, **options)
    fa.save_autotuned(tmp_path / "tuned.json")
    tuned.CONFIGS.clear()
    assert planned(x, **options) == default != tuning.best
    assert fa.load_autotuned(tmp_path / "tuned.json") == 1
    assert planned(x, **options) == tuning.best
    assert planned(inputs(64, 128)[0], **options) != tuning.best
    assert planned(x, score=fa.soft_cap(2.0)) != tuning.best


def test_a_key_of_a_call_is_the_same_in_every_process():
    code = """
        import jax.numpy as jnp, pallas_fa2 as fa
        from pallas_fa2.parse_call import parse_call
        from pallas_fa2.planning.tuned import tuning_key
        x = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
        mask = fa.mask_fn(lambda q, k: q.index >= k.index + 1)
        spec, _ = parse_call(x, x, x, mask=mask, score=fa.soft_cap(3.0))
        print(tuning_key(spec, fa.Device()))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    keys = {
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"format": 0, "configs": []}', '{"format": 1, "configs": [{"backend": "blockwise", "call": "x", "config": {}}]}',
     '{"format": 1, "configs": [{"backend": "hopper", "call": "x", "config": {"depth": 3}}]}'],
)  # fmt: skip
def test_other_files_are_errors(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"other\.json must be a file of save_autotuned.*; measure again"
    ):
        fa.load_autotuned(path)


@pytest.mark.parametrize("dtype, blocks", [(jnp.float32, [64]), (jnp.bfloat16, [128, 64])])
def test_candidates_fit_shared_memory_with_pairwise_arrays(dtype, blocks):
    x = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.bfloat16)
    call, _ = parse_call(x, x, x, score=fa.bias(jnp.zeros((256, 256), dtype)))
    assert [config.block_kv for config in configs.candidates(call, H200)] == blocks


def test_calls_with_only_a_mask_may_use_plain_kernels():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    kernels = {
        name: [
            config.warpgroups for config in configs.candidates(parse_call(x, x, x, **o)[0], H200)
        ]
        for name, o in {
            "mask": {"mask": fa.Window(3)},
            "array": {"mask": fa.Dense(jnp.ones((256, 256), bool))},
            "score": {"score": fa.soft_cap(2.0)},
            "both": {"mask": fa.Window(3), "score": fa.soft_cap(2.0)},
        }.items()
    }
    assert kernels == {
        "mask": [2, 3, 2, 2],
        "array": [2, 2, 2],  # there are whole tiles of 128 queries
        "score": [2, 2],
        "both": [2, 2],
    }


@pytest.mark.parametrize("head_dim, kernels", [(64, 3), (96, 2), (128, 2), (256, 2)])
def test_ampere_has_candidates_that_are_saved_and_loaded(measured, tmp_path, head_dim, kernels):
    x, *_ = inputs(head_dim)
    spec, _ = parse_call(x, x, x, is_causal=True)
    default = plan.make_plan(spec, H200, "ampere").forward
    tuning = fa.autotune(x, x, x, is_causal=True, implementation="ampere")
    assert len(tuning.times) == kernels and default in dict(tuning.times)
    fa.save_autotuned(tmp_path / "tuned.json")
    tuned.CONFIGS.clear()
    assert fa.load_autotuned(tmp_path / "tuned.json") == 1
    assert plan.make_plan(spec, H200, "ampere").forward == tuning.best != default


def test_candidates_of_ampere_are_those_that_a_gpu_can_run():
    x = jax.ShapeDtypeStruct((1, 256, 2, 256), jnp.bfloat16)
    call, _ = parse_call(x, x, x)
    for capability, count in (("8.0", 2), ("8.9", 1), ("9.0", 2), ("10.0", 2)):
        assert len(sm80_configs.candidates(call, gpus.device(capability))) == count


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["hopper", "ampere"])
def test_every_candidate_runs(monkeypatch, implementation):
    monkeypatch.setattr(tuned, "CONFIGS", {})
    x = jax.random.normal(jax.random.key(0), (2, 512, 4, 64), jnp.bfloat16)
    options = {"mask": fa.Causal(), "implementation": implementation}
    tuning = fa.autotune(x, x, x, iterations=3, **options)
    assert all(ms > 0 for _, ms in tuning.times)


@pytest.mark.parametrize("iterations", [1, 3])
def test_times_are_those_of_all_kernels(monkeypatch, iterations):
    from jax.experimental.mosaic.gpu import profiler

    def measure(fn, *, aggregate, iterations):
        each = [[("one", 0.5 * i), ("other", 0.25)] for i in range(1, iterations + 1)]
        return lambda *args: (fn(*args), each[0] if iterations == 1 else each)

    monkeypatch.setattr(profiler, "measure", measure)
    expected = {1: 0.75, 3: 1.25}[iterations]
    assert autotune.median_ms(lambda x: x, (1,), iterations) == expected
