"""Compile for an H200 on a machine that has none, and look at what the compiler made of it.

XLA's CUDA plugin lowers, runs ptxas and disassembles without a device, as long as JAX itself was
told not to look for one (JAX_PLATFORMS=cpu). The registers, spills and warnings are those of the
binary that would run.

    for report in compile_for_h200(attention, q, k, v):     # arrays or jax.ShapeDtypeStruct
        assert_clean(report)
"""

import atexit
import collections
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from unittest import mock

import jax
import jax.experimental.mosaic.gpu  # sets MOSAIC_GPU_CUDA_ROOT, whatever it was before
import numpy as np
from jax._src import cache_key, compiler
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import core as mosaic_core

from tests.support import gpus

_WHEELS = ("jax-cuda13-plugin", "jax-cuda13-pjrt")

# What Mosaic prints about a kernel: ptxas's remarks, the disassembly, the host code that launches
# it. (MOSAIC_GPU_DUMP_TO would write files, but also every pass over the kernel: hundreds of
# megabytes, and three times the time.)
_PRINT = {f"MOSAIC_GPU_DUMP_{what}": "1" for what in ("PTXAS", "SASS_CTRL", "HOST_LLVM")}
_PRINTED = re.compile(
    r"^(?P<ptxas>ptxas .*?)"
    r"^(?P<sass>\t\.target.*?)?"
    # jax 0.11 launches, 0.12 describes the launch; the arguments begin alike
    r"^; ModuleID.*?call \w+ @mosaic_gpu_(?:launch_kernel|build_kernel_spec)\((?P<launch>.*?)\)$",
    re.MULTILINE | re.DOTALL,
)
_LAUNCH_SMEM_BYTES = 10  # ptr, grid x y z, cluster x y z, block x y z, bytes, ...

