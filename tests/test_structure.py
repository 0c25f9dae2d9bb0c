"""Imports run one way, Pallas and Flax stay where they belong, and the public names exist."""

import ast
import graphlib
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import pallas_fa2 as fa
from pallas_fa2.options import DropInOptions

PACKAGE = pathlib.Path(fa.__file__).parent
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
# A module imports those before it in this list: of its own entry too, of a later one never. The first entry that a
# module's name begins with is its own.
ORDER = [
    *("arithmetic", "control_flow", "device", "fingerprint"),
    *("ir", "pytree_fn", "masks", "scores", "options", "check_args", "trace_mods", "sinks", "merging", "parse_call"),
    *("check_caches", "caches", "parse_cached"),
    *("schedule", "distributed.sharding", "compilation.store", "compilation"),
    *("backends.protocol", "backends.common", "backends.xla", "backends.reference", "backends.dense"),
    *("backends.sm90.primitives", "backends.sm90.nonfinite"),
    *("backends.sm90.forward", "backends.sm90.decode", "backends.sm90.backward", "backends.sm90"),
    *("backends.sm80.primitives", "backends.sm80.multiprocessor", "backends.sm80.tile_list", "backends.sm80.row_schedule"),
    *("backends.sm80.forward", "backends.sm80.decode", "backends.sm80.backward", "backends.sm80"),
    *("backends", "planning.tuned", "planning.plan", "planning.cached_plan", "fallback", "passes"),
    *("distributed.zigzag", "distributed.collectives", "distributed.aux_shards", "distributed.ring_schedule"),
    *("distributed.ring_steps", "distributed.ring_passes", "distributed.reach", "distributed.device_calls", "distributed.under_jit"),
    *("autodiff", "cached_autodiff"),
    *("api", "cached_api", "cached_explanation", "drop_in", "explanation", "planning", "flax", "distributed"),
    *("__init__", "cache_command", "__main__"),
]  # fmt: skip

PUBLIC = ["flash_attention", "dot_product_attention", "explain", "linen", "nnx", "Causal", "Window",
          "Segments", "Documents", "Lengths", "Prefix", "Chunked", "Dense", "mask_fn", "score_fn", "soft_cap",
          "alibi", "bias", "autotune",
          "Cache", "Pages", "Packed", "Tree", "cached_attention", "merge"]  # fmt: skip


