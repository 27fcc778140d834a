"""The pages are correct: links have targets, code runs, and every name that a user can meet is explained."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import schedsearch
from schedsearch.errors import SchedsearchError
from schedsearch.ops import STAGES
from schedsearch.target import Target
from schedsearch.template.registry import BUILT_IN, ENTRY_POINT_GROUP
from schedsearch.tuner import TUNERS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
sys.path.insert(0, str(ROOT / "scripts"))
knob_tables = importlib.import_module("knob_tables")
CPU = Target("cpu", "a CPU", sms=4, simd_bits=256, l2_bytes=32 << 20)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def without_code(page: str) -> str:
    page = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^    .*$", "", page, flags=re.MULTILINE)


def anchors(page: str) -> set[str]:
    """GitHub's anchors: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text(page))):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        if not linked.exists() or (anchor and anchor not in anchors(text(linked))):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = text(DOCS / "README.md")
    missing = [name(page) for page in DOCS.glob("*.md") if page.name != "README.md" and f"]({page.name})" not in index]
    assert missing == []


def test_no_page_names_a_path_of_one_machine() -> None:
    assert [name(page) for page in PAGES if re.search(r"(?<![\w.])/(work|home|root|tmp|Users)/", text(page))] == []


def snippets(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for i, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE)):
            found.append((f"{name(page)}-{i}", block))
    return found


@pytest.mark.parametrize("block", [pytest.param(block, id=key) for key, block in snippets("python")])
def test_python_snippets_compile_and_their_imports_exist(block: str) -> None:
    tree = ast.parse(block)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "schedsearch":
            if node.module == "schedsearch.torch":
                pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")
            module = importlib.import_module(node.module or "")
            missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
            assert missing == [], node.module
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "schedsearch":
            assert node.attr in schedsearch.__all__ or importlib.util.find_spec(f"schedsearch.{node.attr}")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=key)
        for key, block in snippets("yaml")
        if "tasks:" in block and not any(f"op: {op}" in block for op in ("row_softmax", "sofmax"))
    ],
)
def test_complete_workload_files_are_valid(block: str, tmp_path: Path) -> None:
    from schedsearch.workload_file import load

    path = tmp_path / "page.yaml"
    path.write_text(block, encoding="utf-8")
    try:
        assert load(str(path)).resolve(CPU).tasks
    except SchedsearchError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize("public", schedsearch.__all__)
def test_every_public_name_is_explained(public: str) -> None:
    assert f"`{public}`" in text(DOCS / "README.md")


def test_every_tuner_and_epilogue_stage_is_named() -> None:
    page = text(DOCS / "workload-file.md")
    assert [word for word in (*TUNERS, *STAGES) if f"`{word}`" not in page] == []


def section(page: str, heading: str) -> str:
    """The text below `### heading`, up to the next heading of any level."""
    found = re.search(rf"^### `{heading}`\n(.*?)(?=^#)", page, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def knobs_of(template_name: str) -> set[str]:
    return {name for space in knob_tables.spaces_of(template_name) for name in space.names}


@pytest.mark.parametrize("template_name", BUILT_IN)
def test_every_knob_is_explained(template_name: str) -> None:
    assert all(knob.doc for space in knob_tables.spaces_of(template_name) for knob in space.knobs)


def test_the_tables_of_knobs_are_those_that_the_script_writes() -> None:
    assert {page: text(page) for page in knob_tables.pages()} == knob_tables.pages(), "run scripts/knob_tables.py"


@pytest.mark.parametrize("template_name", BUILT_IN)
def test_a_kernel_page_names_every_knob(template_name: str) -> None:
    """The page that the template's section links."""
    link = re.search(r"Details:\s\[.+?\]\((kernels/\w+\.md)", section(text(DOCS / "templates.md"), template_name))
    assert link is not None
    assert [knob for knob in knobs_of(template_name) if f"`{knob}`" not in text(DOCS / link[1])] == []


def test_the_entry_point_group_on_the_page_is_the_real_one() -> None:
    assert f'[project.entry-points."{ENTRY_POINT_GROUP}"]' in text(DOCS / "own-templates.md")


def test_decisions_are_numbered_once() -> None:
    numbers = [page.name[:3] for page in (DOCS / "decisions").glob("*.md") if page.name != "README.md"]
    assert all(number.isdigit() for number in numbers)
    assert len(set(numbers)) == len(numbers)


def test_the_index_lists_every_decision_once_with_its_title_a_date_and_a_state() -> None:
    rows = re.findall(
        r"^\| (\d{3}) \| \[(.+)\]\((.+?\.md)\) \| (\d{4}-\d\d-\d\d) \| (.+) \|$", text(DOCS / "decisions/README.md"), re.M
    )
    pages = {page.name for page in (DOCS / "decisions").glob("[0-9]*.md")}
    assert sorted(name for _, _, name, _, _ in rows) == sorted(pages)
    for number, title, name, _, _ in rows:
        assert name[:3] == number
        assert text(DOCS / "decisions" / name).startswith(f"# {title}\n")


def test_decisions_that_the_code_names_exist() -> None:
    named = {
        found
        for folder in ("schedsearch", "records", "tuner", "templates")
        for file in (ROOT / folder).rglob("*.py")
        for found in re.findall(r"docs/decisions/([\w.-]+\.md)", text(file))
    }
    assert len(named) >= 30
    assert named <= {page.name for page in (DOCS / "decisions").glob("*.md")}


def program(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / "benchmarks" / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def test_the_tables_show_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write them again: python benchmarks/render_tables.py"""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = program("render_tables.py")
    for page in tables.PAGES:
        assert tables.MARKED.findall(text(ROOT / page)), page
        assert tables.render(text(ROOT / page)) == text(ROOT / page), page


COMMANDS = sorted({found for page in PAGES for found in re.findall(r"python (benchmarks/\w+\.py)([^\n`]*)", text(page))})


@pytest.mark.parametrize(("file", "words"), COMMANDS)
def test_commands_on_the_pages_have_options_that_there_are(file: str, words: str) -> None:
    source = text(ROOT / file)
    shared = ("torch_common", "stages") if re.search(r"\b(torch_common|stages)\.options\(", source) else ()
    sources = [source, *(text(ROOT / "benchmarks" / f"{name}.py") for name in shared)]
    allowed = {option for each in sources for option in re.findall(r'add_argument\(\s*"(--[\w-]+)"', each)}
    assert set(re.findall(r"--[\w-]+", words)) <= allowed


def test_the_commands_behind_the_tables_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    arguments = importlib.import_module("conv2d_fp16").arguments
    suites = {arguments(words.split()).suite for file, words in COMMANDS if file == "benchmarks/conv2d_fp16.py"}
    assert suites == {"targets", "random", "grouped", "networks"}


def test_the_readme_has_measured_tables_only() -> None:
    assert "No data are kept" not in text(ROOT / "README.md")


def test_the_picture_shows_the_data() -> None:
    plot = program("plot_run.py")
    drawn = plot.draw(plot.read(str(ROOT / "benchmarks" / "results" / "tuning_run_h200.json"), None), 13)
    assert drawn == text(DOCS / "images" / "tuning-run.svg")
