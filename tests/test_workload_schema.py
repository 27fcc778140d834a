"""The JSON schema of workload.yaml, the examples that point at it, and what the page of it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from workload_file_support import CPU, GPU, ROOT, plain, refused

from schedsearch.measurement import MODES
from schedsearch.ops import operator, operator_names
from schedsearch.ops.registry import BUILT_IN
from schedsearch.workload_file import WorkloadFile, WorkloadFileError, json_schema, load, parse
from schedsearch.workload_file.schema import sizes


class TestJsonSchema:
    def test_the_checked_in_file_is_current(self) -> None:
        """`make docs` writes it."""
        path = ROOT / "schedsearch" / "workload_file" / "workload.schema.json"
        assert json.loads(path.read_text(encoding="utf-8")) == json_schema([operator(name) for name in BUILT_IN])

    def test_it_agrees_with_the_loader(self) -> None:
        validator = pytest.importorskip("jsonschema", reason="needs jsonschema (extra dev)").Draft202012Validator
        validator.check_schema(json_schema())
        check = validator(json_schema())
        for path in EXAMPLES:
            assert list(check.iter_errors(plain(path.read_text(encoding="utf-8")))) == [], path
        for text in refused():
            assert list(check.iter_errors(plain(text))) != [], text

    def test_every_parameter_of_every_operator_is_in_it(self) -> None:
        definitions = json_schema()["$defs"]
        for op in map(operator, operator_names()):
            assert all(parameter.schema for parameter in op.parameters().values()), "give the new parameter a schema"
            task, shape = (definitions[f"{op.name}_{part}"]["properties"] for part in ("task", "shape"))
            assert set(op.parameters()) - set(sizes(op)) <= set(task)
            assert set(sizes(op)) == set(shape)

    def test_words_that_higher_layers_own_are_the_same_here(self) -> None:
        from schedsearch.tuner import TUNERS

        schema = json_schema()["$defs"]
        assert set(TUNERS) == set(schema["TunerChoice"]["properties"]["name"]["enum"])
        assert set(schema["MeasureOptions"]["properties"]["mode"]["enum"]) == set(MODES)


EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_right_and_points_at_the_schema(path: Path) -> None:
    file = load(path)
    assert isinstance(file, WorkloadFile)
    for target in (GPU, CPU):
        assert file.resolve(target).tasks
    first = path.read_text(encoding="utf-8").splitlines()[0]
    named = re.fullmatch(r"# yaml-language-server: \$schema=(.+)", first)
    assert named
    assert (path.parent / named[1]).resolve() == ROOT / "schedsearch" / "workload_file" / "workload.schema.json"


def test_quickstart_is_two_tasks_in_at_most_a_minute() -> None:
    file = load(ROOT / "examples" / "quickstart.yaml")
    assert len(file.resolve(CPU).tasks) == 2
    assert file.target == "auto"
    assert file.budget.time_s is not None
    assert file.budget.time_s <= 60


class TestDocumentation:
    PAGE = (ROOT / "docs" / "workload-file.md").read_text(encoding="utf-8")

    def test_every_key_and_every_word_is_on_the_page(self) -> None:
        schema = json_schema()
        sections = [schema, *schema["$defs"].values()]
        words = {key for section in sections for key in section["properties"]}
        for section in sections:
            for value in section["properties"].values():
                words |= set(value.get("enum", ())) | set(value.get("items", {}).get("enum", ()))
        assert sorted(word for word in words if f"`{word}`" not in self.PAGE) == []

    def test_the_files_on_the_page_are_right(self) -> None:
        texts = [text for text in re.findall(r"```yaml\n(.*?)```", self.PAGE, re.S) if "tasks:" in text]
        assert len(texts) == 17
        for text in texts:
            assert parse(text).resolve(CPU).tasks and parse(text).resolve(GPU).tasks

    def test_the_mistakes_on_the_page_are_what_is_printed(self) -> None:
        shown = re.search(r"```text\n(.*?)```", self.PAGE, re.S)
        assert shown
        text = "targt: cpu\n\ntasks:\n  - op: conv2d\n    shape: { n: 1, h: 8, w: -8, c: 16, k: 32, r: 3, s: 3 }\n"
        with pytest.raises(WorkloadFileError) as caught:
            parse(text, "net.yaml")
        assert caught.value.render() == shown[1].rstrip()
