"""Third-party packages as an installer leaves them: modules and entry-point metadata, in a folder on `sys.path`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

OPERATORS, TEMPLATES = "schedsearch.ops", "schedsearch.templates"

# Two small operators: `copy` has no weight and no arithmetic, `min_max` has two outputs.
TOY_OPS = '''
from schedsearch.ops import ArgSpec, Op, Parameter


class Copy(Op):
    """y = x, transposed if asked."""

    name = "copy"
    reference = "{module}:CopyReference"

    def parameters(self):
        return {{
            "rows": Parameter.count("rows of x"),
            "columns": Parameter.count("columns of x"),
            "transposed": Parameter("whether y is x transposed; default false", {{"type": "boolean", "default": False}}),
            "padding": Parameter("what lies around x; default none", {{"enum": ["none", "zeros"], "default": "none"}}),
            "dtype": Parameter.choice("of x and y; default float32", ("float32", "float16", "int8")),
        }}

    def arguments(self, p):
        return (ArgSpec("x", "RC", (p["rows"], p["columns"]), p["dtype"]),)

    def outputs(self, p):
        shape = (p["columns"], p["rows"]) if p["transposed"] else (p["rows"], p["columns"])
        return (ArgSpec("y", "CR" if p["transposed"] else "RC", shape, p["dtype"]),)


class MinMax(Op):
    """Smallest and largest element of each row."""

    name = "min_max"
    reference = "{module}:MinMaxReference"

    def parameters(self):
        return {{
            "rows": Parameter.count("rows of x"),
            "columns": Parameter.count("columns of x"),
            "dtype": Parameter.choice("of x and both results; default float32", ("float32", "float16")),
        }}

    def arguments(self, p):
        return (ArgSpec("x", "RC", (p["rows"], p["columns"]), p["dtype"]),)

    def outputs(self, p):
        return tuple(ArgSpec(name, "R", (p["rows"],), p["dtype"]) for name in ("low", "high"))


COPY, MIN_MAX = Copy(), MinMax()


def __getattr__(name):
    """The references, made when asked for: an operator is described without them."""
    from schedsearch.template import Reference

    if name not in ("CopyReference", "MinMaxReference"):
        raise AttributeError(name)

    class Naive(Reference):
        def kernel(self, workload, target):
            raise NotImplementedError

        def points(self, workload, arrays, scalars, flat_indices, output):
            x = arrays["x"] if workload.dtype == "int8" else arrays["x"].astype("float64")
            if workload.op == "min_max":
                return (x.min(1) if output == "low" else x.max(1))[flat_indices]
            return (x.T if workload.transposed else x).reshape(-1)[flat_indices]

    return Naive
'''


def install(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    package: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str],
    version: str = "1.0",
) -> None:
    """Puts a package into `folder` and the folder on `sys.path`.

    Args:
        entry_points: group -> name -> "module:object".
        modules: name -> source text. Names must not repeat within a test run, as modules stay imported.
    """
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [
        line
        for group, points in entry_points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(folder))


def install_toys(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str = "toy_operators") -> None:
    """A package `toys` with the operators `copy` and `min_max`."""
    points = {OPERATORS: {"copy": f"{module}:COPY", "min_max": f"{module}:MIN_MAX"}}
    install(monkeypatch, folder, "toys", points, {module: TOY_OPS.format(module=module)})
