"""Operators by name: built-in ones, those of installed packages, and the handling of broken packages."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from plugin_support import OPERATORS, TEMPLATES, install, install_toys

from schedsearch.errors import UnknownOperatorError, UnsupportedError, UsageError, WorkloadError
from schedsearch.ops import operator, operator_names
from schedsearch.ops.base import RESERVED_NAMES
from schedsearch.ops.registry import BUILT_IN, operators
from schedsearch.plugins import PluginError
from schedsearch.target import Target
from schedsearch.template import load_reference, load_template, load_templates
from schedsearch.workload import Workload
from schedsearch.workload_file.schema import TaskOptions

CPU = Target("cpu", "some CPU")
CONV = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=1, s=1)
TEMPLATE = """
from schedsearch.template import Template

class Mine(Template):
    name, op, kind = "{name}", "{op}", "cpu"

    def validate(self, workload, target):
        return "it is a test"

    def space(self, workload, target): ...
    def default(self, workload, target, space): ...
    def kernel(self, workload, target, config): ...
"""


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_toys(monkeypatch, tmp_path / "toys")


class TestInstalledOperators:
    def test_they_make_workloads(self, toys: None) -> None:
        workload = Workload("copy", {"rows": 3, "columns": 5, "dtype": "int8"})
        assert (workload.output.shape, workload.output.dtype, workload.flops, workload.min_bytes) == ((3, 5), "int8", 0, 30)
        assert workload.work.reduction == 1 and workload.constants == () and workload.scalars == ()
        assert workload.label == "copy rows=3 columns=5 dtype=int8"
        assert Workload.from_json(workload.json) == workload == pickle.loads(pickle.dumps(workload))

    def test_their_json_leaves_defaults_out(self, toys: None) -> None:
        spelt_out = {"rows": 3, "columns": 5, "transposed": False, "dtype": "float32", "padding": "none"}
        assert Workload("copy", spelt_out).json == '{"op":"copy","params":{"columns":5,"rows":3},"v":1}'

    def test_equality_is_exact_for_integers_and_rounded_for_floats(self, toys: None) -> None:
        shape = {"rows": 3, "columns": 5}
        assert operator("copy").equality(Workload("copy", {**shape, "dtype": "int8"}).params) == "exact"
        assert operator("copy").equality(Workload("copy", shape).params) == "rounded"

    def test_several_outputs_have_names_and_no_single_output(self, toys: None) -> None:
        workload = Workload("min_max", {"rows": 3, "columns": 5})
        assert [(output.name, output.shape) for output in workload.outputs] == [("low", (3,)), ("high", (3,))]
        assert workload.min_bytes == 4 * (15 + 3 + 3)
        with pytest.raises(WorkloadError, match=r"min_max has 2 outputs \(low, high\)"):
            _ = workload.output

    def test_every_mistake_in_parameters_is_reported(self, toys: None) -> None:
        with pytest.raises(WorkloadError) as caught:
            Workload("copy", {"rows": 0, "transposed": 1, "dtyp": "int8", "padding": "zero"})
        assert {problem.key: problem.message for problem in caught.value.problems} == {
            "rows": "rows must be an integer of at least 1, got 0",
            "columns": "columns (columns of x) is missing; give an integer of at least 1",
            "transposed": "transposed must be true or false, got 1",
            "dtyp": "copy has no parameter 'dtyp' (did you mean 'dtype'?); "
            "allowed: rows, columns, transposed, padding, dtype",
            "padding": "padding 'zero' is not possible (did you mean 'zeros'?); allowed: none, zeros",
        }

    def test_names_are_suggested(self, toys: None) -> None:
        assert operator_names() == [*BUILT_IN, "copy", "min_max"]
        with pytest.raises(UnknownOperatorError, match=r"unknown operator 'cpy' \(did you mean 'copy'\?\)") as caught:
            Workload("cpy", {})
        assert caught.value.op == "cpy" and isinstance(pickle.loads(pickle.dumps(caught.value)), UnknownOperatorError)

    def test_a_workload_of_an_operator_that_is_not_installed_says_so(self) -> None:
        with pytest.raises(UnknownOperatorError, match="unknown operator 'copy'; allowed: "):
            Workload.from_json('{"op":"copy","params":{"columns":5,"rows":3},"v":1}')

    def test_a_reference_is_the_operators_own(self, toys: None) -> None:
        assert type(load_reference("copy")).__module__ == "toy_operators"
        assert type(load_reference("conv2d")).__name__ == "Conv2dReference"


class TestBrokenOperators:
    def broken(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, text: str, name: str = "row_softmax"
    ) -> str:
        """The message about a package that offers `row_softmax` as OP of a module. The other operators keep working."""
        install(monkeypatch, folder / module, f"acme-{module}", {OPERATORS: {name: f"{module}:OP"}}, {module: text})
        with pytest.raises(UnknownOperatorError) as caught:
            operator(name)
        usable, problems = operators()
        assert "conv2d" in usable and problems == (caught.value.problems[0].message,)
        return problems[0]

    def test_a_package_that_fails_to_import(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        message = self.broken(monkeypatch, tmp_path, "no_import", "import a_module_that_nobody_has\n")
        assert message == (
            "operator 'row_softmax' of acme-no_import 1.0 (no_import:OP) cannot be imported: ModuleNotFoundError: "
            "No module named 'a_module_that_nobody_has'; repair, update or uninstall the package"
        )

    def test_one_whose_object_is_missing_or_something_else(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert "AttributeError" in self.broken(monkeypatch, tmp_path, "no_object", "")
        with monkeypatch.context() as context:
            assert "it is an int, not an instance" in self.broken(context, tmp_path, "no_op", "OP = 3", "other")

    @pytest.mark.parametrize(
        ("parameter", "message"),
        [
            ("output", "its parameter 'output' has a reserved name"),
            ("label", "its parameter 'label' has a reserved name"),
            ("weight", "its parameter 'weight' has a reserved name"),
            ("two words", "must be a Python name"),
            ("class", "must be a Python name"),
            ("_private", "must be a Python name"),
        ],
    )
    def test_one_with_a_parameter_that_could_not_be_read(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parameter: str, message: str
    ) -> None:
        text = f"""
        from schedsearch.ops import Op, Parameter

        class OP(Op):
            name, reference = "row_softmax", "nowhere:Reference"

            def parameters(self):
                return {{{parameter!r}: Parameter.count("something")}}

            def arguments(self, p): ...
            def outputs(self, p): ...
        """
        assert message in self.broken(monkeypatch, tmp_path, f"bad_{parameter.replace(' ', '_')}", text)

    def test_one_of_another_name_than_its_entry_point(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        message = self.broken(monkeypatch, tmp_path, "misnamed", "from schedsearch.ops.foreign import FOREIGN as OP\n")
        assert "its name is 'foreign'; entry point and `name` must agree" in message

    def test_two_that_claim_one_name(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install_toys(monkeypatch, tmp_path / "toys")
        install(monkeypatch, tmp_path / "other", "rival", {OPERATORS: {"copy": "rival_module:OP"}}, {})
        with pytest.raises(UnknownOperatorError) as caught:
            Workload("copy", {"rows": 1, "columns": 1})
        assert "2 packages offer operator 'copy': rival 1.0 (rival_module:OP) and toys 1.0" in str(caught.value)
        assert list(operators()[0]) == [*BUILT_IN, "min_max"]

    def test_a_package_that_claims_the_name_of_a_built_in_is_not_used(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        install(monkeypatch, tmp_path / "usurper", "usurper", {OPERATORS: {"conv2d": "usurper:OP"}}, {})
        assert type(operator("conv2d")).__name__ == "Conv2d"
        assert "operator 'conv2d' is built in; the one of usurper 1.0" in operators()[1][0]


class TestBrokenTemplates:
    def test_the_others_go_on_and_the_message_names_package_and_cause(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        points = {TEMPLATES: {"broken": "broken_template:Mine"}}
        install(monkeypatch, tmp_path / "acme", "acme", points, {"broken_template": "raise RuntimeError('no licence')"})
        message = "template 'broken' of acme 1.0 (broken_template:Mine) cannot be imported: RuntimeError: no licence"
        found = load_templates()
        assert "conv2d_cpu" in found and "broken" not in found
        assert message in found.problems["broken"] and message in found.why_missing("broken")
        with pytest.raises(PluginError, match="RuntimeError: no licence"):
            load_template("broken")
        with pytest.raises(UnsupportedError, match="no licence"):
            found.matching(CONV.replace(dtype="bfloat16"), CPU)

    def test_an_unknown_operator(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        text = TEMPLATE.format(name="lonely", op="conv3d")
        install(monkeypatch, tmp_path / "acme", "acme", {TEMPLATES: {"lonely": "lonely:Mine"}}, {"lonely": text})
        expected = (
            r"template 'lonely' of acme 1.0 .* is for operator 'conv3d', .* \(did you mean 'conv2d'\?\); known: conv2d"
        )
        with pytest.raises(UsageError, match=expected):
            load_template("lonely")
        assert "lonely" in load_templates().problems

    def test_an_entry_point_that_is_not_a_template(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        points = {TEMPLATES: {"number": "not_a_template:NUMBER", "renamed": "not_a_template:Mine"}}
        text = TEMPLATE.format(name="mine", op="conv2d") + "\nNUMBER = 3\n"
        install(monkeypatch, tmp_path / "acme", "acme", points, {"not_a_template": text})
        problems = load_templates().problems
        assert "it is an int, not a schedsearch.template.Template" in problems["number"]
        assert "its name is 'mine'; entry point and `name` must agree" in problems["renamed"]

    def test_two_packages_that_claim_one_name(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for package in ("one", "two"):
            install(monkeypatch, tmp_path / package, package, {TEMPLATES: {"mine": f"mine_of_{package}:Mine"}}, {})
        with pytest.raises(UsageError, match=r"2 packages offer template 'mine': two 1.0 .* and one 1.0"):
            load_template("mine")

    def test_templates_of_other_operators_only_are_named(self, toys: None) -> None:
        with pytest.raises(UnsupportedError, match=r"no template for copy is among those given: conv2d_cpu \(for conv2d\)"):
            load_templates(["conv2d_cpu"]).matching(Workload("copy", {"rows": 1, "columns": 1}), CPU)


def test_no_parameter_may_hide_an_attribute_of_a_workload_or_a_key_of_a_task() -> None:
    attributes = {name for name in dir(CONV) if not name.startswith("_")} - set(CONV.params)
    keys = {field.alias or name for name, field in TaskOptions.model_fields.items()} | {"shape", "name"}
    assert attributes | keys == RESERVED_NAMES
