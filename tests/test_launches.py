"""Launches are lowered once, their kernels compiled in threads or loaded, and never taken for those of another call."""

import concurrent.futures
import contextlib
import dataclasses
import importlib.metadata
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode import cached_forward
from pallas_fa2.backends.sm90 import backend
from pallas_fa2.compilation import environment, kernels, launches, store
from pallas_fa2.compilation.kernels import Kernel
from tests.support import compile_gate
from tests.support.hopper import H200, arrays, attend_and_differentiate, planned_for
from tests.support.program_keys import CALLS, kernel_hashes
from tests.support.tiers import slow

CAUSAL = fa.Causal()


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    with mock.patch.object(launches, "_programs", {}):
        jax.clear_caches()  # of the outer programs, which hold launches
        yield
        jax.clear_caches()


@pytest.fixture
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Compiled:
    """What stands for a kernel's `Compilation` where no compiler is needed."""

    made: list["Compiled"]

    def __init__(self, kernel: Kernel, device: Any, serialized: Any = None) -> None:
        self.kernel, self.serialized, self.seconds = kernel, serialized, 0.0
        self.was_loaded = serialized is not None
        self.made.append(self)

    def wait(self) -> Any:
        return self


@pytest.fixture
def compilations() -> Iterator[list[Compiled]]:
    """No kernel is compiled; the list has those that would be."""
    Compiled.made = []

    def serialize(executable: Any) -> tuple:
        return executable.kernel.hash, None, None

    with (
        mock.patch.object(launches, "Compilation", Compiled),
        mock.patch.object(launches.serialize_executable, "serialize", serialize),
    ):
        yield Compiled.made


@contextlib.contextmanager
def described(num_sms: int = 132) -> Iterator[Any]:
    """Calls inside are planned and compiled for the one GPU of a described host."""
    device = compile_gate.h200s(1)[0]
    with (
        planned_for(H200._replace(num_sms=num_sms)),
        launches.compiled_for(device),
        jax.default_device(device),
        mock.patch.object(jax, "device_count", return_value=1),
    ):
        yield device


def lower(run: Callable, *args: Any) -> jax.stages.Lowered:
    """Lower a new program, as a new process would if `launches` remembers nothing."""
    jax.clear_caches()
    with described():
        return jax.jit(lambda *x: run(*x)).trace(*args).lower(lowering_platforms=("cuda",))


def new_process() -> None:
    launches._programs.clear()


def short(length: int = 64, heads: int = 2) -> list:
    return arrays(length, length, (64, 64), n=heads)


def hashes(compilations: list) -> list[bytes]:
    found = [x.kernel.hash for x in compilations]
    compilations.clear()
    return found


def test_a_second_program_traces_no_kernel_again(compilations: list) -> None:
    with mock.patch.object(backend, "attention", wraps=backend.attention) as forwards:
        first = lower(CALLS["both"], *short())
        assert forwards.call_count == 1 and len(compilations) > 1
        second = lower(CALLS["forward"], *short())
        assert forwards.call_count == 1
    assert kernel_hashes(second) == kernel_hashes(first)[:1]


def test_a_host_without_a_gpu_runs_the_launch_itself() -> None:
    """Interpreters and the compile gate see it."""

    def launch(x: jax.Array) -> jax.Array:
        return x + 1

    key = launches.LaunchKey("name", (), "")
    assert "await_kernels" not in str(jax.make_jaxpr(launches.reusable(launch, key))(1.0))


def test_a_launch_in_a_scan_and_twice_in_a_program_is_one(compilations: list) -> None:
    def layers(q: Any, k: Any, v: Any, _: Any) -> Any:
        def layer(q: Any, _: Any) -> Any:
            return fa.flash_attention(q, k, v, mask=CAUSAL), None

        q, _ = jax.lax.scan(layer, q, None, length=3)
        return layer(layer(q, None)[0], None)[0]

    lowered = lower(layers, *short())
    assert len(compilations) == 1 and len(set(kernel_hashes(lowered))) == 1


