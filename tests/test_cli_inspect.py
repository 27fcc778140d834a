"""`schedsearch space`, `templates`, `workload-schema`, `doctor` and the help of every command."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
from cli_support import TINY, isolate, schedsearch
from plugin_support import OPERATORS, TEMPLATES, install, install_toys

from schedsearch import errors
from schedsearch.cli import process
from schedsearch.cli.main import COMMANDS, GROUPS, main
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.ops import operators
from schedsearch.records.store import Store
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.workload import Workload
from schedsearch.workload_file import load
from schedsearch.workload_file.starter import EXAMPLES

ROOT = Path(__file__).resolve().parents[1]
TINY_WORKLOAD = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3, dtype="float32")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    (tmp_path / "tiny.yaml").write_text(TINY)
    return tmp_path


def commands(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that runs something, with its words."""
    if isinstance(command, click.Group):
        if command.invoke_without_command:
            yield path, command
        for name in command.list_commands(click.Context(command)):
            child = command.get_command(click.Context(command), name)
            assert child is not None
            yield from commands(child, (*path, name))
    else:
        yield path, command


def _default() -> Config:
    template, target = load_template("conv2d_cpu"), detect("cpu")
    return template.default(TINY_WORKLOAD, target, template.space(TINY_WORKLOAD, target))


class TestSpace:
    def test_knobs_size_rules_and_samples_are_those_of_the_template(self) -> None:
        target = detect("cpu")
        space = load_template("conv2d_cpu").space(TINY_WORKLOAD, target)
        (shown,) = json.loads(schedsearch("space", "tiny.yaml", "--samples", 5, "--json").stdout)["spaces"]
        assert [(knob["name"], tuple(knob["values"]), knob["doc"]) for knob in shown["knobs"]] == [
            (knob.name, knob.values, knob.doc) for knob in space.knobs
        ]
        assert shown["configurations"] == space.size.count
        assert shown["constraints"] == [constraint.reason for constraint in space.constraints]
        assert len(shown["samples"]) == 5 and all(not space.check(Config(sample)) for sample in shown["samples"])

    def test_text_names_every_knob(self) -> None:
        out = schedsearch("space", "tiny.yaml").stdout
        for knob in load_template("conv2d_cpu").space(TINY_WORKLOAD, detect("cpu")).knobs:
            assert knob.name in out and knob.doc in out

    def test_a_legal_configuration_is_legal(self) -> None:
        default = _default()
        result = schedsearch("space", "tiny.yaml", "--config", default.json)
        assert result.exit_code == 0 and "legal" in result.stdout and "illegal" not in result.stdout

    def test_an_illegal_configuration_says_every_reason(self) -> None:
        default = dict(_default())
        result = schedsearch("space", "tiny.yaml", "--config", json.dumps({**default, "threads": 4096, "blok": 1}))
        assert result.exit_code == 2
        assert "4096" in result.stdout and "blok" in result.stdout

    @pytest.mark.parametrize(
        "options",
        [["--config", "{"], ["--config", "[1]"], ["--task", "2"], ["--template", "conv2d_cup"], ["--target", "tpu"]],
    )
    def test_mistakes_are_one_line(self, options: list[str]) -> None:
        result = schedsearch("space", "tiny.yaml", *options)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


class TestTemplates:
    def test_the_built_in_ones_are_listed(self) -> None:
        found = {entry["template"]: entry for entry in json.loads(schedsearch("templates", "--json").stdout)}
        assert {"conv2d_wgmma", "conv2d_mma", "conv2d_cpu"} <= set(found)
        assert found["conv2d_cpu"]["kind"] == "cpu"
        assert "conv2d_wgmma" in schedsearch("templates").stdout


