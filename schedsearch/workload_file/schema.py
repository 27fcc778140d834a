"""What a workload file may hold: keys, kinds of values and defaults, as pydantic models and as JSON Schema.

The values of an operator's parameters (shape, stride, dtype ...) are judged by the operator itself; here stand only their
names and, for editors, their JSON Schema.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
)
from pydantic.fields import FieldInfo

from schedsearch.errors import did_you_mean
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB, MODES
from schedsearch.ops import operator, operator_names
from schedsearch.ops.base import MAX_INT

VERSION = 1
TUNER_NAMES = ("xgb", "ga", "annealing", "random", "grid")  # the keys of tuner.TUNERS, which is of a higher layer
AUTO = "auto"  # as dtype: float16 on a GPU, float32 on a CPU


@dataclass(frozen=True)
class Expect:
    """What a value must be, as error messages put it after "must be".

    Attributes:
        choices: words to suggest from.
        item: what a single item of a list or mapping must be; `text` unless given.
    """

    text: str
    choices: tuple[str, ...] = ()
    item: str = ""


def parse_duration_s(value: object) -> float:
    """Seconds of a duration: a positive number of seconds, or text such as '90s', '10m', '1h30m', '1.5h'.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        number = r"(\d+(?:\.\d+)?)"
        match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", str(value).replace(" ", ""))
        if not isinstance(value, str) or not match:
            raise ValueError(f"{value!r} is no duration; e.g. 90s, 10m, 1h30m")
        hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = 3600 * hours + 60 * minutes + rest
    if not 0 < seconds < math.inf:
        raise ValueError(f"{value!r} is no duration above zero; e.g. 90s, 10m, 1h30m")
    return seconds


def _check_ints(value: Any) -> Any:
    """No size above 2**31-1: launch parameters and grid extents are 32-bit."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int) and item > MAX_INT:
            raise ValueError
    return value


def _check_target(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise ValueError
    return value


def _one_or_more(value: Any) -> Any:
    """A single knob value is a list of one."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, (int, str)) for item in values):  # bool is an int
        raise ValueError
    return values


_DURATION_SCHEMA = {
    "anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": r"^ *\d[\d.hms ]*$"}],
    "examples": ["90s", "10m", "1h30m"],
}
_KNOB_VALUE = {"type": ["integer", "string", "boolean"]}

Duration = Annotated[
    float,
    BeforeValidator(parse_duration_s),
    WithJsonSchema(_DURATION_SCHEMA),
]
KnobValues = Annotated[
    list[int | str | bool],
    BeforeValidator(_one_or_more),
    WithJsonSchema({"anyOf": [_KNOB_VALUE, {"type": "array", "minItems": 1, "items": _KNOB_VALUE}]}),
]
Name = Annotated[str, Field(min_length=1)]
_DURATION = Expect("a duration above zero: seconds, or e.g. 90s, 10m, 1h30m")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class Budget(Section):
    """How much to measure; the run ends when either is used up."""

    trials: Annotated[int | None, Field(ge=1, le=10**9), Expect("a whole number from 1 to 1,000,000,000")] = Field(
        default=None,
        description="trials per task; all tasks of a run share the sum; no limit when only a time is given, else 64",
    )
    time_s: Annotated[Duration | None, _DURATION] = Field(
        default=None, alias="time", description="wall time of the whole run; no limit unless given"
    )


class TunerChoice(Section):
    """How configurations are proposed."""

    name: Annotated[
        Literal["xgb", "ga", "annealing", "random", "grid"], Expect(f"one of {', '.join(TUNER_NAMES)}", TUNER_NAMES)
    ] = Field(default="xgb", description="xgb (models), ga (genetic), annealing, random or grid")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), Expect("a whole number from 0 to 4294967295")] = Field(
        default=0, description="of the tuner's random numbers"
    )


class MeasureOptions(Section):
    """How a candidate is built and timed; None leaves the choice to schedsearch.measure."""

    mode: Annotated[Literal["cold-graph-v1", "hot-graph-v1"], Expect(f"one of {', '.join(MODES)}", MODES)] = Field(
        default=COLD_GRAPH,  # type: ignore[arg-type]  # the constant is a plain str; the test of defaults checks it
        description="cold-graph-v1 (operands out of cache) or hot-graph-v1",
    )
    timeout_s: Annotated[Duration | None, _DURATION] = Field(
        default=None, alias="timeout", description="for verifying and timing one candidate"
    )
    build_timeout_s: Annotated[Duration | None, _DURATION] = Field(
        default=None, alias="build_timeout", description="for compiling one candidate"
    )
    workers: Annotated[int | None, Field(ge=1, le=1024), Expect("a whole number from 1 to 1024")] = Field(
        default=None, description="processes that compile"
    )


