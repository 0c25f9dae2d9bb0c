"""Imports run one way, Pallas and Flax stay where they belong, and the public names exist."""

import ast
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import pallas_fa2 as fa
from pallas_fa2 import api

PACKAGE = pathlib.Path(fa.__file__).parent
ORDER = ["fingerprint", "tokens", "causal", "functions", "masks", "scores", "spec", "bounds", "diagonal", "kernels", "plan", "autodiff",
         "api", "explanation", "tuning", "linen", "nnx"]  # fmt: skip
ENTRIES = {"__init__", "__main__"}  # of the package: they may import all of it
FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))

PUBLIC = ["flash_attention", "dot_product_attention", "explain", "linen", "nnx", "Causal", "Window",
          "Segments", "Documents", "Lengths", "Prefix", "Chunked", "Dense", "mask_fn", "score_fn", "soft_cap",
          "alibi", "bias", "autotune"]  # fmt: skip


def imports(file):
    """Full names of all that a file imports, in functions too: `from a import b` is `a.b`."""
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(file):
    """The entry of ORDER that a file belongs to."""
    return pathlib.PurePath(file).with_suffix("").parts[0]


def imported_parts(file):
    for name in imports(file):
        package, _, rest = name.partition(".")
        if package == "pallas_fa2":
            yield rest.partition(".")[0]


def imports_package(file, package):
    return any(f"{name}.".startswith(f"{package}.") for name in imports(file))


@pytest.mark.parametrize("file", [file for file in FILES if part(file) not in ENTRIES])
def test_imports_run_one_way(file):
    mine = ORDER.index(part(file))
    for other in imported_parts(file):
        assert other in ORDER, f"{file} imports {other}, which has no place in the order"
        allowed = ORDER.index(other) < mine or (other == part(file) == "kernels")
        assert allowed, f"{file} imports {other}, which comes after it"


def test_every_file_has_a_place_in_the_order():
    assert {part(file) for file in FILES} - ENTRIES == set(ORDER)


def test_the_package_imports_the_core_alone():
    assert not {"linen", "nnx"} & set(imported_parts("__init__.py"))


@pytest.mark.parametrize(
    "package, parts",
    [("jax.experimental.pallas", {"kernels"}), ("flax", {"linen", "nnx"})],
    ids=["pallas", "flax"],
)
def test_who_imports_pallas_and_flax(package, parts):
    assert {part(file) for file in FILES if imports_package(file, package)} == parts


@pytest.mark.parametrize("package", ["chex", "optax", "numpy.testing", "pytest", "jax._src"])
def test_nothing_imports_tools_of_tests_or_internals_of_jax(package):
    assert [file for file in FILES if imports_package(file, package)] == []


def test_kernels_branch_in_the_form_that_lowers_fast():
    kernels = {file for file in FILES if part(file) == "kernels"} - {"kernels/branches.py"}
    slow = [f for f in kernels if re.search(r"lax\.cond\(|pl\.when\(", (PACKAGE / f).read_text())]
    assert slow == []


@pytest.mark.parametrize("name", PUBLIC)
def test_the_public_names_exist(name):
    assert hasattr(fa, name)


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - {"linen", "nnx"}))
def test_the_public_names_have_documentation(name):
    assert (getattr(fa, name).__doc__ or "").strip()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'pallas_fa2' has no attribute 'flax'"):
        _ = fa.flax


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


def test_what_else_is_missing_keeps_its_own_error():
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
        assert fa.linen is sys.modules["pallas_fa2.linen"]
    """)


@pytest.mark.parametrize(
    "function, options, others",
    [
        (fa.flash_attention, fa.Options, {"return_lse"}),
        (fa.dot_product_attention, api.DropInOptions, {"bias", "mask", "return_residual"}),
    ],
    ids=["flash_attention", "dot_product_attention"],
)
def test_overloads_have_the_options_of_the_function(
    function: Any, options: Any, others: set[str]
) -> None:
    ours = set(inspect.signature(function).parameters) - {"query", "key", "value"}
    assert ours == {*options.__annotations__, *others}