def test_on_several_gpus_the_launch_of_a_shard_is_compiled() -> None:
    """The launch of all heads is traced for its shapes alone; the user's mesh is not that of the small programs."""
    gpus = np.array(compile_gate.h200s(2))
    mesh = jax.sharding.Mesh(gpus, ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "x"))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in short(heads=4)]
    default = jax.default_device(gpus[0])
    with planned_for(H200), launches.compiled_for(gpus[0]), default, jax.set_mesh(mesh):
        lowered = jax.jit(lambda *x: CALLS["forward"](*x)).trace(*args).lower()
        assert not launches._programs
        lowered.compile()
    (program,) = launches._programs.values()
    assert isinstance(program, launches._Program)
    assert [x.shape for x in program._exported.in_avals] == [(2, 64, n, 64) for n in (2, 1, 1)]


@pytest.mark.parametrize("name", ["forward", slow("both")])
def test_kernels_have_the_machine_code_that_they_have_without(name: str) -> None:
    """`jax.export` may write another version of Mosaic's operations."""

    def code() -> list[tuple]:
        reports = compile_gate.compile_for_h200(CALLS[name], *short())
        found = [
            (x.name, x.registers, x.smem_bytes, tuple(sorted(x.sass.items()))) for x in reports
        ]
        return sorted(found)

    with planned_for(H200):
        plain = code()
    jax.clear_caches()
    with described():
        assert code() == plain and launches._programs


def test_small_programs_compile_the_kernels_of_the_program() -> None:
    """XLA's plugin does not compile again what a thread has compiled."""
    lowered = lower(CALLS["forward"], *short(192))
    ((signature, program),) = launches._programs.items()
    (kernel,) = kernels.kernels_of(program._exported.call, signature.structs)  # type: ignore[attr-defined]
    device = compile_gate.h200s(1)[0]
    compilation = kernels.Compilation(kernel, device)
    assert compilation.wait() is not None
    assert kernel_hashes(lowered) and compilation.seconds < 0.5, "it was compiled before"


def test_a_stored_launch_is_neither_traced_nor_compiled(
    directory: pathlib.Path, compilations: list
) -> None:
    first = lower(CALLS["both"], *short())
    text = first.as_text()
    assert len(store.files()) == 2 and not any(x.was_loaded for x in compilations)
    compilations.clear()
    new_process()
    with (
        mock.patch.object(backend, "attention", side_effect=AssertionError),
        mock.patch.object(backend, "gradients", side_effect=AssertionError),
    ):
        loaded = lower(CALLS["both"], *short())
    assert loaded.as_text() == text, "JAX's own cache finds it"
    assert kernel_hashes(loaded) == kernel_hashes(first)
    assert all(x.was_loaded and x.serialized[0] == x.kernel.hash for x in compilations)


@pytest.mark.parametrize("options", [{}, slow({"paged": True}), slow({"packed": True})])
def test_a_stored_launch_for_decoding_is_neither_traced_nor_compiled(
    options: dict, directory: pathlib.Path, compilations: list
) -> None:
    def layers(q: Any, *args: Any) -> Any:
        out = [decode(CAUSAL, **options)(x, *args) for x in (q, q + 1)]
        return out[0] + out[1]

    first = lower(layers, *short())
    assert len(store.files()) == len(compilations) == 1
    assert len(set(kernel_hashes(first))) == 1
    new_process()
    with mock.patch.object(cached_forward, "plan_decode", side_effect=AssertionError):
        loaded = lower(layers, *short())
    assert loaded.as_text() == first.as_text()
    assert [x.was_loaded for x in compilations] == [False, True]


def test_layers_share_the_plan_of_a_decode_launch() -> None:
    """XLA inlines the launch: it makes the tables of packed queries once for layers of the same lengths, and copies no
    cache."""

    def layers(q: Any, caches: list, lengths: Any, starts: Any) -> Any:
        for k in caches:
            q = fa.cached_attention(q, fa.Cache(k, k, lengths), queries=fa.Packed(starts))
        return q

    def entry(count: int) -> str:
        with described() as device:
            sharding = jax.sharding.SingleDeviceSharding(device)

            def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

            cache = array(jnp.bfloat16, 2, 256, 2, 64)
            integers = array(jnp.int32, 2), array(jnp.int32, 3)
            args = array(jnp.bfloat16, 3, 4, 64), [cache] * count, *integers
            program = jax.jit(lambda *x: layers(*x), out_shardings=sharding)
            text = program.lower(*args).compile().as_text() or ""
        assert launches._programs
        return text[text.index("ENTRY") :]

    one, two = entry(1), entry(2)
    assert (one.count("custom-call("), two.count("custom-call(")) == (1, 2)
    assert one.count(" fusion(") == two.count(" fusion(") > 0
    assert " copy(" not in two


