"""Inputs that decide a branch: numbers of the command line, truths, and what the comparison with the model draws."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")

from cli_support import main  # noqa: E402
from click.testing import CliRunner, Result  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.errors import UsageError  # noqa: E402

X = np.arange(1, 4, dtype=np.float32)


def branch(name: str, factor: int) -> str:
    """x times a number, after so many nodes that not both branches are computed."""
    names = ["x", *(f"{name}{number}" for number in range(52))]
    steps = "\n".join(f"{after} = Neg({before})" for before, after in itertools.pairwise(names))
    constant = f"{name}f = Constant <value = float {{{factor}.0}}> ()"
    return f"{name}_body () => (float[3] {name}) {{ {steps}\n{constant}\n{name} = Mul({names[-1]}, {name}f) }}"


def net_of(inputs: str, nodes: str, folder: Path) -> schedsearch.Net:
    text = f'<ir_version: 8, opset_import: ["" : 17]> net (float[3] x, {inputs}) => (float[3] y) {{ {nodes} }}'
    onnx.save(onnx.parser.parse_model(text), folder / "net.onnx")
    return schedsearch.build(folder / "net.onnx", target="cpu", db=folder / "r.db", out=folder / "net.ssx", progress=False)


def run(folder: Path, *inputs: str) -> Result:
    words = [word for each in inputs for word in ("--input", each)]
    output = str(folder / "y.npy")
    return CliRunner().invoke(main, ["run", str(folder / "net.ssx"), *words, "--repeat", "0", "--output", output])


@pytest.mark.parametrize(("outer", "inner"), ["kl", "lk"])
@pytest.mark.long
def test_all_combinations_of_truths_are_compared_with_the_model(outer: str, inner: str, tmp_path: Path) -> None:
    then = f"r = If ({inner}) <then_branch = {branch('a', 3)}, else_branch = {branch('b', 5)}>"
    nodes = f"y = If ({outer}) <then_branch = then () => (float[3] r) {{ {then} }}, else_branch = {branch('c', 7)}>"
    with net_of("bool k, bool l", nodes, tmp_path) as net:
        assert net.checked and not net.untaken


def test_truths_are_bool_or_numbers(tmp_path: Path) -> None:
    nodes = f"y = If (k) <then_branch = {branch('a', 3)}, else_branch = {branch('b', 5)}>"
    with net_of("bool k", nodes, tmp_path) as net:
        for number in (1, 0):
            for dtype in (np.bool_, np.uint8):
                np.testing.assert_array_equal(net(X, np.array(number, dtype)), (3 if number else 5) * X)
        with pytest.raises(UsageError, match="k has dtype float32, the kernel takes uint8"):
            net(X, np.array(1, np.float32))
    np.save(tmp_path / "x.npy", X)
    for text, factor in (("1", 3), ("true", 3), ("0", 5)):
        done = run(tmp_path, f"x={tmp_path / 'x.npy'}", f"k={text}")
        assert done.exit_code == 0, done.output
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), factor * X)


def test_a_number_that_is_none_of_the_input_is_refused(tmp_path: Path) -> None:
    condition = "t = Constant <value = int64 {2}> () c = Equal(k, t)"
    nodes = f"{condition} y = If (c) <then_branch = {branch('a', 3)}, else_branch = {branch('b', 5)}>"
    net_of("int64 k", nodes, tmp_path).close()
    for text, message in (
        ("2.5", "2.5 has numbers of float64, but k is int64; allowed: whole numbers"),
        ("9" * 20, f"but k is int64; allowed: {-(2**63)} to {2**63 - 1}"),
        ("two", "two is not a file; give an array that numpy.save wrote, numbers such as 1 or 0.5,2"),
        ("", "k= has no value; give numbers, e.g. k=1, or a file: k=FILE.npy"),
        ("1,2", "k has shape (2,); allowed: shape ()"),
    ):
        done = run(tmp_path, f"k={text}")
        assert done.exit_code == 2 and message in done.output, done.output
