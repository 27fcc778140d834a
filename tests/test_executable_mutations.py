"""A trusted model.ssx of several or of computed sizes whose program was changed computes the same, or is refused.

Changed programs run in processes of their own: one that is wrongly accepted may write anywhere, or never end.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_environment import child_environment

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from cli_support import isolate  # noqa: E402
from test_executable_check import CHANGES, changed, places  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.executable.program import unseal  # noqa: E402

pytestmark = pytest.mark.long  # builds networks and runs some hundred programs

LIMIT_S = 30  # of one program; it takes a tenth of a second

# Reads lines of JSON: the number of a program, and the program. Writes the number, and what became of it.
RUNNER = f"""
import json, resource, signal, sys
import numpy as np, schedsearch
from schedsearch.device import open_device
from schedsearch.errors import SchedsearchError
from schedsearch.executable.check import readable
from schedsearch.identity import canonical_json
path, kind = sys.argv[1:3]
given = np.load(sys.argv[3])
calls = [
    ([given[f"x{{n}}_{{i}}"] for i in range(int(given["inputs"]))], given[f"y{{n}}"]) for n in range(int(given["calls"]))
]
soft, hard = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, hard))

def opened(program):
    device = schedsearch.detect("cpu")
    with readable(path):
        if kind == "sized":
            from schedsearch.executable.sized import SizedNet, StoredBundle
            return SizedNet(StoredBundle(path, canonical_json(program)), open_device(device))
        from schedsearch.dynamic.executable import DynamicExecutable
        from schedsearch.dynamic.file import stored_bundle
        return DynamicExecutable(stored_bundle(path, program), open_device(device))

def result_of(net, xs):
    found = net(*xs)
    return found[0][tuple(map(slice, found[1]))] if isinstance(found, tuple) else found

