"""The tests that every operator must pass. A test class for an operator subclasses `OpContract` and sets its attributes.

The package that offers the operator must be installed (`pip install -e .` suffices), because workloads find it by name::

    class TestSoftmax(OpContract):
        op = SOFTMAX
        examples = ({"rows": 8, "columns": 100}, {"rows": 1, "columns": 7, "dtype": "float32"})
        wrong = (({"rows": 8, "columns": 1 << 20}, "columns"),)
"""

from __future__ import annotations

import importlib
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from schedsearch.errors import WorkloadError
from schedsearch.ops import DTYPES, Layout, Op, Parameter, decode, encode, operator
from schedsearch.ops.registry import contract_problems
from schedsearch.template import Reference, load_reference
from schedsearch.verification.inputs import draw
from schedsearch.verification.reference import CheckedReference
from schedsearch.workload import Workload, as_python
from schedsearch.workload_file import json_schema, parse

_ROLES = ("factor", "addend", "scale", "index", "data")


class OpContract:
    """The tests need neither a device nor a template.

    Attributes:
        op: the operator under test.
        examples: parameters of possible workloads. Together they give every optional parameter once.
        wrong: impossible parameters, each with the name of the parameter that the refusal has to point at.
        ids: workload ids that records already have, with their parameters. Set it once, when the operator is first
            released, and never change it.
    """

    op: ClassVar[Op]
    examples: ClassVar[Sequence[Mapping[str, Any]]]
    wrong: ClassVar[Sequence[tuple[Mapping[str, Any], str]]] = ()
    ids: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def workloads(self) -> list[Workload]:
        return [Workload(self.op.name, params) for params in self.examples]

    def mistakes(self, params: Mapping[str, object]) -> dict[str, str]:
        """Parameter -> message of a workload that is refused."""
        with pytest.raises(WorkloadError) as caught:
            Workload(self.op.name, params)
        return {problem.key: problem.message for problem in caught.value.problems}

    # ---- what it says about itself

    def test_it_keeps_the_contract(self) -> None:
        """No parameter's name hides an attribute of a workload, or a key of a task in a file."""
        assert contract_problems(self.op) == []

    def test_it_is_found_by_its_name(self) -> None:
        assert type(operator(self.op.name)) is type(self.op)

    def test_its_reference_can_be_imported(self) -> None:
        assert isinstance(load_reference(self.op.name), Reference)

    def test_every_parameter_has_a_line_of_documentation_and_a_schema(self) -> None:
        for name, parameter in self.op.parameters().items():
            assert parameter.doc and "\n" not in parameter.doc, name
            assert parameter.schema, name

    def test_the_examples_give_every_optional_parameter(self) -> None:
        given = {name for params in self.examples for name in params}
        assert set(self.op.parameters()) - given == set()

    # ---- identity

    def test_ids_are_those_of_earlier_records(self) -> None:
        assert {Workload(self.op.name, params).id: params for params in self.ids.values()} == dict(self.ids)

    def test_normalising_twice_changes_nothing(self) -> None:
        for workload in self.workloads():
            again, problems = self.op.normalise(workload.params)
            assert (again, problems) == (dict(workload.params), [])
            assert hash(tuple(again.values())) is not None  # every value is hashable

    def test_the_order_of_parameters_does_not_matter(self) -> None:
        for params in self.examples:
            assert Workload(self.op.name, dict(reversed(list(params.items())))).id == Workload(self.op.name, params).id

    def test_a_parameter_at_its_default_is_not_part_of_the_identity(self) -> None:
        for params, workload in zip(self.examples, self.workloads()):
            spelt_out = Workload(self.op.name, {**self.op.defaults(workload.params), **params})
            kept = json.loads(workload.json)["params"]
            defaults = self.op.defaults(workload.params)
            assert spelt_out.id == workload.id
            assert [name for name in kept if name in defaults and defaults[name] == workload.params[name]] == []

    def test_examples_differ(self) -> None:
        assert len({workload.id for workload in self.workloads()}) == len(self.examples)

    def test_json_and_pickle_bring_a_workload_back(self) -> None:
        for workload in self.workloads():
            assert Workload.from_json(workload.json) == workload
            assert pickle.loads(pickle.dumps(workload)) == workload

    def test_the_printed_python_makes_a_workload_again(self) -> None:
        for workload in self.workloads():
            module, text = as_python(workload)
            importlib.import_module(module)
            assert eval(text, {module.partition(".")[0]: importlib.import_module(module.partition(".")[0])}) == workload

    # ---- mistakes

    def test_a_parameter_that_is_missing_or_unknown_is_named(self) -> None:
        optional = self.op.defaults({})
        missing = {name for name in self.op.parameters() if name not in optional}
        mistakes = self.mistakes({"no_such_parameter": 1})
        assert missing | {"no_such_parameter"} <= set(mistakes)

    def test_all_impossible_values_are_reported_at_once(self) -> None:
        """Each parameter gets a value outside its schema, if the schema tells what that is."""
        broken = {
            name: self._outside(each) for name, each in self.op.parameters().items() if self._outside(each) is not None
        }
        mistakes = self.mistakes({**self.examples[0], **broken})
        assert set(broken) <= set(mistakes)
        assert all(repr(value) in mistakes[name] for name, value in broken.items()), "a message says what was given"

    def test_what_is_wrong_is_refused_where_it_is_wrong(self) -> None:
        for params, name in self.wrong:
            assert name in self.mistakes(params), params

    @staticmethod
    def _outside(parameter: Parameter) -> Any:
        schema = parameter.schema
        if "enum" in schema:
            return "no such value"
        if schema.get("type") in ("integer", "number"):
            return schema["minimum"] - 1 if "minimum" in schema else "no number"
        return 3 if schema.get("type") == "string" else None

    # ---- what is computed

    def test_arguments_and_outputs_are_consistent(self) -> None:
        for workload in self.workloads():
            arrays = (*workload.signature, *workload.outputs)
            names = [array.name for array in arrays] + [scalar.name for scalar in workload.scalars]
            assert workload.outputs and len(set(names)) == len(names), names
            assert all(name.isidentifier() for name in names), names
            for array in arrays:
                assert array.dtype in DTYPES and array.role in _ROLES, array
                assert all(isinstance(extent, int) and extent > 0 for extent in array.shape), array
                assert len(Layout.parse(array.axes).dimensions) == len(array.shape), array
            outputs = {output.name: output for output in workload.outputs}
            for argument in workload.signature:
                if argument.aliases is not None:
                    assert argument.aliases in outputs, argument
                    assert argument.nbytes == outputs[argument.aliases].nbytes, argument

    def test_shape_functions_are_possible_and_have_their_extents(self) -> None:
        for workload in self.workloads():
            outputs = {output.name: output for output in workload.outputs}
            for name in workload.shape_functions:  # raises if a declaration is wrong
                assert outputs[name].extents in outputs, name
                extents = outputs[outputs[name].extents]
                assert (extents.dtype, extents.shape) == ("int64", (len(outputs[name].shape),)), extents

    def test_work_is_counted(self) -> None:
        for workload in self.workloads():
            assert workload.flops >= 0 and workload.work.reduction >= 1
            assert workload.min_bytes >= sum(output.nbytes for output in workload.outputs if not output.extents)

    def inputs(self, workload: Workload) -> dict[str, Any]:
        """Arrays to verify with, by name of the argument, drawn as verification draws them."""
        rng, domains = np.random.default_rng(0), self.op.check_inputs(workload.params)
        return {spec.name: draw(domains[spec.name], spec.size, rng).reshape(spec.shape) for spec in workload.signature}

    def test_numbers_for_verification_are_exact_in_the_arguments_formats(self) -> None:
        for workload in self.workloads():
            assert set(self.op.check_inputs(workload.params)) == {spec.name for spec in workload.signature}
            for spec in workload.signature:
                numbers = self.inputs(workload)[spec.name]
                np.testing.assert_array_equal(decode(encode(numbers, spec.dtype), spec.dtype).astype(np.float64), numbers)

    def test_the_reference_knows_every_output(self) -> None:
        """Asks its definition in NumPy for a few elements; only verification runs its kernel."""
        for workload in self.workloads():
            reference, scalars = CheckedReference(workload), self.op.check_scalars(workload.params)
            arrays = {
                spec.name: decode(encode(numbers, spec.dtype), spec.dtype)
                for spec, numbers in zip(workload.signature, self.inputs(workload).values())
            }
            for output in workload.outputs:
                indices = np.unique([0, output.size // 2, output.size - 1])
                found = reference.points(arrays, scalars, indices, output.name)
                assert np.isfinite(found).all() or output.extents  # beyond the extents nothing is defined

    def test_scalars_for_verification_are_its_own(self) -> None:
        for workload in self.workloads():
            values = self.op.check_scalars(workload.params, 10.0)
            assert set(values) == {scalar.name for scalar in workload.scalars}
            assert all(math.isfinite(value) for value in values.values())

    def test_equality_is_a_word_that_is_known(self) -> None:
        for workload in self.workloads():
            assert self.op.equality(workload.params) in ("exact", "rounded")

    def test_a_label_is_one_line(self) -> None:
        for workload in self.workloads():
            assert workload.label and "\n" not in workload.label

    # ---- workload files

    def task(self, workload: Workload) -> dict[str, Any]:
        """The workload as a task of a workload file."""
        params: dict[str, Any] = json.loads(workload.json)["params"]
        shape = {name: params.pop(name) for name, each in self.op.parameters().items() if each.size and name in params}
        return {"op": self.op.name, "shape": shape, **params}

    def test_a_workload_file_can_hold_it(self) -> None:
        for workload in self.workloads():
            (task,) = parse(json.dumps({"tasks": [self.task(workload)]})).tasks
            assert task.workload == workload

    def test_the_json_schema_allows_it(self) -> None:
        jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
        validator = jsonschema.Draft202012Validator(json_schema([self.op]))
        for workload in self.workloads():
            assert list(validator.iter_errors({"tasks": [self.task(workload)]})) == []