def test_an_executable_that_cannot_be_loaded_is_compiled(
    directory: pathlib.Path, compilations: list
) -> None:
    """A described GPU can load none, and one of another driver may not."""
    lower(CALLS["forward"], *short())
    kernel = compilations[0].kernel
    device = compile_gate.h200s(1)[0]
    compilation = kernels.Compilation(kernel, device, (b"no pickle", None, None))
    assert compilation.wait() is not None and not compilation.was_loaded


def replaced(module: bytes, kernel: Kernel) -> Kernel:
    return Kernel(tuple((n, module if n == "module" else x) for n, x in kernel.attributes))


def test_a_kernel_whose_hash_is_not_of_its_module_is_not_used(
    directory: pathlib.Path, compilations: list
) -> None:
    """The plugin compares hashes alone: a wrong one would run the kernel of another call."""
    lower(CALLS["forward"], *short())
    compilations.clear()
    new_process()
    kernels_of = kernels.kernels_of

    def forged_once(*args: Any) -> list[Kernel]:
        forged.append([replaced(b"another module", x) for x in kernels_of(*args)])
        return forged[0] if len(forged) == 1 else kernels_of(*args)

    forged: list = []
    with mock.patch.object(launches, "kernels_of", forged_once):
        lower(CALLS["forward"], *short())
    assert len(forged) == 2, "it was read, and then lowered"
    assert [x.was_loaded for x in compilations] == [False]


def test_an_entry_with_other_kernels_is_not_used(
    directory: pathlib.Path, compilations: list
) -> None:
    lower(CALLS["forward"], *short())
    read = store.read

    def without_kernels(key: str) -> Any:
        entry = read(key)
        return entry and entry._replace(kernels={})

    compilations.clear()
    new_process()
    with mock.patch.object(store, "read", without_kernels):
        lower(CALLS["forward"], *short())
    assert [x.was_loaded for x in compilations] == [False]


@pytest.mark.parametrize(
    "failing", [store.pickle.UnpicklingError("x"), MemoryError(), OSError(5, "I/O")]
)
def test_a_store_that_fails_is_no_store(
    failing: BaseException, directory: pathlib.Path, compilations: list
) -> None:
    first = kernel_hashes(lower(CALLS["forward"], *short()))
    new_process()
    compilations.clear()
    with mock.patch.object(store.pickle, "loads", side_effect=failing):
        assert kernel_hashes(lower(CALLS["forward"], *short())) == first
    assert [x.was_loaded for x in compilations] == [False]


