"""The list of mistakes fits the code and the tests that there are, and planting finds out who sees them."""

import pathlib
import subprocess
import sys

import pytest

from tools import mutate

MUTANTS = mutate.read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_can_be_planted_and_has_tests(
    mutant: mutate.Mutant, tmp_path: pathlib.Path
) -> None:
    path = mutate.ROOT / "pallas_fa2" / mutant.file
    copied = tmp_path / "pallas_fa2" / mutant.file
    copied.parent.mkdir(parents=True)
    copied.write_text(path.read_text())
    with mutant.planted(tmp_path):
        assert copied.read_text() != path.read_text()
        compile(copied.read_text(), mutant.file, "exec")
    assert copied.read_text() == path.read_text()
    assert bool(mutant.tests) != bool(mutant.equivalent)
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (mutate.ROOT / file).read_text()
        assert not name or f"\ndef {name.partition('[')[0]}(" in text, test


def test_mistakes_differ() -> None:
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS) >= 100


@pytest.fixture
def tree(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A package of one function, with a test of each kind."""
    root = tmp_path / "root"
    (root / "pallas_fa2").mkdir(parents=True)
    (root / "pallas_fa2/__init__.py").write_text("def double(x):\n    return 2 * x\n")
    tests = {"sees": "assert double(3) == 6", "blind": "assert double(2) == 4", "cannot": "assert"}
    for name, line in tests.items():
        code = f"from pallas_fa2 import double\n\n\ndef test_it():\n    {line}\n"
        (root / f"test_{name}.py").write_text(code)
    subprocess.run("git init -q . && git add .", shell=True, cwd=root, check=True)
    monkeypatch.setattr(mutate, "ROOT", root)
    return mutate.copy_tree(tmp_path / "copy")


@pytest.mark.parametrize(
    "tests, tier, verdict, test",
    [
        (["test_sees.py"], None, "killed", "test_sees.py::test_it"),
        (["test_blind.py"], None, "SURVIVED", ""),
        (["test_blind.py"], ["test_blind.py", "test_sees.py"], "killed", "test_sees.py::test_it"),
        (["test_cannot.py"], None, "ERROR 2", "test_cannot.py"),
        (["test_sees.py::test_other"], None, "ERROR 4", ""),
    ],
)
def test_the_verdict_on_a_mutant(tree, tests, tier, verdict, test) -> None:
    mutant = mutate.Mutant("square", "__init__.py", "2 * x", "x**2", tuple(tests))
    outcome = mutate.try_mutant(mutant, tree, tier, 60)
    assert outcome.verdict == verdict and test in outcome.test
    assert (tree / "pallas_fa2/__init__.py").read_text().endswith("2 * x\n")


def test_a_tier_is_what_make_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "worksteal" in mutate.tier_arguments("test")
    recipe = (
        "N = 2\ntest: made\n\t$(BIN)/python -m pytest -n $(N) -m 'not slow'\nmade:\n\ttouch $@\n"
    )
    (tmp_path / "Makefile").write_text(recipe)
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    assert mutate.tier_arguments("test") == ["-n", "2", "-m", "not slow"]
    assert not (tmp_path / "made").exists()


def test_an_unknown_name_is_an_error() -> None:
    command = [sys.executable, "tools/mutate.py", "no_such_mistake"]
    outcome = subprocess.run(command, check=False, cwd=mutate.ROOT, capture_output=True, text=True)
    assert outcome.returncode == 2 and "no mutants: no_such_mistake" in outcome.stderr