for line in sys.stdin:
    number, program = json.loads(line)
    print(number, end=" ", flush=True)
    signal.alarm({LIMIT_S})
    try:
        with opened(program) as net:
            same = True
            for xs, y in calls:
                found = result_of(net, xs)
                same = same and found.shape == y.shape and found.dtype == y.dtype and np.allclose(found, y, 1e-5, 1e-5)
        print("right" if same else "wrong", flush=True)
    except SchedsearchError as error:
        assert "\\n" not in str(error), error
        print("refused", flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A file, its program, and calls with what they give by onnx's evaluator."""

    kind: str
    path: Path
    calls: list[tuple[list[Any], Any]]

    def program(self) -> dict[str, Any]:
        with sqlite3.connect(self.path) as connection:
            return unseal(connection.execute("SELECT program FROM executable").fetchone()[0], required=True)

    def outcomes(self, programs: list[Any], folder: Path) -> tuple[list[str], str]:
        """What became of each program: right, wrong, refused or, if the process ended or took too long, ended; and what the
        processes wrote to stderr."""
        arrays = {f"y{n}": y for n, (_, y) in enumerate(self.calls)}
        arrays |= {f"x{n}_{i}": x for n, (xs, _) in enumerate(self.calls) for i, x in enumerate(xs)}
        np.savez(folder / "calls.npz", calls=len(self.calls), inputs=len(self.calls[0][0]), **arrays)
        found: list[str] = []
        errors = ""
        while len(found) < len(programs):
            lines = "".join(f"{json.dumps([n, each])}\n" for n, each in enumerate(programs) if n >= len(found))
            done = subprocess.run(
                [sys.executable, "-c", RUNNER, self.path, self.kind, folder / "calls.npz"],
                input=lines, capture_output=True, text=True, env=child_environment(), timeout=800,
            )  # fmt: skip
            answers = [line.split() for line in done.stdout.splitlines()]
            found += [words[1] if len(words) > 1 else "ended" for words in answers]
            if done.returncode:
                errors += f"{done.returncode}: {done.stderr[-1500:]}\n"
                assert answers, errors
        return found, errors


def chain(*nodes: Any, inputs: Any, output: Any, weights: Any) -> Any:
    graph = onnx.helper.make_graph(list(nodes), "small", inputs, [output], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)


def model(kind: str) -> Any:
    """relu(x @ w), or a window of relu(x + bias) whose positions are computed."""
    make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    single, integer = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    if kind == "sized":
        weight = onnx.numpy_helper.from_array(np.arange(20, dtype=np.float32).reshape(5, 4) - 8, "w")
        nodes = make("MatMul", ["x", "w"], ["product"]), make("Relu", ["product"], ["y"])
        return chain(*nodes, inputs=[info("x", single, ["n", 5])], output=info("y", single, ["n", 4]), weights=[weight])
    bias = onnx.numpy_helper.from_array(np.arange(5, dtype=np.float32) - 2, "b")
    nodes = make("Add", ["x", "b"], ["sum"]), make("Relu", ["sum"], ["r"]), make("Slice", ["r", "begin", "end"], ["y"])
    inputs = [info("x", single, ["n", 5]), *(info(name, integer, [2]) for name in ("begin", "end"))]
    return chain(*nodes, inputs=inputs, output=info("y", single, [None, None]), weights=[bias])


@pytest.fixture(scope="module", params=["sized", "exact", "bounded"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp(request.param)
    made = model(request.param)
    onnx.save(made, folder / "model.onnx")
    evaluator, calls = onnx.reference.ReferenceEvaluator(made), []
    for n in (1, 2, 3):
        xs = [np.random.default_rng(n).integers(-4, 5, (n, 5)).astype(np.float32)]
        xs += [] if request.param == "sized" else [np.array([0, 1]), np.array([n, 4])]
        names = [each.name for each in made.graph.input]
        calls.append((xs, np.asarray(evaluator.run(None, dict(zip(names, xs)))[0])))
    with pytest.MonkeyPatch.context() as patch:
        isolate(folder, patch)
        options: dict[str, Any] = {} if request.param == "sized" else {"way": request.param}
        schedsearch.build_dynamic(
            folder / "model.onnx", {"n": (1, 3)}, db=folder / "none.db", target="cpu", out=folder / "model.ssx", **options
        ).close()
        yield Case(request.param, folder / "model.ssx", calls)


def at(data: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        data = data[key]
    return data


def put(data: Any, place: tuple[str | int, ...], value: Any) -> Any:
    data = json.loads(json.dumps(data))
    at(data, place[:-1])[place[-1]] = value
    return data


def mutations(good: Any, rng: random.Random) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """Programs with one change: of each place to something of another kind or size, and to what another place has."""
    found = [(place, at(good, place)) for place in places(good)]
    for place, value in found:
        others = [each for _, each in found if type(each) is type(value) and each != value]
        for change in dict.fromkeys((rng.choice(CHANGES), "type", *(CHANGES if isinstance(value, int) else ()))):
            yield place, change, changed(good, place, change)
        if others:
            yield place, (other := rng.choice(others)), put(good, place, other)


def is_free(place: tuple[str | int, ...]) -> bool:
    """Whether numbers depend on a place in a way that nothing but the checksum can know: which array or weight a call reads,
    or the value of a number."""
    return bool({"scalars", "buffers", "weights", "inputs", "outputs", "constants", "arrays"} & {*map(str, place)})


def test_a_program_with_one_change_is_refused_or_computes_the_same(case: Case, tmp_path: Path) -> None:
    good = case.program()
    tried = [each for each in mutations(good, random.Random(0)) if each[2] != good]
    found, errors = case.outcomes([good, *(program for _, _, program in tried)], tmp_path)
    assert found[0] == "right"
    outcome_of = list(zip(tried, found[1:], strict=True))
    assert [each[:2] for each, outcome in outcome_of if outcome == "ended"] == [], errors
    if case.kind == "sized":  # in the others nothing says which words of the block of sizes are whose
        assert [each[:2] for each, outcome in outcome_of if outcome == "wrong" and not is_free(each[0])] == []
    assert found.count("refused") > len(found) // 2
