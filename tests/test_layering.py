"""Imports follow the layers of the package, and each third-party library appears only where it may.

The tests read imports from the source with `ast`, so lazy ones and those under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"schedsearch": ROOT / "schedsearch"} | {
    f"schedsearch.{name}": ROOT / name for name in ("templates", "tuner", "records")
}

# Module prefix -> layer; the longest prefix counts. A module imports from its own layer and lower ones.
LAYERS = {
    "schedsearch.closing": 0,
    "schedsearch.compat": 0,
    "schedsearch.deadline": 0,
    "schedsearch.errors": 0,
    "schedsearch.fields": 0,
    "schedsearch.leftovers": 0,
    "schedsearch.reading": 0,
    "schedsearch.config": 1,
    "schedsearch.constructors": 1,
    "schedsearch.identity": 1,
    "schedsearch.launch": 1,
    "schedsearch.launch_rules": 1,
    "schedsearch.launch_sizes": 1,
    "schedsearch.measurement": 1,
    "schedsearch.ops": 1,
    "schedsearch.plugins": 1,
    "schedsearch.progress": 0,
    "schedsearch.roofline": 1,
    "schedsearch.similar": 1,
    "schedsearch.size_table": 1,
    "schedsearch.space": 1,
    "schedsearch.target": 1,
    "schedsearch.task": 1,
    "schedsearch.text": 0,
    "schedsearch.typed": 0,
    "schedsearch.workload": 1,
    "schedsearch.backend": 2,
    "schedsearch.device": 2,
    "schedsearch.template": 2,
    "schedsearch.processes": 3,
    "schedsearch.records": 3,
    "schedsearch.templates": 3,
    "schedsearch.tuner": 3,
    "schedsearch.verification": 3,
    "schedsearch.workload_file": 3,
    "schedsearch.fleet": 4,
    "schedsearch.measure": 4,
    "schedsearch.own": 5,
    "schedsearch.c_export": 5,
    "schedsearch.replay": 5,
    "schedsearch.runtime": 5,
    "schedsearch.session": 5,
    "schedsearch.dynamic": 6,
    "schedsearch.executable": 6,
    "schedsearch.integrations": 6,
    "schedsearch.network": 6,
    "schedsearch.network_check": 6,
    "schedsearch.profiling": 6,
    "schedsearch.profiling.profile": 1,
    "schedsearch.torch": 6,
    "schedsearch.__main__": 7,
    "schedsearch.cli": 7,
    "schedsearch.dashboard": 7,
    "schedsearch.testing": 7,
}
FACADE = "schedsearch"  # its __init__ names the public objects of all layers lazily; no module inside imports it
ROOMS = ("schedsearch.templates", "schedsearch.tuner", "schedsearch.records")
HEAVY = ("numba", "llvmlite", "xgboost", "scipy", "sqlalchemy", "pydantic", "rich", "ruamel", "cuda", "torch")


@dataclass(frozen=True)
class Import:
    importer: str
    module: str  # the imported module if it belongs to the package, otherwise the name as written
    names: tuple[str, ...]  # the names of `from module import names`
    eager: bool  # runs when the importer is imported
    line: int

    def __str__(self) -> str:
        return f"{self.importer} (line {self.line}) imports {self.module}"


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


MODULES = _modules()


def _imports(name: str) -> Iterator[Import]:
    """Every import statement of a module; `from package import module` names the module."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, eager: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, (), eager, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            rest = []
            for alias in node.names:
                if f"{base}.{alias.name}" in MODULES:
                    yield Import(name, f"{base}.{alias.name}", (), eager, node.lineno)
                else:
                    rest.append(alias.name)
            if rest:
                yield Import(name, base, tuple(rest), eager, node.lineno)
        else:
            lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                lazy = True
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, ast.expr):  # holds no statement
                    yield from visit(child, eager and not lazy)

    yield from visit(ast.parse(MODULES[name].read_text(encoding="utf-8")), True)


@functools.cache
def _every_import() -> list[Import]:
    """Not made when this module is imported: every process that collects tests would parse the whole package."""
    return [item for name in sorted(MODULES) for item in _imports(name)]


@functools.cache
def _internal() -> list[Import]:
    return [item for item in _every_import() if item.module.split(".")[0] == "schedsearch"]


def _layer(module: str) -> int | None:
    parts = module.split(".")
    return next((LAYERS[prefix] for n in range(len(parts), 0, -1) if (prefix := ".".join(parts[:n])) in LAYERS), None)


def _within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _importers(library: str) -> set[str]:
    return {item.importer for item in _every_import() if item.module.split(".")[0] == library}


def test_every_module_has_a_layer() -> None:
    assert [name for name in MODULES if name != FACADE and _layer(name) is None] == []