class TaskOptions(Section):
    """What every task may say besides its operator's parameters."""

    op: Annotated[Any, WithJsonSchema({"enum": sorted(operator_names())})] = Field(default=None, description="the operator")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False), Expect("a number above zero")] = Field(
        default=1.0, description="share of the budget, relative to the other tasks"
    )
    restrict: Annotated[
        dict[str, KnobValues],
        Expect(
            "a mapping from knobs to lists of allowed values, e.g. {bm: [64, 128]}",
            item="a value, or a list of at least one value, each a whole number, text or boolean",
        ),
    ] = Field(default_factory=dict, description="knob -> the values it may take")
    templates: Annotated[
        list[Name] | None, Field(min_length=1), Expect("a list of at least one template name", item="the name of a template")
    ] = Field(default=None, description="names of the templates to tune; every one that fits unless given")


_EXPECT_INT = Expect(f"at most {MAX_INT}")


def sizes(op: str) -> list[str]:
    """The parameters that a task gives under `shape`."""
    return [name for name, parameter in operator(op).parameters().items() if parameter.size]


def _parameter(schema: Mapping[str, Any], description: str) -> Any:
    kind = Annotated[Any, AfterValidator(_check_ints), WithJsonSchema(dict(schema)), _EXPECT_INT]
    return (kind, Field(default=None, description=description))


@functools.cache
def task_model(*ops: str, named: bool = True) -> type[TaskOptions]:
    """The keys of a task of these operators. All are optional, as `defaults` may give them.

    Args:
        named: whether it may have a name, which defaults may not.
    """
    parameters = {name: parameter for op in ops for name, parameter in operator(op).parameters().items()}
    docs = {name: parameter.doc for name, parameter in parameters.items()}
    shape = dict.fromkeys(name for op in ops for name in sizes(op))
    shape_model = create_model(
        "Shape",
        __base__=Section,
        __doc__="The sizes.",
        **{name: _parameter(parameters[name].schema, docs[name]) for name in shape},
    )
    example = "{" + ", ".join(f"{name}: {docs[name]}" for name in shape) + "}"
    fields: dict[str, Any] = {
        "shape": (Annotated[shape_model, Expect(f"a mapping {example}")], Field(default=None, description="the sizes"))
    }
    for name in docs:
        if name not in shape:
            description, schema = docs[name], {key: v for key, v in parameters[name].schema.items() if key != "default"}
            if name == "dtype":
                description += "; auto: float16 on a GPU, float32 on a CPU"
                schema = {**schema, "enum": [AUTO, *schema.get("enum", ())]}
            fields[name] = _parameter(schema, description)
    if named:
        fields["name"] = (
            Annotated[Name | None, Expect("text")],
            Field(default=None, description="in tables and messages; made from the parameters unless given"),
        )
    return create_model("Task" if named else "Defaults", __base__=TaskOptions, **fields)