class TestSchema:
    def test_the_printed_schema_is_the_one_checked_in(self, tmp_path: Path) -> None:
        result = schedsearch("workload-schema", "--output", tmp_path / "schema.json")
        assert result.exit_code == 0
        printed = json.loads(schedsearch("workload-schema").stdout)
        assert json.loads((tmp_path / "schema.json").read_text()) == printed
        assert printed == json.loads((ROOT / "schedsearch" / "workload_file" / "workload.schema.json").read_text())


class TestDoctor:
    def test_it_works_on_any_machine(self) -> None:
        report = json.loads(schedsearch("doctor", "--json").stdout)
        assert report["cpu"]["key"] == detect("cpu").key
        assert report["packages"]["numba"] and report["packages"]["numpy"]
        assert report["gpus"] or any("no GPU" in problem for problem in report["problems"])
        assert report["database"] is None
        assert schedsearch("doctor").exit_code == 0

    @pytest.mark.gpu
    def test_it_tells_of_the_gpu(self) -> None:
        report = json.loads(schedsearch("doctor", "--json").stdout)
        gpu = report["gpus"][0]
        assert gpu["compute_capability"] and gpu["clocks"]["sm_mhz"] > 0 and report["driver"]["cuda"]

    def test_the_database_is_examined(self) -> None:
        Store.open("records.db").close()
        health = json.loads(schedsearch("doctor", "--json").stdout)["database"]
        assert (health["records"], health["problems"], health["created_here"]) == (0, [], True)

    def test_a_broken_database_exits_with_6_after_the_rest(self) -> None:
        Path("broken.db").write_bytes(b"SQLite format 3\0" + b"\1" * 5000)
        result = schedsearch("doctor", "--db", "broken.db")
        assert result.exit_code == 6
        assert "numba" in result.stdout and "broken.db" in result.stderr


class TestHelp:
    def test_every_command_and_option_explains_itself(self) -> None:
        for path, command in commands():
            assert command.help, path
            for parameter in command.params:
                if isinstance(parameter, click.Option):
                    assert parameter.help, (path, parameter.name)

    def test_every_command_is_in_the_list_with_a_whole_line(self) -> None:
        out = schedsearch("--help").stdout
        assert all(re.search(rf"^  {name} +\S.*\.$", out, re.MULTILINE) for name in COMMANDS)
        assert all(f"\n{group}:\n" in out for group in GROUPS)
        assert schedsearch("--version").exit_code == 0

    def test_no_summary_is_cut_off_and_no_line_is_longer_than_80(self) -> None:
        for group in ("", "records", "runs"):
            out = schedsearch(*group.split(), "--help").stdout
            assert "..." not in re.sub(r"NAME=LEAST\.\.MOST,\.\.\.|ARGS\]\.\.\.", "", out), group
            assert max(map(len, out.splitlines())) <= 100, group
            listed = out.partition("Commands:" if group else "Tune and look:")[2].splitlines()
            assert listed and max(map(len, listed)) <= 80, group

    def test_defaults_are_shown(self) -> None:
        out = " ".join(schedsearch("records", "list", "--help").stdout.split())
        assert "[default: records.db]" in out and "[default: 50]" in out and "[default: newest]" in out

    def test_a_misspelt_command_suggests_the_right_one(self) -> None:
        for wrong, right in (("tun", "tune"), ("recods", "records"), ("dashbord", "dashboard")):
            result = schedsearch(wrong)
            assert result.exit_code == 2 and f"did you mean {right!r}?" in result.stderr


