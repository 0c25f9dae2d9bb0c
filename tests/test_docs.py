"""Documentation: links resolve, decisions have a status and are listed, named files exist, code of pages and docstrings
runs."""

import doctest
import importlib
import pathlib
import re
import runpy

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{n}.md" for n in ("README", "CONTRIBUTING", "CHANGELOG")), *DOCS.rglob("*.md")]
MODULES = sorted(path for path in (ROOT / "pallas_fa2").rglob("*.py") if ">>> " in path.read_text())
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
USER = sorted((DOCS / "user").glob("*.md"))
DESIGN = [*sorted((DOCS / "design").glob("*.md")), DOCS / "glossary.md"]
RUNNABLE = [*USER, DOCS / "design" / "masks.md", DOCS / "design" / "scheduling.md"]
# What stays in the repository: a source distribution has none of it.
REPOSITORY_ONLY = DOCS / "figures", ROOT / "benchmarks" / "results"

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
# Paths in backticks begin with one of these, are those of a module in the package, or a module's name alone.
FOLDERS = "pallas_fa2", "tests", "tools", "docs", "benchmarks", "examples"
STATUS = re.compile(r"accepted|rejected|superseded by \d{4}|historical")


def name(path):
    return str(path.relative_to(ROOT))


def links(path):
    """The relative targets of a page: (path, anchor)."""
    for target in LINK.findall(CODE.sub("", path.read_text())):
        if not re.match(r"\w+:", target):
            file, _, anchor = target.partition("#")
            yield (path.parent / file).resolve() if file else path, anchor


def anchors(path):
    """The names that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h).lower() for h in headings)
    return {re.sub(r"[^\w\- ]", "", h).strip().replace(" ", "-") for h in plain}


def named_files(path):
    """The files, folders and dotted modules of the repository that a page names in backticks, as paths."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for words in re.findall(r"`([\w./-]+)`", text):
        if words.startswith("pallas_fa2."):
            yield words.replace(".", "/")
        elif words.endswith(".py") or words.partition("/")[0] in FOLDERS:
            yield words.rstrip("/")


def status(path):
    (status_line,) = re.findall(r"^Status: (.*)$", path.read_text(), re.MULTILINE)
    return status_line


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_resolve(page):
    for target, anchor in links(page):
        if any(target.is_relative_to(x) and not x.exists() for x in REPOSITORY_ONLY):
            continue
        assert target.exists(), f"{name(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(target), f"{name(page)}: {target.name} has no #{anchor}"


@pytest.mark.parametrize("page", DESIGN, ids=name)
def test_the_files_that_a_design_page_names_exist(page):
    package = ROOT / "pallas_fa2"
    modules = {path.name for path in package.rglob("*.py")}
    for file in named_files(page):
        paths = ROOT / file, ROOT / f"{file}.py", package / file
        assert file in modules or any(x.exists() for x in paths), f"{file} does not exist"


def package_tree():
    """The files and folders, relative to the root, that the tree of packages in the architecture page names."""
    page = (DOCS / "design" / "architecture.md").read_text()
    tree = re.findall(r"^```\n(pallas_fa2/\n.*?)^```", page, re.DOTALL | re.MULTILINE)[0]
    folders = []
    for line in tree.splitlines():
        indent, names = re.match(r"([│├└─ ]*)((?:[\w.]+/?(?:, )?)+)?", line).groups()
        for path in (names or "").split(", "):
            if path.endswith(("/", ".py")):
                folders[len(indent) // 4 :] = [path.rstrip("/")]
                yield "/".join(folders)


def test_the_tree_of_packages_is_that_of_the_repository():
    named = list(package_tree())
    assert [x for x in named if not (ROOT / x).exists()] == []
    packages = {name(path.parent) for path in (ROOT / "pallas_fa2").rglob("__init__.py")}
    assert packages - set(named) == set()


@pytest.mark.parametrize("page", DECISIONS, ids=name)
def test_a_decision_has_a_number_a_status_and_a_verdict(page):
    text, number = page.read_text(), page.name[:4]
    assert text.startswith(f"# {number}: "), "the title begins with the page's number"
    assert STATUS.fullmatch(status(page)), f"Status: {status(page)}"
    assert "\n## Context" in text and "\n## Verdict\n" in text
    for other in re.findall(r"superseded by (\d{4})", status(page)):
        assert list(page.parent.glob(f"{other}-*.md")), f"there is no decision {other}"


def test_the_index_lists_each_decision_once_with_its_status():
    index = (DOCS / "decisions" / "index.md").read_text()
    items = re.findall(r"^- \[(\d{4})\]\(([^)]*)\) ([^:]*):", index, re.MULTILINE)
    assert items == [(page.name[:4], page.name, status(page)) for page in DECISIONS]
    assert [number for number, *_ in items] == [f"{i + 1:04}" for i in range(len(items))]


def test_every_page_of_a_folder_is_linked_from_an_index():
    indices = DOCS / "index.md", DOCS / "decisions" / "index.md"
    linked = {target for page in indices for target, _ in links(page)}
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} <= linked


def test_the_glossary_has_each_term_once_and_in_order():
    text = (DOCS / "glossary.md").read_text().partition("## Terms")[2]
    bold = re.findall(r"^- \*+(.*?)\*+.*?:", text, re.MULTILINE)
    terms = [re.sub(r"\W+", " ", term).lower() for term in bold]
    assert terms and terms == sorted(set(terms))


@pytest.fixture
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_the_code_of_a_page_runs(page, promotion_as_users_have_it, tmp_path):
    run(page.read_text(), tmp_path)


def test_the_code_on_several_devices_runs_under_explicit_axes(promotion_as_users_have_it, tmp_path):
    page = (DOCS / "user" / "sharding.md").read_text()
    without_flax = re.sub(r"^### With Flax\n.*?^## ", "## ", page, flags=re.DOTALL | re.MULTILINE)
    before, assignment, after = without_flax.partition("AxisType.Auto")
    assert assignment and "AxisType.Auto" not in after, "one assignment says the kind of all axes"
    run(f"{before}AxisType.Explicit{after}", tmp_path)


def run(page, folder):
    """Run the blocks of Python of a page's text, one after the other."""
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (folder / "page.py").write_text("\n".join(blocks))
    runpy.run_path(str(folder / "page.py"))


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_the_examples_of_docstrings_run(path, promotion_as_users_have_it):
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    report: list[str] = []
    runner = doctest.DocTestRunner()
    examples = [x for x in doctest.DocTestFinder().find(module) if x.examples]
    for example in examples:
        runner.run(example, out=report.append)
    assert examples and not report, "".join(report)
