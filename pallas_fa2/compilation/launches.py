"""Launches that are traced and lowered once in a process, and not at all if they are in the store.

A launch is a function of arrays that calls kernels and what XLA computes around them. `jax.export` makes it a program,
which takes the place of the launch in every trace: a second program of the process neither traces nor lowers the
kernels. Their compilation begins as soon as they are lowered, in threads, and ends before XLA compiles the program that
calls them.
"""

import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
from jax import export
from jax.experimental import serialize_executable
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_fa2.compilation import environment, store
from pallas_fa2.compilation.kernels import TARGET, Compilation, kernels_of
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.ir.mesh import without_mesh

log = logging.getLogger("pallas_fa2")

# JAX does not promise that these calls mean the same for years. A store is read by the versions that wrote it.
_CHECKS = [export.DisabledSafetyCheck.custom_call(x) for x in (TARGET, "AllocateBuffer")]
# Launches that a process remembers, of about 1 MB each.
_MAX_LAUNCHES = 256

_described: contextvars.ContextVar = contextvars.ContextVar("described", default=None)


class LaunchKey(NamedTuple):
    """All static arguments of a launch: two launches of equal keys run the same code.

    `static` is hashable and compares by value; `text` differs wherever it does, in every process. If `text` has an
    address in it (" at 0x", of a callback in a mask), the launch is not stored.
    """

    name: str
    static: Hashable
    text: str

    @classmethod
    def of(cls, name: str, spec: CallSpec | CachedSpec, *static: Hashable) -> "LaunchKey":
        """Return the key of a launch of a call; the texts of the other arguments show all that they are equal by."""
        return cls(name, (spec, *static), "\n".join((spec.text, *map(repr, static))))


@contextlib.contextmanager
def compiled_for(device: Any) -> Iterator[None]:
    """Compile what is traced inside for a device, which may be a description of one that this machine does not have."""
    token = _described.set(device)
    try:
        yield
    finally:
        _described.reset(token)


def reusable(launch: Callable, key: LaunchKey) -> Callable:
    """Return the launch as a function of the same arrays that is lowered once for each kind of these.

    Nothing is changed where JAX's default devices are no GPUs: interpreters and tests see the launch itself.
    """

    def call(*args: Any) -> Any:
        device = _described.get()
        if device is None and jax.default_backend() != "gpu":
            return launch(*args)
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple((x.shape, x.dtype.name, x.weak_type) for x in map(jax.typeof, leaves))
        signature = _Signature(key, tree, shapes, environment.settings(), device)
        program = _recall(signature)
        if program is not None:
            log.info("%s: reused in this process", key.name)
            return program(*args)
        program = _make(launch, signature)
        if (
            program is None
        ):  # it is not remembered: a launch holds arrays of the caller, which may be traced
            return launch(*args)
        return _remember(signature, program)(*args)

    return call


class _Signature(NamedTuple):
    key: LaunchKey
    tree: Any
    shapes: tuple
    settings: tuple
    device: Any  # None is the default device

    @property
    def structs(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(s, dtype, weak_type=weak) for s, dtype, weak in self.shapes]

    @property
    def text(self) -> str | None:
        """The key in the store, or None if the launch must not be stored."""
        described = environment.describe(self.device or jax.local_devices()[0])
        parts = (self.key.name, self.key.text, self.tree, self.shapes, self.settings)
        text = "\n".join(map(str, (described, *parts)))
        return None if described is None or " at 0x" in text else text


# The least recently used program is the first. The lock is not held while a launch is lowered, which may take seconds.
_programs: dict[_Signature, "_Program"] = {}
_programs_lock = threading.Lock()


def _recall(signature: _Signature) -> "_Program | None":
    """Return the program that is remembered for a signature, and make it the most recently used one."""
    with _programs_lock:
        program = _programs.pop(signature, None)
        if program is not None:
            _programs[signature] = program
        return program


