"""Code and command lines on the pages work: Python runs block after block, and commands have options that exist."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from page_support import ROOT, Page
from runtime_support import CPU_WORKLOAD, operands, tuned_database
from test_readme import save_model

import schedsearch
from schedsearch.cli.main import COMMANDS, main
from schedsearch.errors import DeviceError
from schedsearch.records import Store
from schedsearch.target import PRESETS, Target
from schedsearch.workload_file import load

selectors = importlib.import_module("schedsearch.device.detect")
DOCS = ROOT / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): Page(page.relative_to(DOCS).as_posix()) for page in sorted(DOCS.rglob("*.md"))}
PAGES["../README.md"] = Page("../README.md")

CHECKED = (click.Choice, click.types.IntParamType, click.types.FloatParamType)  # values that need no file

# Pages whose blocks are files and commands of one story, and the tests that live through it.
STORIES = {
    "../README.md": "test_readme.py",
    "assistants.md": "test_assistants.py",
    "c.md": "test_c_export.py",
    "first-hour.md": "test_first_hour.py",
    "operators.md": "test_third_party_operator.py",
    "own-kernels.md": "test_own_kernels_deployed.py",
    "own-templates.md": "test_third_party_template.py",
}


@dataclass(frozen=True)
class Program:
    """The Python blocks of a page as one program.

    Attributes:
        before: makes what the page takes for granted: names, and files in the working directory. It may patch.
        left_out: text of a block -> why it does not run here.
        marks: of the test.
    """

    before: Callable[[pytest.MonkeyPatch], dict[str, Any]] = lambda patch: {}
    left_out: Mapping[str, str] = field(default_factory=dict)
    marks: Sequence[pytest.MarkDecorator] = ()


def few_trials(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A workload; searches end early."""
    search = schedsearch.tune
    patch.setattr(schedsearch, "tune", lambda *given, **options: search(*given, **{**options, "trials": 2}))
    return {"workload": CPU_WORKLOAD}


