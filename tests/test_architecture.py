"""A model goes through the stages of `build` in one direction, as docs/architecture.md has them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
import numpy as np  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.executable import build as driver  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("network", "network_check", "executable")
VALUES = {
    "executable.build_options", "executable.ports", "executable.program", "executable.reading", "network.facts",
    "network.graph", "network.settings",
}  # fmt: skip
"""They hold what stages hand on, and look at it; no stage is done in them twice."""
THE_NET = {"executable.fixed", "executable.noted", "executable.run", "executable.uses"}  # the last stage runs it


def documented() -> list[str]:
    """The modules of the table, in order."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = text.split("## From an ONNX file to a network that runs")[1].split("\n## ")[0]
    return re.findall(r"^\| \d+ \| `([\w.]+)` \|", section, re.M)


def called() -> list[str]:
    """The modules whose functions `fixed_net` calls with what is built, in the order of its lines."""
    modules = {
        name: value.__module__.removeprefix("schedsearch.") for name, value in vars(driver).items() if callable(value)
    }
    tree = ast.parse(inspect.getsource(driver.fixed_net))
    names = (
        (each.lineno, each.func.id)
        for each in ast.walk(tree)
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
    )
    return list(dict.fromkeys(modules[name] for _, name in sorted(names) if name in modules))


def stages_of_a_build(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """What `fixed_net` calls in a small build, in order, with the modules of `PACKAGES` that work for it."""
    weight = onnx.numpy_helper.from_array(np.ones((8, 4, 3, 3), np.float32), "w")
    port = onnx.helper.make_tensor_value_info
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        onnx.helper.make_node("Relu", ["c"], ["y"], "relu"),
    ]
    graph = onnx.helper.make_graph(nodes, "g", [port("x", 1, [1, 4, 8, 8])], [port("y", 1, [1, 8, 8, 8])], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "model.onnx")
    found: list[tuple[str, set[str]]] = []
    code = driver.fixed_net.__code__

    def note(frame: FrameType, event: str, arg: Any) -> None:
        module = str(frame.f_globals.get("__name__", "")).removeprefix("schedsearch.")
        if event != "call" or module.partition(".")[0] not in PACKAGES or frame.f_code is code:
            return
        if frame.f_back is not None and frame.f_back.f_code is code:
            found.append((module, set()))
        if found:
            found[-1][1].add(module)

    options: dict[str, Any] = {"target": "cpu", "db": folder / "none.db", "out": folder / "model.ssx"}
    schedsearch.build(folder / "model.onnx", **options).close()  # imports modules, whose lines are no work of a stage
    sys.setprofile(note)
    try:
        schedsearch.build(folder / "model.onnx", **options).close()
    finally:
        sys.setprofile(None)
    yield from found


def test_the_list_in_the_documentation_is_what_the_driver_does_in_its_order() -> None:
    stages = documented()
    assert stages[0] == "executable.build_options" and len(stages) <= 12
    assert [each for each in called() if each in stages[1:]] == stages[1:]


@pytest.mark.long
def test_no_stage_goes_back_to_a_module_that_an_earlier_one_has_left(tmp_path: Path) -> None:
    stages = documented()[1:]
    found = [(module, inside) for module, inside in stages_of_a_build(tmp_path) if module in stages]
    assert list(dict.fromkeys(module for module, _ in found)) == stages
    homes: dict[str, str] = {}
    back = []
    for stage, inside in found:
        for module in inside - VALUES - (THE_NET if stage == stages[-1] else set()):
            if homes.setdefault(module, stage) != stage:
                back.append(f"{stage} goes back to {module}, which {homes[module]} has left")
    assert back == []
    assert len({*homes, *VALUES}) > 50, "as the documentation says of a small build"


def test_stages_do_not_know_one_another() -> None:
    """No stage imports what does the work of another one; classes that say what it gets are values."""
    stages = {f"schedsearch.{each}" for each in documented()}
    values = {"BuildOptions", "ReadModel", "Executable", "NEEDS_FILES", "OF_A_NETWORK", "check_choice"}
    wrong = []
    for name in stages:
        path = ROOT / (name.replace(".", "/") + ".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in stages - {name}:
                wrong += [f"{name} imports {each.name}" for each in node.names if each.name not in values]
    assert wrong == []