def imports(file):
    """Full names of all that a file imports, in functions too: `from a import b` is `a.b`."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module(file):
    name = ".".join(pathlib.PurePath(file).with_suffix("").parts)
    return name.removesuffix(".__init__") if "." in name else name


def entry(name):
    """The number of the entry of ORDER that a module belongs to."""
    return next(i for i, x in enumerate(ORDER) if f"{name}.".startswith(f"{x}."))


def imported_modules(file):
    """Modules of the package."""
    known = {module(f) for f in FILES}
    for name in imports(file):
        package, _, rest = name.partition(".")
        if package == "pallas_fa2":
            yield (rest if rest in known else rest.rpartition(".")[0]) or "__init__"


def imports_package(file, package):
    return any(f"{name}.".startswith(f"{package}.") for name in imports(file))


@pytest.mark.parametrize("file", FILES)
def test_imports_run_one_way(file):
    for other in imported_modules(file):
        assert entry(other) <= entry(module(file)), f"{file} imports {other}, which comes after it"


def test_no_modules_import_each_other():
    imported = {module(f): set(imported_modules(f)) - {"__init__"} for f in FILES}
    graphlib.TopologicalSorter(imported).prepare()


def test_every_entry_of_the_order_exists():
    assert {entry(module(file)) for file in FILES} == set(range(len(ORDER)))


def test_forward_and_backward_and_architectures_do_not_import_each_other():
    """Shared modules do not import those of an architecture either."""
    passes = "forward", "decode", "backward"
    apart = [f"backends.{x}.{name}" for x in ("sm80", "sm90") for name in passes]
    for file in FILES:
        for other in imported_modules(file):
            mine, theirs = (
                next((x for x in apart if n.startswith(x)), None) for n in (module(file), other)
            )
            assert mine is None or theirs in (None, mine), f"{file} imports {other}"
            architectures = (re.match(r"backends\.sm\d+", n) for n in (module(file), other))
            mine, theirs = (m and m[0] for m in architectures)
            assert mine is None or theirs in (None, mine), f"{file} imports {other}"


def test_the_package_imports_the_core_alone():
    assert not any(name.startswith("flax") for name in imported_modules("__init__.py"))


@pytest.mark.parametrize(
    "package, where",
    [("jax.experimental.pallas", "backends/"), ("flax", "flax/")],
    ids=["pallas", "flax"],
)
def test_only_some_modules_import_pallas_and_flax(package, where):
    files = [file for file in FILES if imports_package(file, package)]
    assert files and all(file.startswith(where) for file in files)


@pytest.mark.parametrize("package", ["chex", "optax", "numpy.testing", "pytest", "jax._src"])
def test_nothing_imports_tools_of_tests_or_internals_of_jax(package):
    assert [file for file in FILES if imports_package(file, package)] == []


def test_kernels_branch_in_the_form_that_lowers_fast():
    kernels = [file for file in FILES if file.startswith(("backends/", "ir/"))]
    slow = [f for f in kernels if re.search(r"lax\.cond\(|pl\.when\(", (PACKAGE / f).read_text())]
    assert slow == []


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_names_exist(name):
    assert hasattr(fa, name)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - {"linen", "nnx"}))
def test_the_public_names_have_documentation(name):
    assert (getattr(fa, name).__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'pallas_fa2' has no attribute 'haiku'"):
        _ = fa.haiku


def run(code):
    """Runs code in a Python of its own, which has imported nothing yet."""
    command = [sys.executable, "-W", "error::ImportWarning", "-c", textwrap.dedent(code)]
    result = subprocess.run(
        command, check=False, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_the_core_needs_jax_and_jaxtyping_alone():
    run("""
        import sys

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {"flax", "chex", "optax", "pytest", "matplotlib"}:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Missing())
        import pallas_fa2 as fa

        assert fa.Causal() is not None
        for name in ("linen", "nnx"):
            try:
                getattr(fa, name)
            except ImportError as error:
                assert str(error) == f"pallas_fa2.{name} needs Flax: pip install 'flax>=0.12'"
            else:
                raise AssertionError("flax was there all the time")
    """)


def test_other_missing_modules_keep_their_error():
    run("""
        import sys
        import pallas_fa2 as fa

        sys.modules["flax.typing"] = None
        try:
            fa.linen
        except ImportError as error:
            assert "flax.typing" in str(error)
        else:
            raise AssertionError("linen did without flax.typing")
    """)


def test_the_integrations_are_imported_on_first_use():
    run("""
        import sys
        import pallas_fa2 as fa

        assert "flax" not in sys.modules
        assert callable(fa.linen.attention_fn)
        assert callable(fa.nnx.MultiHeadAttention)
        assert fa.linen is sys.modules["pallas_fa2.flax.linen"]
    """)


@pytest.mark.parametrize(
    "function, options, others",
    [
        (fa.flash_attention, fa.Options, {"return_lse"}),
        (fa.dot_product_attention, DropInOptions, {"bias", "mask", "return_residual"}),
        (fa.cached_attention, fa.CachedOptions, {"return_lse"}),
    ],
    ids=["flash_attention", "dot_product_attention", "cached_attention"],
)
def test_overloads_have_the_options_of_the_function(
    function: Any, options: Any, others: set[str]
) -> None:
    ours = set(inspect.signature(function).parameters) - {"query", "key", "value", "cache"}
    assert ours == {*options.__annotations__, *others}


# Two screens of a reader, as for a paper's algorithm and what it calls.
MAX_LINES = 300


def test_files_of_backends_are_short() -> None:
    lengths = {name: len((PACKAGE / name).read_text().splitlines()) for name in FILES}
    long = {name: n for name, n in lengths.items() if "backends" in name and n > MAX_LINES}
    assert not long
