"""conv2d and two small operators of a package keep the operator contract. The contract finds the faults of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from plugin_support import OPERATORS, install, install_toys

from schedsearch.errors import Problem
from schedsearch.ops import ArgSpec, Op, Parameter, operator
from schedsearch.ops.conv2d import CONV2D
from schedsearch.plugins import PluginError
from schedsearch.testing.op_contract import OpContract

GOLDEN = json.loads((Path(__file__).parent / "golden_ids.json").read_text())["workloads"]
CONV = {"n": 1, "h": 8, "w": 9, "c": 8, "k": 16, "r": 3, "s": 3}


class TestConv2d(OpContract):
    op = CONV2D
    ids: ClassVar = {entry["id"]: entry["params"] for entry in GOLDEN}
    examples = (
        CONV,
        {
            **CONV,
            "stride": 2,
            "padding": [1, 2],
            "dilation": (1, 2),
            "groups": 4,
            "dtype": "bfloat16",
            "out_dtype": "float32",
        },
        {**CONV, "layout": "NCHW", "weight_layout": "OHWI", "epilogue": ["bias", "scale_shift", "residual", "relu", "clip"]},
        {**CONV, "padding": (0, 0, 1, 1), "epilogue": ["residual", "leaky_relu"]},
        {**CONV, "dtype": "float32", "precision": "tf32"},
        {**CONV, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"], "layout": "NCHW8c"},
        {**CONV, "output_layout": "NCHW", "epilogue": [{"depth_to_space": {"block": 2}}]},
        {**CONV, "layout": "NCHW8c", "slice_of": 40},
        {**CONV, "x_slice": [20, 3]},
        {**CONV, "dtype": "int8", "epilogue": ["bias", "relu", {"requantise": {"to": "uint8"}}]},
        {**CONV, "dtype": "int8", "epilogue": [{"requantise_add": {"to": "uint8", "residual": "uint8", "relu": True}}]},
        {**CONV, "dtype": "int8", "epilogue": [{"dequantise": {"to": "float16"}}, "scale_shift", "residual"]},
    )
    wrong = (
        ({**CONV, "groups": 3}, "c"),
        ({**CONV, "groups": 8, "k": 20}, "k"),
        ({**CONV, "r": 12}, "r"),
        ({**CONV, "epilogue": ["bias", "bias"]}, "epilogue"),
        ({**CONV, "dtype": "float32", "out_dtype": "float16"}, "out_dtype"),
        ({**CONV, "dtype": "int8", "out_dtype": "int8"}, "out_dtype"),
        ({**CONV, "dtype": "int8", "weight_dtype": "float16"}, "weight_dtype"),
        ({**CONV, "dtype": "int8", "epilogue": ["scale_shift"]}, "epilogue"),
        ({**CONV, "dtype": "int8", "epilogue": ["requantise", "relu"]}, "epilogue"),
        ({**CONV, "epilogue": ["requantise"]}, "epilogue"),
        ({**CONV, "epilogue": ["requantise_add"]}, "epilogue"),
        ({**CONV, "dtype": "int8", "epilogue": ["residual", "requantise_add"]}, "epilogue"),
        ({**CONV, "dtype": "int8", "epilogue": ["requantise", "requantise_add"]}, "epilogue"),
        ({**CONV, "dtype": "int8", "epilogue": [{"requantise_add": {"middle": "int32"}}]}, "epilogue"),
        ({**CONV, "dtype": "int8", "epilogue": ["requantise_add"], "out_dtype": "uint8"}, "out_dtype"),
        ({**CONV, "zero_points": ["x"]}, "zero_points"),
        ({**CONV, "dtype": "float32", "precision": "float32"}, "precision"),
        ({**CONV, "dtype": "bfloat16", "precision": "tf32"}, "precision"),
        ({**CONV, "layout": "NCHW3c"}, "c"),
        ({**CONV, "layout": "NCHW8c", "weight_layout": "OHWI"}, "weight_layout"),
        ({**CONV, "slice_of": CONV["k"] - 1}, "slice_of"),
        ({**CONV, "layout": "NCHW8c", "slice_of": 44}, "slice_of"),
        ({**CONV, "epilogue": [{"depth_to_space": {"block": 2}}], "slice_of": 64}, "slice_of"),
        ({**CONV, "x_slice": [20]}, "x_slice"),
        ({**CONV, "x_slice": [20, 13]}, "x_slice"),
        ({**CONV, "x_slice": [20, "3"]}, "x_slice"),
        ({**CONV, "layout": "NCHW8c", "x_slice": [16, 8]}, "x_slice"),
        ({**CONV, "dtype": "int8", "zero_points": ["x"], "x_slice": [20, 3]}, "x_slice"),
    )


class Toy(OpContract):
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install_toys(monkeypatch, tmp_path / "toys")
        type(self).op = operator(self.name)

    name: ClassVar[str]


class TestCopy(Toy):
    name = "copy"
    examples = (
        {"rows": 3, "columns": 5},
        {"rows": 1, "columns": 7, "transposed": True, "padding": "zeros", "dtype": "int8"},
    )
    wrong = (({"rows": 3, "columns": 2**31}, "columns"),)


class TestMinMax(Toy):
    name = "min_max"
    examples = ({"rows": 3, "columns": 5}, {"rows": 3, "columns": 5, "dtype": "float16"})


class Sloppy(Op):
    """Breaks the contract in the ways that its attribute `fault` names."""

    name, reference = "sloppy", "nowhere:Reference"

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def parameters(self) -> dict[str, Parameter]:
        return {
            "rows": Parameter.count("rows of x"),
            "order": Parameter.choice("of the rows", ("up", "down")),
        }

    def defaults(self, params: Any) -> dict[str, Any]:
        return {} if self.fault == "no default" else {"order": "up"}

    def normalise(self, params: Any) -> tuple[dict[str, Any], list[Problem]]:
        out, found = super().normalise(params)
        if self.fault == "first mistake only":
            found = found[:1]
        if self.fault == "lists" and not found:
            out["order"] = [out["order"]]
        return out, found

    def arguments(self, p: Any) -> tuple[ArgSpec, ...]:
        axes = "RC" if self.fault == "axes" else "R"
        return (ArgSpec("x", axes, (p["rows"],), "float33" if self.fault == "dtype" else "float32", aliases="z"),)

    def outputs(self, p: Any) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x" if self.fault == "names" else "y", "R", (p["rows"],), "float32"),)

    def label(self, p: Any) -> str:
        return "two\nlines" if self.fault == "label" else "sloppy"


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("first mistake only", "test_a_parameter_that_is_missing_or_unknown_is_named"),
        ("lists", "test_normalising_twice_changes_nothing"),
        ("axes", "test_arguments_and_outputs_are_consistent"),
        ("dtype", "test_arguments_and_outputs_are_consistent"),
        ("names", "test_arguments_and_outputs_are_consistent"),
        ("alias of nothing", "test_arguments_and_outputs_are_consistent"),
        ("label", "test_a_label_is_one_line"),
        ("", "test_its_reference_can_be_imported"),
        ("", "test_the_examples_give_every_optional_parameter"),
    ],
)
def test_it_finds_every_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, test: str) -> None:
    module = f"sloppy_{fault.replace(' ', '_') or test}"
    text = f"from {__name__} import Sloppy\nOP = Sloppy({fault!r})\n"
    install(monkeypatch, tmp_path / "sloppy", module, {OPERATORS: {"sloppy": f"{module}:OP"}}, {module: text})

    class Contract(OpContract):
        op = operator("sloppy")
        examples = ({"rows": 3},)

    with pytest.raises((AssertionError, PluginError)):
        getattr(Contract(), test)()