# ptxas could not overlap the wgmmas. C7519 only says where it put the fence before them.
_SERIALIZED = re.compile(r"\(C751[0-8]\)")


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What ptxas and the disassembler say about one Mosaic kernel.

    `registers` is per thread and for the whole kernel: ptxas knows nothing of `set_max_registers`,
    so look at the spills. `smem_bytes` are static and dynamic ones, as the driver counts them. `sass` counts
    mnemonics with their modifiers; without nvdisasm it is empty and `sass_path` None. The file lives as
    long as the process.
    """

    name: str
    registers: int
    spill_stores: int
    spill_loads: int
    smem_bytes: int
    warnings: tuple[str, ...]
    sass: Mapping[str, int]
    sass_path: Path | None

    def count(self, opcode: str) -> int:
        """How many instructions are `opcode`, with any modifiers: `count("WARPGROUP.DEPBAR")`."""
        return sum(n for name, n in self.sass.items() if f"{name}.".startswith(f"{opcode}."))


def exponentials_under_products(report: KernelReport) -> list[int]:
    """How many exponentials a thread computes while one group of products is still in flight.

    One number for each wait that leaves one group in flight: the exponentials between it and the
    wait for that last group. ptxas may move the second wait up, and the overlap is then lost.
    """
    assert report.sass_path is not None, "nvdisasm is missing"
    events = re.findall(r"DEPBAR\.LE gsb0, 0x([01])|(MUFU\.EX2)", report.sass_path.read_text())
    found, counting = [], False
    for groups, exponential in events:
        if groups == "1":
            found.append(0)
        if exponential and counting:
            found[-1] += 1
        counting = groups == "1" or (counting and groups != "0")
    return found


def selections_under_products(report: KernelReport) -> list[int]:
    """Of each wait that leaves one group of products in flight, how many selections come between it and the wait for
    that group: a softmax takes longer by them."""
    assert report.sass_path is not None, "nvdisasm is missing"
    in_flight = r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0"
    under = re.findall(in_flight, report.sass_path.read_text(), re.DOTALL)
    return [text.count(" FSEL ") for text in under]


def stray_threads(sass: str) -> int:
    """How many branches one elected thread of a warp takes, or all but that one, that do not lead to where
    they meet.

    ptxas may have them meet behind a loop that it takes to be the same for all. The loop's numbers are in
    registers that a warp has once, and those who come first change them for the others.
    """
    lines = sass.splitlines()
    label_at, alone, found = _labels(lines), set(), 0
    pattern = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?(U?P\d) )?\s*([A-Z]\w*(?:\.U\.ANY)?)\S*(.*)")
    for line in lines:
        if (instruction := pattern.search(line)) is None:
            continue
        guard, name, operands = instruction.groups()
        predicates = re.findall(r"\bU?P\d\b", operands)
        if name == "BRA" and guard in alone:
            target = re.findall(r"\.L_x_\d+", operands)[0]
            after = filter(pattern.search, lines[label_at[target] :])
            found += "BSYNC" not in next(after)
        elif name == "ELECT" or (name == "PLOP3" and not alone.isdisjoint(predicates[1:])):
            alone.add(predicates[0])
        elif predicates and re.match(r"\s*U?P\d", operands):
            alone.discard(predicates[0])
    return found


def _labels(lines: list[str]) -> dict[str, int]:
    return {m[1]: i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}


def spills_while_multiplying(report: KernelReport) -> int:
    """Local memory accesses in the innermost loops that multiply; -1 if no such loop is found."""
    assert report.sass_path is not None, "nvdisasm is missing"
    lines = report.sass_path.read_text().splitlines()
    label_at, loops = _labels(lines), []
    for end, line in enumerate(lines):
        # a loop's own branch has a condition; code out of line comes back without one
        branch = re.search(r"@!?U?P\d+\s+BRA `\((\.L_x_\d+)\)", line)
        if branch and label_at[branch[1]] < end:
            body = range(label_at[branch[1]], end)
            if any("HGMMA" in lines[i] for i in body):
                loops.append(body)
    innermost = [
        a for a in loops if not any(b != a and a[0] <= b[0] and b[-1] <= a[-1] for b in loops)
    ]
    found = [i for a in innermost for i in a if re.search(r"\b(STL|LDL)\b", lines[i])]
    return len(found) if innermost else -1


def compile_for_h200(fn: Callable[..., Any], *args: Any) -> list[KernelReport]:
    """One report for each Mosaic kernel compiled for `jax.jit(fn)(*args)`."""
    environment = _environment(_PRINT | {"MOSAIC_GPU_CUDA_ROOT": cuda_root()})
    with environment, _all_compiled(), _printed() as output:
        compiled = _compile(fn, *args)
        _flush()
        output.seek(0)
        printed = output.read()
    reports = [_read_report(match) for match in _PRINTED.finditer(printed)]
    calls = _text(compiled).count('custom_call_target="mosaic_gpu')
    if len(reports) != calls:
        raise RuntimeError(f"{calls} kernels, but {len(reports)} in what Mosaic printed")
    return reports


def program_for_h200(fn: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """What `jax.jit(fn)(*args)` is lowered to, kernels included, and by what JAX's persistent cache knows it."""
    lowered, device = _lower(fn, *args), _device()
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    module = lowered.compiler_ir("stablehlo")
    key = cache_key.get(module, np.array([device]), options, device.client)
    return lowered.as_text(), key


def hlo_for_h200(fn: Callable[..., Any], *args: Any) -> str:
    """The optimized HLO of `jax.jit(fn)(*args)`: every buffer outside the kernels, with shapes."""
    with _none_compiled():
        return _text(_compile(fn, *args))


def hlo_for_h200s(fn: Callable[..., Any], *args: Any) -> str:
    """The optimized HLO for each of some `h200s`, over which the arguments' shardings spread them."""
    with jax.default_device(_device()), _none_compiled():
        return _text(jax.jit(fn).lower(*args).compile())


def temporary_bytes_for_h200(fn: Callable[..., Any], *args: Any) -> int:
    """Device memory that `jax.jit(fn)(*args)` takes beside its arguments and results."""
    with _none_compiled():
        analysis = _compile(fn, *args).memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def assert_clean(report: KernelReport) -> None:
    """Fail if the kernel spills, has its wgmmas serialized, asks for too much shared memory, or has one
    thread of a warp go astray."""
    faults = []
    if report.sass_path is not None and (count := stray_threads(report.sass_path.read_text())):
        faults.append(f"has {count} branches of one thread that does not meet its warp behind them")
    if report.spill_stores or report.spill_loads:
        faults.append(f"spills {report.spill_stores} B (reloads {report.spill_loads} B)")
    if report.smem_bytes > gpus.MAX_SHARED_MEMORY_BYTES:
        limit = gpus.MAX_SHARED_MEMORY_BYTES
        faults.append(f"needs {report.smem_bytes} B of shared memory, of which there are {limit}")
    faults += [line for line in report.warnings if _SERIALIZED.search(line)]
    assert not faults, f"kernel {report.name}: " + "; ".join(faults)


def _device() -> jax.Device:
    return h200s(1)[0]


