"""compare_sass finds the kernels of two revisions that differ, and the commits that say that none does."""

import pathlib
import shutil
import subprocess

import pytest

from tests.support.tiers import slow
from tools import compare_sass
from tools.sass_matrix import CALLS

SASS = """
\t.section\t.text.attention_mosaic_gpu_kernel
attention_mosaic_gpu_kernel:
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28] ;
   1:-:-:Y:02        /*0010*/                   MOV R2, 32@lo(attention) ;
"""


def test_instructions_have_no_names_but_control_codes() -> None:
    first, second = compare_sass.instructions(SASS, "attention")
    assert first.startswith("-:-:-:Y:01") and second.endswith("32@lo(kernel) ;")


@pytest.mark.parametrize(
    "after, line",
    [
        (["renamed", 168, 0, 1024, 9, "aa"], None),
        (["attention", 160, 8, 1024, 9, "bb"], "x, attention: registers 168 -> 160, bytes spilled 0 -> 8"),
        (["attention", 168, 0, 1024, 9, "bb"], "x, attention: instructions differ"),
    ],
)  # fmt: skip
def test_kernels_differ_by_their_code_and_not_by_their_names(after: list, line: str | None) -> None:
    before = {"x": [["attention", 168, 0, 1024, 9, "aa"]], "y": [["b", 1, 0, 0, 1, "cc"]]}
    lines = compare_sass.differences(before, {**before, "x": [after]})
    assert lines == ([] if line is None else [line])


def test_a_different_number_of_kernels_is_a_difference() -> None:
    one = ["attention", 168, 0, 1024, 9, "aa"]
    assert compare_sass.differences({"x": [one]}, {"x": [one, one]}) == [
        "x: 1 kernels before, 2 after"
    ]


@pytest.fixture
def repository(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Five commits: two that change the package, two that say they are neutral, one of a page."""
    monkeypatch.setattr(compare_sass, "ROOT", tmp_path)
    (tmp_path / "pallas_fa2").mkdir()

    def commit(file: str, *message: str) -> None:
        (tmp_path / file).write_text("\n".join(message))
        lines = [x for line in message for x in ("-m", line)]
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["add", "."], [*author, "commit", "-q", *lines]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit("pallas_fa2/a.py", "first")
    commit("pallas_fa2/a.py", "changed")
    commit("pallas_fa2/b.py", "renamed", "Neutral: yes")
    commit("README.md", "a page")
    commit("pallas_fa2/c.py", "moved", "Neutral: yes")
    return tmp_path


def test_neutral_commits_are_listed(repository: pathlib.Path) -> None:
    def subject(revision: str) -> str:
        return compare_sass.git("show", "-s", "--format=%s", revision)

    def subjects(pairs: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(subject(a), subject(b)) for a, b in pairs]

    each = compare_sass.neutral_commits("HEAD~4")
    assert subjects(each) == [("changed", "renamed"), ("a page", "moved")]
    assert subjects(compare_sass.last_neutral_commits()) == [("changed", "moved")]


def test_the_working_tree_has_a_hash_of_its_own(repository: pathlib.Path) -> None:
    committed = compare_sass.tree_hash("HEAD")
    assert compare_sass.tree_hash(None) == committed
    (repository / "pallas_fa2/c.py").write_text("another")
    assert compare_sass.tree_hash(None) != committed
    assert compare_sass.git("status", "--short") == "M pallas_fa2/c.py"


def test_the_small_matrix_is_part_of_the_whole() -> None:
    small = [name for name, call in CALLS.items() if call.small]
    assert 0 < len(small) < len(CALLS)


@pytest.mark.parametrize("name", [slow("h64_1024")])
def test_a_changed_constant_differs_and_a_changed_comment_does_not(
    name: str, tmp_path: pathlib.Path
) -> None:
    compiled = []
    constant = "\nRESCALE_ABOVE = "
    for i, text in enumerate(["", "\n# a comment\n", f"{constant}2.0**13\n"]):
        tree = tmp_path / str(i)
        shutil.copytree(compare_sass.ROOT / "pallas_fa2", tree / "pallas_fa2")
        files = (tree / "pallas_fa2").rglob("*.py")
        (file,) = (file for file in files if constant in file.read_text())
        file.write_text(file.read_text() + text)
        compiled.append(compare_sass.in_processes(tree, [name], 1, None))
    before, commented, changed = compiled
    assert compare_sass.differences(before, commented) == []
    (line,) = compare_sass.differences(before, changed)
    assert line.startswith(f"{name}, attention: ")