def test_a_launch_that_cannot_be_exported_is_called_as_it_is(
    compilations: list, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(launches.export, "export", side_effect=ValueError("no")):
        lowered = lower(CALLS["forward"], *short())
    assert not compilations and len(kernel_hashes(lowered)) == 1
    assert not launches._programs, "the launch holds arrays that are traced"
    lower(CALLS["forward"], *short())
    assert compilations and launches._programs


def test_the_least_recently_used_launch_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_MAX_LAUNCHES", 2)
    with described():
        for name in ("a", "b", "a", "c"):
            key = launches.LaunchKey(name, (), "")
            jax.eval_shape(launches.reusable(lambda x: x + 1, key), 1.0)
    assert [signature.key.name for signature in launches._programs] == ["a", "c"]


def test_threads_share_the_launches_that_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that lower one launch, both use the program that was lowered first."""
    inside = threading.Barrier(2, timeout=30)
    made, used = [], []

    def make(launch: Callable, signature: Any) -> Callable:
        inside.wait()  # neither thread finds the program of the other one

        def program(x: Any) -> Any:
            used.append(program)
            return x

        made.append(program)
        return program

    monkeypatch.setattr(launches, "_make", make)
    call = launches.reusable(lambda x: x, launches.LaunchKey("name", (), ""))

    def run() -> None:
        with launches.compiled_for("a device"):
            call(1.0)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run) for _ in range(2)]:
            future.result()
    assert len(made) == 2 and used[0] is used[1] and [*launches._programs.values()] == used[:1]


def soft_cap(cap: float) -> Callable:
    return lambda q, k, v, _: fa.flash_attention(q, k, v, score=fa.soft_cap(cap))


def decode(mask: Any, paged: bool = False, packed: bool = False) -> Callable:
    """Two sequences with one new token each, on caches of k and v."""
    table: Any = np.array([[1], [0]])
    lengths: Any = np.array([40, 64], np.int32)

    def run(q: Any, k: Any, v: Any, _: Any) -> Any:
        queries = fa.Packed(jnp.arange(3, dtype=jnp.int32)) if packed else None
        cache = fa.Pages(k, v, table, lengths) if paged else fa.Cache(k, v, lengths)
        query = q[:, 0] if packed else q[:, :1]
        return fa.cached_attention(query, cache, mask=mask, queries=queries)

    return run


def masked(mask: Any, **options: Any) -> Callable:
    return lambda q, k, v, _: fa.flash_attention(q, k, v, mask=mask, **options)


def score_gradients(argument: int) -> Callable:
    def run(q: Any, k: Any, v: Any, _: Any) -> Any:
        slopes, bias = jnp.ones(2), jnp.ones((1, 2, 64, 64), jnp.bfloat16)

        def loss(slopes: Any, bias: Any) -> Any:
            out = fa.flash_attention(q, k, v, score=(fa.alibi(slopes), fa.bias(bias)))
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, argument)(slopes, bias)

    return run


CALLED: dict[str, Callable] = {
    "causal": masked(CAUSAL),
    "full": masked(None),
    "scale": masked(CAUSAL, scale=0.25),
    "scale of another last bit": masked(CAUSAL, scale=0.25 * (1 + 2**-52)),
    "window": masked(CAUSAL & fa.Window(5)),
    "another window": masked(CAUSAL & fa.Window(6)),
    "soft cap": soft_cap(30.0),
    "soft cap of another last bit": soft_cap(30.000002),
    "end": masked(CAUSAL, align="end"),
    "dropout": masked(CAUSAL, dropout_rate=0.5, dropout_rng=jax.random.key(0)),
    "another dropout": masked(CAUSAL, dropout_rate=0.25, dropout_rng=jax.random.key(0)),
    "decoding": decode(None),
    "decoding, causal": decode(CAUSAL),
    "decoding in a window": decode(CAUSAL & fa.Window(5)),
    "decoding in another window": decode(CAUSAL & fa.Window(6)),
    "decoding on pages": decode(CAUSAL, paged=True),
    "decoding, packed": decode(CAUSAL, packed=True),
    "decoding, packed, on pages": decode(CAUSAL, paged=True, packed=True),
    "gradients": CALLS["both"],
    "deterministic": attend_and_differentiate(fa.Causal() & fa.Window(5)),
    "gradients of slopes": score_gradients(0),
    "gradients of a bias": score_gradients(1),
}


QUICK = (
    "scale",
    "scale of another last bit",
    "window",
    "another window",
    "decoding",
    "decoding, causal",
)


@pytest.mark.parametrize("names", [QUICK, slow(tuple(CALLED))], ids=["quick", "all"])
def test_calls_that_differ_have_different_keys(names: tuple, compilations: list) -> None:
    """In a process and on disk, whatever it is that makes the kernels differ."""
    texts: dict[str, set] = {}
    programs: dict[tuple, set] = {}
    for name in names:
        new_process()
        lowered = lower(CALLED[name], *short())
        for signature, program in launches._programs.items():
            found = tuple(
                x.hash for x in kernels.kernels_of(program._exported.call, signature.structs)
            )  # type: ignore[attr-defined]
            assert signature.text is not None, name
            texts.setdefault(signature.text, set()).add(found)
            programs.setdefault(signature[0], set()).add(found)
        assert kernel_hashes(lowered)
    assert all(len(found) == 1 for found in (*texts.values(), *programs.values()))
    assert len(texts) >= len(names)


def signature(**fields: Any) -> Any:
    found = []
    remembered = mock.patch.multiple(
        launches, _programs={}, _make=lambda launch, s: found.append(s) or launch
    )
    with described(), remembered:
        jax.clear_caches()
        jax.eval_shape(CALLS["forward"], *short())
    return found[0]._replace(**fields)


def test_the_key_names_package_compilers_device_and_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An upgrade or a downgrade of any of them, another GPU or another option finds no old kernel."""
    jax.clear_caches()
    first = signature()
    before = first.text
    assert signature().text == before
    changed, versions = [], importlib.metadata.version

    def differs(text: str | None) -> None:
        assert text not in (None, before, *changed)
        changed.append(text)

    for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"):
        with mock.patch.object(
            importlib.metadata, "version", lambda x, name=name: "9" if x == name else versions(x)
        ):
            environment.installation.cache_clear()
            differs(first.text)
    environment.installation.cache_clear()
    with mock.patch.object(pathlib.Path, "read_bytes", return_value=b"x = 1"):
        differs(first.text)
    environment.installation.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_fast_min_max=true")
    differs(first.text)
    monkeypatch.undo()
    assert first.text == before
    for option in (
        jax.enable_x64(True),
        jax.default_matmul_precision("tensorfloat32"),
        jax.threefry_partitionable(False),
    ):
        with option:
            assert environment.settings() != first.settings
    device = dataclasses.make_dataclass(
        "Device", ["platform", "device_kind", "compute_capability", "core_count", "client"]
    )
    kinds = [
        device("gpu", kind, "9.0", cores, None)
        for kind, cores in (("H200", 132), ("H100", 132), ("H200", 114))
    ]
    assert len({environment.describe(x) for x in kinds}) == 3


@pytest.mark.parametrize("variable", ["PATH", "CUDA_ROOT", "XLA_FLAGS"])
def test_the_key_names_the_ptxas_of_a_toolkit(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A CUDA toolkit that is upgraded in its directory changes no variable and no distribution."""
    values = {
        "PATH": f"{tmp_path}/bin",
        "CUDA_ROOT": str(tmp_path),
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={tmp_path}",
    }
    monkeypatch.setenv(variable, values[variable])
    described = signature()
    ptxas = tmp_path / "bin" / "ptxas"
    ptxas.parent.mkdir()
    texts = [described.text]
    for version in ("12.9.86", "13.0.8"):
        ptxas.write_text(f"#!/bin/sh\necho release V{version}\n")
        ptxas.chmod(0o700)
        texts.append(described.text)
        assert version in texts[-1] and described.text == texts[-1]
    ptxas.write_text("no program")
    texts.append(described.text)
    assert None not in texts and len(set(texts)) == 4


@pytest.mark.parametrize("stamps", [{}, {pathlib.Path("edited.py"): (1, 2, 3)}])
def test_a_package_that_was_edited_after_its_import_stores_nothing(stamps: dict) -> None:
    """Its new files would be the key of its old code. A zip file has no stamps."""
    edited = signature()
    try:
        environment.installation.cache_clear()
        with mock.patch.object(environment, "_AT_IMPORT", stamps):
            assert edited.text is None
    finally:
        environment.installation.cache_clear()
    assert edited.text is not None


def test_a_callback_in_a_mask_is_not_stored(directory: pathlib.Path, compilations: list) -> None:
    """It is known by its address, which another process gives to another function."""
    key = launches.LaunchKey("name", (), "pure_callback[callback=<function f at 0x7f00>]")
    assert signature(key=key).text is None


def test_the_log_says_what_was_compiled_loaded_and_reused(
    directory: pathlib.Path, compilations: list, caplog: pytest.LogCaptureFixture
) -> None:
    def logged() -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "pallas_fa2"):
            lower(CALLS["forward"], *short())
        return caplog.text

    assert "hopper_forward: 1 kernels compiled, 0 loaded from the store" in logged()
    assert "hopper_forward: reused in this process" in logged()
    new_process()
    assert "hopper_forward: 0 kernels compiled, 1 loaded from the store" in logged()