def test_a_module_imports_from_its_own_layer_and_lower_ones_only() -> None:
    upward = []
    for item in _internal():
        if item.importer == FACADE:
            continue
        mine, theirs = _layer(item.importer), _layer(item.module)
        assert mine is not None
        if theirs is None or theirs > mine:
            upward.append(f"{item}: layer {mine} imports layer {theirs}")
    assert upward == []


def _rings() -> list[set[str]]:
    """Groups of modules each of which leads to all others of its group by imports of any kind."""
    after: dict[str, set[str]] = {name: set() for name in MODULES}
    for item in _internal():
        if item.module in after and item.module != item.importer:
            after[item.importer].add(item.module)

    @functools.cache
    def reached(start: str) -> frozenset[str]:
        found: set[str] = set()
        todo = [start]
        while todo:
            new = after[todo.pop()] - found
            found |= new
            todo += new
        return frozenset(found)

    rings = {frozenset(other for other in reached(name) if name in reached(other)) for name in MODULES}
    return [set(ring) for ring in rings if ring]


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Lazy imports and those for type checkers count, too. Pass a value, or move what both need below them."""
    assert [sorted(ring) for ring in _rings()] == []


def test_templates_tuner_and_records_never_import_one_another() -> None:
    rooms = {name: next((room for room in ROOMS if _within(name, room)), None) for name in MODULES}
    strangers = [
        str(item)
        for item in _internal()
        if (mine := rooms[item.importer]) and (theirs := rooms.get(item.module)) and mine != theirs
    ]
    assert strangers == []


def test_nothing_inside_the_package_imports_the_public_names_from_its_top() -> None:
    assert [str(item) for item in _internal() if item.module == FACADE] == []


def test_the_top_level_folders_are_imported_under_the_package() -> None:
    assert [str(item) for item in _every_import() if item.module.split(".")[0] in ("templates", "tuner", "records")] == []


def test_no_import_cycle_when_modules_load() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for item in _internal():
        if item.eager:
            graph[item.importer].add(item.module)
    graphlib.TopologicalSorter({name: after - {name} for name, after in graph.items()}).prepare()  # raises CycleError


def test_a_tuner_knows_spaces_and_results_only() -> None:
    allowed = (
        "schedsearch.tuner",
        *(f"schedsearch.{name}" for name in ("config", "errors", "identity", "space", "typed", "workload", "measurement")),
    )
    strangers = [
        str(item)
        for item in _internal()
        if _within(item.importer, "schedsearch.tuner") and not _within(item.module, *allowed)
    ]
    assert strangers == []


def test_only_the_backend_uses_more_of_numba_than_cuda_and_types() -> None:
    wrong = [
        f"{item}: {item.names}"
        for item in _every_import()
        if item.module.split(".")[0] == "numba"
        and not _within(item.importer, "schedsearch.backend")
        and not (
            _within(item.importer, "schedsearch.templates", "schedsearch.verification")
            and item.module == "numba"
            and set(item.names) <= {"cuda", "types"}
        )
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("llvmlite", ("schedsearch.backend", "schedsearch.device.cpu_link", "schedsearch.device.cpu_native")),
        ("cuda", ("schedsearch.backend", "schedsearch.device")),
        ("sqlalchemy", ("schedsearch.records",)),
        ("psycopg", ("schedsearch.records.postgresql",)),
        ("pydantic", ("schedsearch.workload_file",)),
        ("ruamel", ("schedsearch.workload_file.yaml_source", "schedsearch.workload_file.writer")),
        ("click", ("schedsearch.cli",)),
        ("rich", ("schedsearch.progress",)),
        ("distributed", ("schedsearch.fleet.client", "schedsearch.fleet.start")),
        ("starlette", ("schedsearch.dashboard.server",)),
        ("uvicorn", ("schedsearch.dashboard.server",)),
    ],
)
def test_a_library_is_used_in_its_home_only(library: str, homes: tuple[str, ...]) -> None:
    assert [name for name in sorted(_importers(library)) if not _within(name, *homes)] == []


def test_xgboost_is_imported_in_one_file_and_never_eagerly() -> None:
    uses = [item for item in _every_import() if item.module.split(".")[0] == "xgboost"]
    assert {item.importer for item in uses} == {"schedsearch.tuner.model"}
    assert [str(item) for item in uses if item.eager] == []


def test_only_the_package_for_pytorch_loads_it_eagerly() -> None:
    uses = [item for item in _every_import() if item.module.split(".")[0] == "torch"]
    assert [str(item) for item in uses if item.eager and not _within(item.importer, "schedsearch.torch")] == []


_PLAIN_DATA = ("closing", "config", "errors", "identity", "leftovers", "measurement", "text", "typed")


def test_the_folders_for_pytorch_import_earlier_ones_only() -> None:
    """Lazy imports count, too. Of the modules beside the folders, two are below them, and two are names from outside."""
    order = [
        "arguments",
        "refusal",
        "operators",
        "comparison",
        "layers",
        "networks",
        "compiler",
        "models",
        "backend",
        "forward",
    ]
    floors = {f"schedsearch.torch.{each}": place for place, each in enumerate(order)} | {"schedsearch.torch": len(order)}

    def floor(module: str) -> int | None:
        return floors.get(".".join(module.split(".")[:3]))

    uses = [(item, floor(item.importer), floor(item.module)) for item in _every_import()]
    assert [str(item) for item, own, other in uses if own is not None and other is not None and other > own] == []


def test_lookup_needs_the_standard_library_and_plain_data_only() -> None:
    """Deployment reads the best kernels on machines where nothing else is installed."""
    seen: set[str] = set()
    todo = ["schedsearch.records.lookup", "schedsearch.records"]
    while todo:
        name = todo.pop()
        seen.add(name)
        for item in _imports(name):
            if name in ("schedsearch.records", "schedsearch.measurement", "schedsearch.typed") and not item.eager:
                continue  # names that are lazy, and one that is for type checkers
            if item.module in MODULES:
                plain = item.module.removeprefix("schedsearch.") in _PLAIN_DATA
                assert plain or _within(item.module, "schedsearch.records"), str(item)
                todo += [] if item.module in seen else [item.module]
            else:
                library = item.module.split(".")[0]
                # platformdirs is small pure Python; it finds the key of this machine, unless SCHEDSEARCH_STATE_DIR is set
                assert library in sys.stdlib_module_names or (library == "platformdirs" and not item.eager), str(item)


def _loaded(code: str) -> list[str]:
    """The modules that are loaded in a fresh process after `code`, whose own output is dropped."""
    program = (
        "import contextlib, io, json, sys\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    {code}\n"
        "print(json.dumps(list(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=ROOT.anchor)
    assert result.returncode == 0, result.stderr
    modules: list[str] = json.loads(result.stdout)
    return modules


_OF_HELP = (
    "schedsearch", "schedsearch.cli", "schedsearch.compat", "schedsearch.config", "schedsearch.errors",
    "schedsearch.identity", "schedsearch.measurement", "schedsearch.plugins", "schedsearch.records",
    "schedsearch.records.formats", "schedsearch.target", "schedsearch.text", "schedsearch.tuner", "schedsearch.typed",
)  # fmt: skip
"""What the help of a command may load of the package, besides the modules of `schedsearch.cli`."""


def test_no_help_loads_more_than_the_command_line_itself_and_click() -> None:
    """One process shows the help of every command, and the version: what the least of them loads, all of them do."""
    before = {name.split(".")[0] for name in _loaded("pass")}
    loaded = _loaded(
        "import click, schedsearch.cli.main as cli\n"
        "    def show(*words):\n"
        "        try: cli.main([*words], standalone_mode=False)\n"
        "        except SystemExit: pass\n"
        "    def walk(command, *words):\n"
        "        show(*words, '--help')\n"
        "        for name in command.list_commands(None) if isinstance(command, click.Group) else ():\n"
        "            walk(command.get_command(None, name), *words, name)\n"
        "    walk(cli.main)\n"
        "    show('--version')"
    )
    assert {"schedsearch.cli.trust", "schedsearch.cli.options"} < set(loaded)  # of `records trust --help`, of `build --help`
    others = {name.split(".")[0] for name in loaded} - before - set(sys.stdlib_module_names)
    assert others - {"schedsearch", "click"} == set()
    own = [name for name in loaded if name.split(".")[0] == "schedsearch" and not name.startswith("schedsearch.cli.")]
    assert sorted(own) == sorted(_OF_HELP)
    assert "sqlite3" not in loaded and len(loaded) < 260


def test_importing_the_package_loads_none_of_its_modules() -> None:
    assert [name for name in _loaded("import schedsearch") if name.split(".")[0] == "schedsearch"] == [
        "schedsearch.compat",  # an import hook
        "schedsearch",
    ]


def test_the_public_values_load_nothing_heavy() -> None:
    loaded = _loaded(
        "import schedsearch; schedsearch.Workload, schedsearch.Config, schedsearch.Target, schedsearch.Template"
    )
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []


def test_tuning_loads_a_compiler_when_it_first_needs_one() -> None:
    """The process that measures needs none if its kernels are in the build cache, and the compilers are in others."""
    loaded = _loaded("import schedsearch.session.tune, schedsearch.measure.run_worker, schedsearch.processes.build_worker")
    assert "schedsearch.processes.build_worker" in loaded
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []


def test_deployment_never_measures() -> None:
    """What it shares with measuring is below both: verification, and processes that compile."""
    above = ("schedsearch.measure", "schedsearch.session", "schedsearch.tuner")
    assert [
        str(item) for item in _internal() if _within(item.importer, "schedsearch.runtime") and _within(item.module, *above)
    ] == []