class FileModel(Section):
    """A workload file of schedsearch: what to tune, for which device, and with what budget."""

    version: Annotated[Literal[1], Expect(f"{VERSION}, the only version that this schedsearch knows")] = Field(
        default=1, description="of this format"
    )
    target: Annotated[str, AfterValidator(_check_target), Expect("auto, cpu, cuda or cuda:N")] = Field(
        default="auto",
        description="the device: auto (a GPU where there is one, else the CPU), cpu, cuda or cuda:N",
        json_schema_extra={"pattern": r"^(auto|cpu|cuda(:\d{1,3})?)$"},
    )
    db: Annotated[Name, Expect("the path of a file")] = Field(default=DEFAULT_DB, description="the database of records")
    budget: Annotated[Budget, Expect("a mapping, e.g. {trials: 200, time: 10m}")] = Budget()
    tuner: Annotated[TunerChoice, Expect("a mapping, e.g. {name: xgb, seed: 0}")] = TunerChoice()
    measure: Annotated[MeasureOptions, Expect("a mapping, e.g. {mode: cold-graph-v1}")] = MeasureOptions()
    defaults: Annotated[dict[str, Any], Expect("a mapping of keys that every task takes unless it gives its own")] = Field(
        default_factory=dict,
        description="keys of a task, for every task that does not give its own; shape is merged size by size",
    )
    tasks: Annotated[list[Any], Field(min_length=1), Expect("a list of at least one task, each beginning with `- `")] = (
        Field(description="what to tune")
    )


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a workload file, for editors; it is checked in as workload.schema.json."""
    task, defaults = task_model(*operator_names()), task_model(*operator_names(), named=False)
    tasks_field = (Annotated[list[task], Field(min_length=1)], Field(description="what to tune"))  # type: ignore[valid-type]
    defaults_field = (defaults, Field(default=None, description=FileModel.model_fields["defaults"].description))
    fields: dict[str, Any] = {"tasks": tasks_field, "defaults": defaults_field}
    schema = create_model("WorkloadFile", __base__=FileModel, __doc__=FileModel.__doc__, **fields).model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_tidy(schema)}


def _tidy(schema: Any) -> Any:
    """Drops what pydantic adds for itself: titles made from names, and `null`, which stands for "not given"."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: _tidy(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str)) and not (key in ("default", "anyOf") and value is None)
    }
    if "anyOf" in out and {"type": "null"} in out["anyOf"]:
        kinds = [kind for kind in out.pop("anyOf") if kind != {"type": "null"}]
        out = {**(kinds[0] if len(kinds) == 1 else {"anyOf": kinds}), **out}
    return out


@dataclass(frozen=True)
class Mistake:
    """What is wrong at `path`; `at_key` when it is the key rather than its value."""

    path: tuple[str | int, ...]
    message: str
    at_key: bool = False


def mistakes(model: type[BaseModel], error: ValidationError, ops: tuple[str, ...] = ()) -> Iterator[Mistake]:
    """pydantic's errors in the words of this file: what, got, allowed and remedy.

    Args:
        ops: the operators of a task model, whose parameters are either sizes or stand beside `shape`.
    """
    for item in error.errors(include_url=False):
        path = item["loc"]
        if item["type"] == "extra_forbidden":
            yield Mistake(path, _unknown_key(model, path, ops), at_key=True)
            continue
        field, path = _field(model, path)
        expect = next(metadata for metadata in field.metadata if isinstance(metadata, Expect))
        if item["type"] == "missing":
            yield Mistake(path, f"{path[-1]} is missing; it must be {expect.text}")
            continue
        got = item["input"]
        name = path[-1] if isinstance(path[-1], str) else f"item {path[-1] + 1} of {path[-2]}"
        must = expect.item if expect.item and len(path) > 1 else expect.text
        hint = did_you_mean(got, expect.choices) if isinstance(got, str) else ""
        yield Mistake(path, f"{name} must be {must}, got {show(got)}{hint}")


def show(value: Any) -> str:
    """A value as the file would have it."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping" + (f" with {', '.join(map(repr, list(value)[:5]))}" if value else " of nothing")
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return repr(value)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    return field.annotation if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) else None


def _field(model: type[BaseModel], path: tuple[str | int, ...]) -> tuple[FieldInfo, tuple[str | int, ...]]:
    """The field that pydantic's path leads to, and the path cut where it goes on into a value below an item."""
    for depth, part in enumerate(path):
        field = next(f for name, f in model.model_fields.items() if (f.alias or name) == part)
        section = _section(field)
        if section is None or depth == len(path) - 1:
            return field, path[: depth + 2]
        model = section
    raise AssertionError(path)


def _unknown_key(model: type[BaseModel], path: tuple[str | int, ...], ops: tuple[str, ...]) -> str:
    key, parents = str(path[-1]), path[:-1]
    section = (_section(_field(model, parents)[0]) if parents else None) or model
    allowed = [field.alias or name for name, field in section.model_fields.items()]
    remedy = did_you_mean(key, allowed)
    if parents == ("shape",) and key in model.model_fields:
        remedy = " (it belongs beside shape, not in it)"
    elif not parents and any(key in sizes(op) for op in ops):
        remedy = f" (it belongs in shape: {{{key}: ...}})"
    where = f" in {parents[-1]}" if parents else ""
    return f"unknown key {key!r}{where}{remedy}; allowed: {', '.join(allowed)}"