def recorded(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """records.db, in which a workload is tuned, and its arguments."""
    tuned_database(Path.cwd())
    x, weight, bias = operands()
    return {"schedsearch": schedsearch, "wl": CPU_WORKLOAD, "x": x, "weight": weight, "bias": bias}


def model(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """model.onnx, its input, and a database without records."""
    save_model(Path("model.onnx"), c=3, size=224)
    Store.open("records.db").close()
    return {"x": np.ones((1, 3, 224, 224), np.float32), "target": PRESETS["h200"]}  # which plans are for


def models_of_any_batch(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """detector.onnx and its input, and a network of a range of batches."""
    save_model(Path("detector.onnx"), batch="n")
    schedsearch.build("detector.onnx", dynamic={"n": (1, 8)}, out="resnet50.ssx")
    photos = np.ones((8, 8, 14, 14), np.float32)
    return {"photos": photos, "eight_photos": photos}


def torch_model(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A model with records for its layers, and the tensors of the functions."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")
    sst = importlib.import_module("schedsearch.torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.ReLU()).eval()
    example = torch.randn(1, 8, 12, 12)
    with torch.no_grad():
        sst.optimize_(copy.deepcopy(model), example, db="records.db", tune=True, trials=1)
    x, weight = torch.randn(2, 8, 9, 9), torch.randn(4, 8, 3, 3)
    tensors = {"x": x, "weight": weight, "bias": torch.randn(4), "residual": torch.randn(2, 4, 9, 9)}
    return {"model": model, "example": example, **tensors, "filters": torch.randn(8, 1, 3, 3, requires_grad=True)}


def workload_file(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    Path("net.yaml").write_text(PAGES["workload-file.md"].files()["net.yaml"], encoding="utf-8")
    return {}


def loop(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a loop of one's own around a tuner needs."""
    rounds = iter(range(3))
    return {
        "budget_left": lambda: next(rounds, None) is not None,
        "measure": lambda config: 1000.0 * config["bm"],
        "earlier_results": [],
    }


LONG, INTEGRATIONS = [pytest.mark.long], [pytest.mark.integrations]
PROGRAMS = {
    "concepts.md": Program(few_trials, marks=LONG),
    "dynamic-shapes.md": Program(models_of_any_batch, {"with_dynamic(": "float16 needs a GPU"}, LONG),
    "fleet.md": Program(left_out={"cuda:all": "needs several GPUs"}),
    "kernels/depthwise.md": Program(),
    "kernels/layout_transform.md": Program(),
    "networks.md": Program(model, marks=LONG),
    "pytorch.md": Program(torch_model, {"resnet50().eval().half().cuda()": "needs a GPU and torchvision"}, INTEGRATIONS),
    "records.md": Program(recorded, marks=LONG),
    "reference/errors.md": Program(recorded, marks=LONG),
    "reference/kernels.md": Program(recorded, marks=LONG),
    "reference/tuning.md": Program(few_trials, marks=LONG),
    "reference/workloads.md": Program(lambda patch: {"schedsearch": schedsearch}),
    "search.md": Program(loop, {"tune_kernel(": "test_kernel_tuner_strategy.py runs it"}),
    "sequences.md": Program(torch_model, marks=INTEGRATIONS),
    "workload-file.md": Program(workload_file),
}


def test_every_page_with_python_is_run() -> None:
    pages = {name for name, page in PAGES.items() if page.blocks("python")}
    assert pages == PROGRAMS.keys() | STORIES.keys()
    assert not PROGRAMS.keys() & STORIES.keys()
    for name, file in STORIES.items():
        assert Path(name).name in (ROOT / "tests" / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [pytest.param(name, marks=program.marks) for name, program in PROGRAMS.items()])
def test_a_page_is_a_program(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(ordinal: int) -> Target:
        raise DeviceError("hidden by this test")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(selectors, "_detect_cuda", absent)  # the arrays of the pages are NumPy's
    program = PROGRAMS[name]
    for text in program.left_out:
        assert any(text in block for block in PAGES[name].blocks("python"))
    PAGES[name].run(program.before(monkeypatch), program.left_out)


def mistake(words: list[str]) -> str:
    """What is wrong with the words after `schedsearch`; empty if nothing is."""
    command: click.Command = main
    while isinstance(command, click.Group) and words and not words[0].startswith(("-", "[")):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            return f"there is no command {words[0]}"
        command, words = found, words[1:]
    options = {name: option for option in command.params for name in (*option.opts, *option.secondary_opts)}
    for word, value in zip(words, [*words[1:], ""]):
        name = word.partition("=")[0]
        option = options.get(name)
        if name.startswith("-") and option is None and name != "--help":
            return f"{command.name} has no option {name}"
        if isinstance(option, click.Option) and isinstance(option.type, CHECKED) and not option.is_flag and value.islower():
            try:
                option.type.convert(value, option, None)
            except click.BadParameter as error:
                return error.format_message()
    return ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("tune a.yaml --trails 8", "tune has no option --trails"),
        ("records best --json --db=a.db", ""),
        ("records besst", "there is no command besst"),
        ("records export a --format onnx", "Invalid value for '--format': 'onnx' is not one of"),
    ],
)
def test_mistakes_in_a_command_line_are_found(line: str, said: str) -> None:
    assert (mistake(line.split()) or "nothing").startswith(said or "nothing")


@pytest.mark.parametrize("name", PAGES)
def test_commands_have_options_that_there_are(name: str) -> None:
    lines = [(number, words) for number, words in PAGES[name].commands_of("schedsearch") if is_command(words)]
    found = [f"{name}:{number}: {said}" for number, words in lines if (said := mistake(words))]
    assert found == []


def is_command(words: list[str]) -> bool:
    """Whether these are not prose, or a pattern such as `schedsearch COMMAND [OPTIONS]`."""
    return words[0] in COMMANDS or (any(word.startswith("-") for word in words) and not words[0].isupper())


def test_examples_that_are_scripts_have_options_that_there_are() -> None:
    lines = [line for file in (ROOT / "examples").rglob("*.sh") for line in file.read_text(encoding="utf-8").splitlines()]
    commands = [found[1].split() for line in lines if (found := re.search(r"^[^#]*\bschedsearch ([^;]+)", line))]
    assert len(commands) == 3
    assert [said for words in commands if (said := mistake(words))] == []


def test_what_other_commands_name_exists() -> None:
    lines = [line for page in PAGES.values() for _, line in page.lines()]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {found for line in lines for found in re.findall(r"^make ([a-z][a-z-]*)(?=$| +[A-Z#])", line)}
    assert len(targets) > 10
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    extras = ConfigParser()
    extras.read(ROOT / "setup.cfg")
    named = {
        extra for line in lines for found in re.findall(r"pip install .*\[([\w,-]+)\]", line) for extra in found.split(",")
    }
    assert len(named) > 5
    assert named <= extras["options.extras_require"].keys()
    files = {found for line in lines for found in re.findall(r"^(?:python|sh) ((?:benchmarks|examples|scripts)/\S+)", line)}
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_tasks_of_one_line_are_tasks(tmp_path: Path) -> None:
    tasks = [
        f"  - {{ {found[1]} }}"
        for page in PAGES.values()
        for _, line in page.lines()
        if (found := re.match(r"[\w ]+: +(op: \w+, .+)", line))
    ]
    assert len(tasks) > 10
    path = tmp_path / "page.yaml"
    path.write_text("\n".join(["tasks:", *tasks]), encoding="utf-8")
    assert len(load(str(path)).resolve(PRESETS["h200"]).tasks) == len(tasks)
