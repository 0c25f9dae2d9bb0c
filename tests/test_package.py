"""The contents of the wheel and the source distribution, and the description in an index."""

import email
import pathlib
import re
import runpy
import tarfile
import zipfile

import pytest

import pallas_fa2 as fa

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel's files, its metadata, and the files of the source distribution."""
    from hatchling import build  # a machine that only runs the tests of a GPU need not have it

    directory = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        paths = [
            directory / make(str(directory)) for make in (build.build_wheel, build.build_sdist)
        ]
    with zipfile.ZipFile(paths[0]) as wheel, tarfile.open(paths[1]) as sdist:
        (metadata,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        message = email.message_from_bytes(wheel.read(metadata))
        return wheel.namelist(), message, [name.partition("/")[2] for name in sdist.getnames()]


def package_files():
    files = (path for path in (ROOT / "pallas_fa2").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def test_the_wheel_is_the_package_with_its_types(built):
    wheel, _, _ = built
    assert {name for name in wheel if ".dist-info/" not in name} == package_files()
    assert "pallas_fa2/py.typed" in wheel


def test_the_version_is_the_one_of_the_module(built):
    assert built[1]["Version"] == fa.__version__


def test_the_error_names_the_required_flax(built):
    assert "flax>=0.12; extra == 'flax'" in built[1].get_all("Requires-Dist")


TARGETS = re.compile(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"")


def test_the_description_has_no_relative_links(built):
    text = built[1].get_payload()
    assert text.startswith("# pallas_fa2\n") and "fa.flash_attention(" in text
    assert [t for pair in TARGETS.findall(text) for t in pair if t and ":" not in t] == []


def test_links_are_absolute_if_the_source_has_an_address():
    from tools.description import description

    readme = "![Speed](docs/a.svg)\n\n[page](docs/b.md#c) and [issue](https://b.example/1)\n"
    assert description(readme, "https://a.example/x") == (
        "![Speed](https://a.example/x/raw/HEAD/docs/a.svg)\n\n"
        "[page](https://a.example/x/blob/HEAD/docs/b.md#c) and [issue](https://b.example/1)\n"
    )
    assert description(readme, None) == "\n\npage and [issue](https://b.example/1)\n"


def test_the_source_distribution_has_tests_and_no_measurements(built):
    sdist = set(built[2])
    assert package_files() < sdist
    assert {"README.md", "LICENSE", "Makefile", "constraints.txt", "tests/conftest.py"} < sdist
    assert [name for name in sdist if re.search(r"\.(svg|json|pyc)$", name)] == []


def test_the_code_that_readme_shows_runs(capsys, tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "readme.py").write_text(code)
    namespace = runpy.run_path(str(tmp_path / "readme.py"))
    q, out, lse = (namespace[name] for name in ("q", "out", "lse"))
    assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert "blockwise" in capsys.readouterr().out