@functools.cache
def h200s(count: int) -> Sequence[jax.Device]:
    """So many of one host."""
    if missing := [wheel for wheel in _WHEELS if not _is_installed(wheel)]:
        raise RuntimeError(
            f"compiling for an H200 needs {' and '.join(missing)}, version {jax.__version__}"
        )
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpus.target_config(), topology=f"1x1x{count}"
        )
    except NotImplementedError as error:
        raise RuntimeError(
            "JAX did not load its CUDA plugin: on a machine without a GPU, JAX_PLATFORMS=cpu must "
            "be in the environment before JAX is imported"
        ) from error
    return topology.devices


def _is_installed(wheel: str) -> bool:
    try:
        importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _compile(fn: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    return _lower(fn, *args).compile()


def _lower(fn: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
    device = _device()
    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)

    def fresh(*args: Any) -> Any:  # a function compiled before would print nothing
        return fn(*args)

    with jax.default_device(device):
        return jax.jit(fresh, out_shardings=sharding).lower(*shapes)


def _text(compiled: jax.stages.Compiled) -> str:
    text = compiled.as_text()
    assert text is not None
    return text


def cuda_root() -> str:
    """The directory whose bin/ holds nvdisasm, if there is one."""
    roots = [Path(os.environ["MOSAIC_GPU_CUDA_ROOT"])]
    if (nvidia := importlib.util.find_spec("nvidia")) is not None:
        roots += [Path(path) / "cu13" for path in nvidia.submodule_search_locations or ()]
    if (tool := shutil.which("nvdisasm")) is not None:
        roots.append(Path(tool).resolve().parent.parent)
    return str(next((root for root in roots if (root / "bin/nvdisasm").exists()), roots[0]))


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _all_compiled() -> Any:
    """Kernels are compiled that have been before: XLA's plugin compiles one in a process for each hash."""
    return _hashed(lambda module: module + os.urandom(16))


def _none_compiled() -> Any:
    """The first one stands for all others, which the plugin takes for the same: XLA's own part is not changed by it."""
    return _hashed(lambda module: b"")


def _hashed(what: Callable[[bytes], bytes]) -> Any:
    sha256 = types.SimpleNamespace(sha256=lambda module: hashlib.sha256(what(module)))
    return mock.patch.multiple(mosaic_core, hashlib=sha256, KNOWN_KERNELS=_Forgotten())


class _Forgotten(dict):
    """What JAX would compare modules of one hash with."""

    def get(self, *_: Any) -> None:
        return None


@contextlib.contextmanager
def _printed() -> Iterator[IO[str]]:
    """A file that takes the place of the process's standard output: Mosaic prints from C++."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        _flush()
        stdout = os.dup(1)
        os.dup2(output.fileno(), 1)
        try:
            yield output
        finally:
            _flush()
            os.dup2(stdout, 1)
            os.close(stdout)


def _flush() -> None:
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _read_report(printed: re.Match[str]) -> KernelReport:
    ptxas, sass = printed["ptxas"], printed["sass"] or ""
    name = _find(r"entry function '(\w+?)(?:_mosaic_gpu_kernel)?'", ptxas)
    static = sum(map(int, re.findall(r"(\d+) bytes smem", ptxas)))
    return KernelReport(
        name=name,
        registers=int(_find(r"Used (\d+) registers", ptxas)),
        spill_stores=sum(map(int, re.findall(r"(\d+) bytes spill stores", ptxas))),
        spill_loads=sum(map(int, re.findall(r"(\d+) bytes spill loads", ptxas))),
        smem_bytes=static + int(printed["launch"].split(",")[_LAUNCH_SMEM_BYTES].split()[-1]),
        warnings=tuple(re.findall(r"^.*\(C75\d\d\).*$", ptxas, re.MULTILINE)),
        sass=_count_opcodes(sass),
        sass_path=_write_sass(name, sass) if sass else None,
    )


def _find(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern!r} in what ptxas printed:\n{text[:2000]}")
    return match[1]


def _count_opcodes(sass: str) -> dict[str, int]:
    instruction = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")
    return dict(collections.Counter(instruction.findall(sass)))


@functools.cache
def _sass_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="pallas_fa2_sass_")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _write_sass(name: str, sass: str) -> Path:
    handle, path = tempfile.mkstemp(prefix=f"{name}_", suffix=".sass", dir=_sass_directory())
    with open(handle, "w") as file:
        file.write(sass)
    return Path(path)