class TestInit:
    """The file is for a person: it holds what its comments say, and it tunes as it stands."""

    def test_the_file_is_complete_and_can_be_tuned(self) -> None:
        assert schedsearch("init").exit_code == 0
        text = Path("workload.yaml").read_text()
        assert "tune workload.yaml" in text and detect("auto").name in text
        planned = json.loads(schedsearch("tune", "workload.yaml", "--dry-run", "--json").stdout)
        assert [task["name"] for task in planned["tasks"]] == ["my conv2d"]

    @pytest.mark.parametrize("target", ["cpu", "h200"])
    def test_every_example_is_a_task_and_names_every_key_of_its_operator(self, target: str) -> None:
        names = [name for op in EXAMPLES for name in ("--op", op)]
        assert schedsearch("init", "all.yaml", *names, "--target", target).exit_code == 0
        file = load("all.yaml")
        assert [task.workload.op for task in file.resolve(detect(target, presets=True)).tasks] == list(EXAMPLES)
        for op, section in zip(EXAMPLES, Path("all.yaml").read_text().split("  - op: ")[1:], strict=True):
            optional = {n for n, p in operators()[0][op].parameters().items() if p.size or "default" in p.schema}
            assert all(re.search(rf"\b{name}: ", section) for name in optional), op

    def test_what_is_commented_out_holds_as_it_stands(self) -> None:
        """Every key of the file in force at once: defaults change nothing, names of templates and knobs are right."""
        names = [name for op in EXAMPLES for name in ("--op", op)]
        schedsearch("init", "all.yaml", *names, "--target", "cpu")
        plain = load("all.yaml").resolve(detect("cpu"))
        keys = "|".join(name for op in EXAMPLES for name, p in operators()[0][op].parameters().items() if not p.size)
        text = re.sub(rf"(?m)^    # (({keys}|templates|weight): )", r"    \1", Path("all.yaml").read_text())
        Path("all.yaml").write_text(text.replace("# restrict:", "restrict:"))
        changed = load("all.yaml").resolve(detect("cpu"))
        assert [task.workload for task in changed.tasks] == [task.workload for task in plain.tasks]
        assert all(task.restrict and task.templates for task in changed.tasks)
        assert schedsearch("tune", "all.yaml", "--dry-run", "--target", "cpu").exit_code == 0

    def test_no_file_is_replaced_unless_asked(self) -> None:
        Path("mine.yaml").write_text("mine")
        result = schedsearch("init", "mine.yaml")
        assert result.exit_code == 2 and "--force" in result.stderr and Path("mine.yaml").read_text() == "mine"
        assert schedsearch("init", "mine.yaml", "--force").exit_code == 0

    def test_an_operator_without_an_example_is_named_with_the_others(self) -> None:
        result = schedsearch("init", "--op", "conv3d")
        assert result.exit_code == 2 and "did you mean 'conv2d'?" in result.stderr and "softmax" in result.stderr