def _remember(signature: _Signature, program: "_Program") -> "_Program":
    """Remember a program and return it, or that of another thread that was quicker."""
    with _programs_lock:
        program = _programs.setdefault(signature, program)
        while len(_programs) > _MAX_LAUNCHES:
            del _programs[next(iter(_programs))]
        return program


def _make(launch: Callable, signature: _Signature) -> "_Program | None":
    """Return the program of a launch, whose kernels are being loaded or compiled, or None if it has none."""
    try:
        # Formed before the kernels are lowered: what is changed meanwhile is not taken for what they were lowered
        # under.
        text = None if store.directory() is None else signature.text
        return _load(signature, text) or _lower(launch, signature, text)
    except Exception:  # what is wrong with the launch itself is raised again when it is called
        log.debug("%s is lowered in each program", signature.key.name, exc_info=True)
        return None


def _lower(launch: Callable, signature: _Signature, text: str | None) -> "_Program":
    out_tree = None

    def flat(*leaves: Any) -> list:
        nonlocal out_tree
        results, out_tree = jax.tree.flatten(launch(*jax.tree.unflatten(signature.tree, leaves)))
        return results

    flat.__name__ = signature.key.name
    with without_mesh():
        exported = export.export(jax.jit(flat), platforms=["cuda"], disabled_checks=_CHECKS)(
            *signature.structs
        )
    kernels = kernels_of(exported.call, signature.structs)
    compilations = [Compilation(kernel, signature.device) for kernel in kernels]
    return _Program(signature.key.name, text, exported, out_tree, compilations)


def _load(signature: _Signature, text: str | None) -> "_Program | None":
    """Return the program if it is in the store, and every kernel is what its hash says."""
    entry = None if text is None else store.read(text)
    if entry is None:
        return None
    exported = export.deserialize(bytearray(entry.program))
    kernels = kernels_of(exported.call, signature.structs)
    if not all(x.is_intact for x in kernels) or {x.hash for x in kernels} != set(entry.kernels):
        return None
    compilations = [Compilation(x, signature.device, entry.kernels[x.hash]) for x in kernels]
    return _Program(signature.key.name, text, exported, entry.out_tree, compilations)


class _Program:
    """A lowered launch, and its kernels as they are being compiled or loaded."""

    def __init__(
        self,
        name: str,
        text: str | None,
        exported: export.Exported,
        out_tree: Any,
        compilations: list[Compilation],
    ) -> None:
        self._name, self._text = name, text
        self._exported, self._out_tree = exported, out_tree
        self._compilations = compilations
        self._call = jax.jit(exported.call)  # lowered once in a program, however often it is called

    def __call__(self, *args: Any) -> Any:
        first, *others = jax.tree.leaves(args)
        results = self._call(_await_kernels.bind(first, program=self), *others)
        return jax.tree.unflatten(self._out_tree, results)

    def wait(self) -> None:
        """Return when every kernel is compiled; store them if they are new."""
        compilations, self._compilations = self._compilations, []
        executables = [x.wait() for x in compilations]
        if not compilations:
            return
        loaded = sum(x.was_loaded for x in compilations)
        log.info(
            "%s: %d kernels compiled, %d loaded from the store, the longest in %.2f s",
            self._name,
            len(compilations) - loaded,
            loaded,
            max(x.seconds for x in compilations),
        )
        if self._text is None or loaded == len(compilations) or None in executables:
            return
        kernels = {
            x.kernel.hash: serialize_executable.serialize(executable)
            for x, executable in zip(compilations, executables, strict=True)
            if executable is not None
        }
        store.write(
            self._text, store.Entry(bytes(self._exported.serialize()), self._out_tree, kernels)
        )


def _lower_await(_: Any, x: Any, *, program: _Program) -> list:
    program.wait()
    return [x]


# The identity, on one argument of a launch: a program that is lowered is about to be compiled.
_await_kernels = Primitive("await_kernels")
_await_kernels.def_abstract_eval(lambda x, *, program: x)
_await_kernels.def_impl(lambda x, *, program: x)
mlir.register_lowering(_await_kernels, _lower_await)