class TestDocumentation:
    def test_docs_cli_has_every_command_with_every_option(self) -> None:
        sections = _sections((ROOT / "docs" / "cli.md").read_text())
        missing = []
        for path, command in commands():
            text = sections.get("schedsearch " + " ".join(path), "")
            if not text:
                missing.append(" ".join(path))
            for parameter in command.params:
                if isinstance(parameter, click.Option):
                    names = [*parameter.opts, *parameter.secondary_opts]
                    missing += [
                        f"{' '.join(path)} {name}" for name in names if f"`{name}" not in text and f"/{name}`" not in text
                    ]
        assert not missing, "not in docs/cli.md under the command's heading"

    def test_docs_cli_names_no_option_that_is_gone(self) -> None:
        known = {
            "schedsearch " + " ".join(path): {
                name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
            }
            for path, command in commands()
        }
        for heading, text in _sections((ROOT / "docs" / "cli.md").read_text()).items():
            table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `--")]
            for cell in table:
                for name in (word.split()[0] for word in cell.replace("`", " ").replace("/", " ").split(",")):
                    assert name in known[heading], (heading, name)

    def test_docs_cli_explains_every_exit_code_and_no_other(self) -> None:
        raised = {error.exit_code for error in vars(errors).values() if hasattr(error, "exit_code")}
        rows = re.findall(r"^\| (\d+) \| (.+) \|$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
        assert [int(code) for code, _ in rows] == sorted(
            {0, *raised, process.BUG, process.SYSTEM_FAILED, process.READER_GONE}
        )
        assert all(len(meaning.split()) > 2 for _, meaning in rows)


def _sections(markdown: str) -> dict[str, str]:
    """Heading, without its marks and backquotes -> the text below it up to the next heading."""
    sections: dict[str, str] = {}
    heading = ""
    for line in markdown.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("#").strip().strip("`")
        else:
            sections[heading] = sections.get(heading, "") + line + "\n"
    return sections


def test_the_message_about_an_unknown_target_lists_all_targets(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    for command in (["space"], ["explain"], ["tune", "--dry-run"]):
        result = schedsearch(command[0], tmp_path / "tiny.yaml", *command[1:], "--target", "tpu")
        assert result.exit_code == 2
        several = ["cuda:N,M", "cuda:all"] if command[0] == "tune" else []
        allowed = ", ".join(["auto", "cpu", "cuda", "cuda:N", *several, *PRESETS])
        assert f"target 'tpu' is not known (did you mean 'cpu'?); allowed: {allowed}" in result.stderr
    result = schedsearch("tune", tmp_path / "tiny.yaml", "--target", "h200")
    assert result.exit_code == 2 and result.stderr.strip().endswith("allowed: auto, cpu, cuda, cuda:N, cuda:N,M, cuda:all")
    assert "target 'h200' stands for a device that may be absent, but a real device is needed here" in result.stderr


def test_without_a_driver_no_message_suggests_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works without a driver, both with CUDA's bindings, which cannot find libcuda, and without them."""
    from schedsearch.device import cuda_driver

    monkeypatch.setattr(cuda_driver, "_has_driver", lambda: False)
    for bindings in (None, _NoLibrary("bindings")):
        cuda_driver.bindings.cache_clear()
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        problems = json.loads(schedsearch("doctor", "--json").stdout)["problems"]
        tuned = schedsearch("tune", ROOT / "examples" / "quickstart.yaml", "--target", "cuda")
        assert tuned.exit_code == 3
        for text in (problems[0], tuned.stderr):
            assert "no NVIDIA driver" in text and "cu13" not in text
    cuda_driver.bindings.cache_clear()


class _NoLibrary(ModuleType):
    class driver:  # as cuda.bindings calls it
        @staticmethod
        def cuInit(flags: int) -> None:
            raise RuntimeError("Failure finding libcuda")


class TestInstalledPackages:
    """Operators and templates of other packages on the command line."""

    COPY = "tasks: [{op: copy, shape: {rows: 3, columns: 5}, templates: [conv2d_cpu]}]"

    def test_templates_of_another_operator_are_named_as_such(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        install_toys(monkeypatch, folder / "toys")
        (folder / "copy.yaml").write_text(self.COPY)
        result = schedsearch("space", "copy.yaml", "--target", "cpu")
        assert result.exit_code == 2
        assert "copy.yaml:1:50: no template can run copy rows=3 columns=5" in result.stderr
        assert "no template for copy is among those given: conv2d_cpu (for conv2d)" in result.stderr

    def test_a_package_that_fails_is_a_warning(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        points = {TEMPLATES: {"broken": "gone_module:Template"}, OPERATORS: {"row_softmax": "gone_module:OP"}}
        install(monkeypatch, folder / "acme", "acme", points, {})
        cause = "of acme 1.0 (gone_module:{}) cannot be imported: ModuleNotFoundError: No module named 'gone_module'"
        listed = schedsearch("templates")
        assert listed.exit_code == 0 and "conv2d_cpu" in listed.stdout
        assert f"warning: template 'broken' {cause.format('Template')}" in listed.stderr
        printed = schedsearch("workload-schema")
        assert printed.exit_code == 0 and json.loads(printed.stdout)["properties"]["tasks"]["items"]
        assert f"warning: operator 'row_softmax' {cause.format('OP')}" in printed.stderr

    def test_the_schema_includes_installed_operators(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        install_toys(monkeypatch, folder / "toys")
        assert "copy_task" in json.loads(schedsearch("workload-schema").stdout)["$defs"]
