"""What a workload file may contain: keys, kinds of values and defaults, as pydantic models and as JSON Schema.

An operator itself checks the values of its parameters (shape, stride, dtype ...) and describes them for editors. This module
knows no operator by name.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from schedsearch.ops import Op, Parameter, operators
from schedsearch.ops.params import MAX_INT
from schedsearch.tuner import TUNERS
from schedsearch.typed import JsonObject

VERSION = 1
AUTO = "auto"  # as dtype: one of these, by the kind of target
AUTO_DTYPES: Mapping[Literal["cuda", "cpu"], str] = {"cuda": "float16", "cpu": "float32"}


@dataclass(frozen=True)
class Expect:
    """What a value must be, as error messages say it after "must be".

    Attributes:
        choices: words for suggestions.
        item: what a single item of a list or mapping must be; default: `text`.
    """

    text: str
    choices: tuple[str, ...] = ()
    item: str = ""


MAX_DURATION_S = 14 * 86_400.0  # the system calls that wait take milliseconds in 32 bits, 24 days


def parse_duration_s(value: object) -> float:
    """Seconds of a duration: a positive number of seconds, or text such as '90s', '10m', '1h30m', '1.5h'. At most 14 days.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(min(value, 10**15))  # an integer can be too large for a float
    else:
        number = r"(\d+(?:\.\d+)?)"
        text = value.replace(" ", "") if isinstance(value, str) and len(value) <= 100 else "?"
        match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", text)
        if not match:
            raise ValueError(f"{value!r} is not a duration; write e.g. 90s, 10m or 1h30m")
        hours, minutes, rest = (float(part or 0) for part in match.groups())
        seconds = 3600 * hours + 60 * minutes + rest
    if not 0 < seconds < math.inf:
        raise ValueError(f"{value!r} is not a duration above zero; write e.g. 90s, 10m or 1h30m")
    if seconds > MAX_DURATION_S:
        raise ValueError(f"{value!r} is longer than 14 days; write e.g. 90s, 10m or 1h30m")
    return seconds


def _check_ints(value: object) -> Any:
    """Refuses sizes above 2**31-1, because launch parameters and grid extents are 32-bit."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        _check_ints(item)
    if isinstance(value, int) and value > MAX_INT:
        raise ValueError
    return value


_TARGET = "auto, cpu, cuda or cuda:N (for several GPUs: schedsearch tune --target cuda:all)"


def _check_target(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise ValueError
    return value


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """A check that a value is one of some words, which the package defines in one place."""

    def check(value: str) -> str:
        if value not in choices:
            raise ValueError
        return value

    return check


def _choices(choices: tuple[str, ...]) -> WithJsonSchema:
    return WithJsonSchema({"enum": list(choices), "type": "string"})


def _one_or_more(value: object) -> Any:
    """Turns a single knob value into a list of one."""
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
_DURATION = Expect("a duration above zero and of at most 14 days: seconds, or e.g. 90s, 10m, 1h30m")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)


class Budget(Section):
    """How much to measure; the run ends when either is used up."""

    trials: Annotated[int | None, Field(ge=1, le=10**9), Expect("an integer from 1 to 1,000,000,000")] = Field(
        default=None,
        description="trials per task; all tasks of a run share the sum; no limit when only a time is given, else 64",
    )
    time_s: Annotated[Duration | None, _DURATION] = Field(
        default=None, alias="time", description="wall time of the whole run; no limit unless given"
    )


class TunerChoice(Section):
    """How configurations are proposed."""

    name: Annotated[
        str,
        AfterValidator(_one_of(tuple(TUNERS))),
        _choices(tuple(TUNERS)),
        Expect(f"one of {', '.join(TUNERS)}", tuple(TUNERS)),
    ] = Field(default="xgb", description="xgb (models), ga (genetic), annealing, random or grid")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1), Expect("an integer from 0 to 4294967295")] = Field(
        default=0, description="of the tuner's random numbers"
    )


class MeasureOptions(Section):
    """How a candidate is built and timed; None takes the default of schedsearch.measure."""

    mode: Annotated[str, AfterValidator(_one_of(MODES)), _choices(MODES), Expect(f"one of {', '.join(MODES)}", MODES)] = (
        Field(
            default=COLD_GRAPH,
            description="cold-graph-v1 (operands out of cache), cold-graph-prepared-v1 (constants prepared), hot-graph-v1 "
            "or chain-graph-v1 (as a network launches kernels; GPUs only)",
        )
    )
    timeout_s: Annotated[Duration | None, _DURATION] = Field(
        default=None, alias="timeout", description="for verifying and timing one candidate"
    )
    build_timeout_s: Annotated[Duration | None, _DURATION] = Field(
        default=None, alias="build_timeout", description="for compiling one candidate"
    )
    reference_timeout_s: Annotated[Duration | None, _DURATION] = Field(
        default=None,
        alias="reference_timeout",
        description="for the reference of your own kernel or another package's operator",
    )
    workers: Annotated[int | None, Field(ge=1, le=1024), Expect("an integer from 1 to 1024")] = Field(
        default=None, description="processes that compile"
    )


class TaskOptions(Section):
    """The keys of every task besides its operator's parameters."""

    op: Any = Field(default=None, description="the operator")
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False), Expect("a number above zero")] = Field(
        default=1.0, description="share of the budget, relative to the other tasks"
    )
    restrict: Annotated[
        dict[str, KnobValues],
        Expect(
            "a mapping from knobs to lists of allowed values, e.g. {bm: [64, 128]}",
            item="a value, or a list of at least one value, each an integer, string or boolean",
        ),
    ] = Field(default_factory=dict, description="knob -> the values it may take")
    templates: Annotated[
        list[Name] | None, Field(min_length=1), Expect("a list of at least one template name", item="the name of a template")
    ] = Field(default=None, description="names of the templates to tune; every one that fits unless given")


KERNEL_OP = r"[A-Za-z_]\w*:[A-Za-z_]\w*"  # of a user's kernel: FILE:NAME


class KernelTask(TaskOptions):
    """A kernel that `schedsearch.tunable` decorates, in a Python file."""

    op: Annotated[Any, WithJsonSchema({"type": "string", "pattern": f"^{KERNEL_OP}$"})] = Field(
        default=None, description="FILE:KERNEL, of a file that the command line names by --kernels FILE.py"
    )
    shape: Annotated[
        dict[str, str | int | float | bool] | None,
        Expect(
            "a mapping from the kernel's arguments, e.g. {x: 4096x4096:float32, n: 5}",
            item="text like 4096x4096:float32 for an array, or a number",
        ),
    ] = Field(default=None, description="argument -> shape and dtype of an array, like 4096x4096:float32, or a number")
    name: Annotated[Name | None, Expect("text")] = Field(
        default=None, description="in tables and messages; made from the parameters unless given"
    )


_RANGE_SCHEMA = {"type": "string", "pattern": r"^\s*\d{1,9}\s*\.\.\s*\d{1,9}\s*$", "description": "a range, such as 1..64"}
_EXPECT_INT = Expect(f"at most {MAX_INT}")


def sizes(op: Op) -> list[str]:
    """The parameters that a task gives under `shape`."""
    return [name for name, parameter in op.parameters().items() if parameter.size]


def _value_schema(name: str, parameter: Parameter) -> JsonObject:
    """JSON Schema of a parameter in a file, where a dtype may be auto. It has no default, as that may depend on others."""
    schema = {key: value for key, value in parameter.schema.items() if key != "default"}
    if parameter.size and schema.get("type") == "integer":
        return {"anyOf": [schema, _RANGE_SCHEMA]}
    if name == "dtype" and set(AUTO_DTYPES.values()) <= set(schema.get("enum", ())):
        schema["enum"] = [AUTO, *schema["enum"]]
    return schema


def _description(name: str, parameter: Parameter) -> str:
    auto = AUTO in _value_schema(name, parameter).get("enum", ())
    return parameter.doc + ("; auto: float16 on a GPU, float32 on a CPU" if auto else "")


def _fields(parameters: Mapping[str, Sequence[Parameter]]) -> JsonObject:
    """pydantic's fields of parameters by name; several operators may have a parameter of the same name."""
    fields: JsonObject = {}
    for name, each in parameters.items():
        schemas = [_value_schema(name, parameter) for parameter in each]
        different = [schema for place, schema in enumerate(schemas) if schema not in schemas[:place]]
        schema = different[0] if len(different) == 1 else {"anyOf": different}
        docs = " | ".join(dict.fromkeys(_description(name, parameter) for parameter in each))
        kind = Annotated[Any, AfterValidator(_check_ints), WithJsonSchema(schema), _EXPECT_INT]
        fields[name] = (kind, Field(default=None, description=docs))
    return fields


@functools.lru_cache(maxsize=256)
def task_model(*ops: Op, named: bool = True) -> type[TaskOptions]:
    """The keys of a task of any of these operators. All are optional, because `defaults` may give them.

    Args:
        named: whether the task may have a name; defaults may not.
    """
    beside: dict[str, list[Parameter]] = {}
    inside: dict[str, list[Parameter]] = {}
    for op in ops:
        for name, parameter in op.parameters().items():
            (inside if parameter.size else beside).setdefault(name, []).append(parameter)
    owner = "defaults" if not named else ops[0].name if len(ops) == 1 else "any"
    shape_model = create_model(f"{owner}_shape", __base__=Section, __doc__="The sizes.", **_fields(inside))
    example = "{" + ", ".join(f"{name}: {each[0].doc}" for name, each in inside.items()) + "}"
    fields: JsonObject = {
        "op": (Annotated[Any, WithJsonSchema({"enum": [op.name for op in ops]})], Field(None, description="the operator")),
        "shape": (Annotated[shape_model, Expect(f"a mapping {example}")], Field(default=None, description="the sizes")),
        **_fields(beside),
    }
    if named:
        fields["name"] = (
            Annotated[Name | None, Expect("text")],
            Field(default=None, description="in tables and messages; made from the parameters unless given"),
        )
    return create_model(f"{owner}_task" if named else "defaults", __base__=TaskOptions, **fields)


class FileModel(Section):
    """A workload file of schedsearch: what to tune, for which device, and with what budget."""

    version: Annotated[Literal[1], Expect(f"{VERSION}, the only version that this schedsearch knows")] = Field(
        default=1, description="of this format"
    )
    target: Annotated[str, AfterValidator(_check_target), Expect(_TARGET)] = Field(
        default="auto",
        description="the device: auto (a GPU where there is one, else the CPU), cpu, cuda or cuda:N",
        json_schema_extra={"pattern": r"^(auto|cpu|cuda(:\d{1,3})?)$"},
    )
    db: Annotated[Name, Expect("the path of a file")] = Field(default=DEFAULT_DB, description="the database of records")
    budget: Annotated[Budget, Expect("a mapping, e.g. {trials: 200, time: 10m}")] = Budget()
    tuner: Annotated[TunerChoice, Expect("a mapping, e.g. {name: xgb, seed: 0}")] = TunerChoice()
    measure: Annotated[MeasureOptions, Expect("a mapping, e.g. {mode: cold-graph-v1}")] = MeasureOptions()
    defaults: Annotated[JsonObject, Expect("a mapping of keys that every task takes unless it gives its own")] = Field(
        default_factory=dict,
        description="keys of a task, for every task that does not give its own; shape is merged size by size",
    )
    tasks: Annotated[list[Any], Field(min_length=1), Expect("a list of at least one task, each beginning with `- `")] = (
        Field(description="what to tune")
    )


def json_schema(ops: Iterable[Op] | None = None) -> JsonObject:
    """The JSON Schema (2020-12) of a workload file, for editors.

    The keys of a task are those of its operator. A task that names no operator, because `defaults` does, may have those of
    any one operator. workload.schema.json contains the schema of the built-in operators.

    Args:
        ops: the operators that it describes; default: all built-in and installed ones.
    """
    known = list(operators()[0].values() if ops is None else ops)
    models = {op.name: task_model(op) for op in known}
    any_task: Any = Section
    for model in (*models.values(), KernelTask):
        any_task = model if any_task is Section else any_task | model
    defaults = task_model(*known, named=False)
    fields: JsonObject = {
        "tasks": (Annotated[list[any_task], Field(min_length=1)], Field(description="what to tune")),
        "defaults": (defaults, Field(default=None, description=FileModel.model_fields["defaults"].description)),
    }
    made = create_model("WorkloadFile", __base__=FileModel, __doc__=FileModel.__doc__, **fields).model_json_schema()
    schema: JsonObject = {"$schema": "https://json-schema.org/draft/2020-12/schema", **_tidy(made)}
    kernel = {"$ref": f"#/$defs/{KernelTask.__name__}"}
    references = {name: {"$ref": f"#/$defs/{model.__name__}"} for name, model in models.items()}
    schema["properties"]["tasks"]["items"] = {
        "type": "object",
        "properties": {
            "op": {
                "anyOf": [{"enum": list(models)}, {"type": "string", "pattern": f"^{KERNEL_OP}$"}],
                "description": "the operator, or FILE:KERNEL for a kernel of your own",
            }
        },
        "allOf": [
            {"if": {"properties": {"op": {"pattern": f"^{KERNEL_OP}$"}}, "required": ["op"]}, "then": kernel},
            *(
                {"if": {"properties": {"op": {"const": name}}, "required": ["op"]}, "then": reference}
                for name, reference in references.items()
            ),
            {"if": {"not": {"required": ["op"]}}, "then": {"anyOf": list(references.values())}},
        ],
    }
    return schema


def _tidy(schema: object) -> Any:
    """Removes pydantic's own additions: titles made from names, and `null`, which means "not given"."""
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
    """A mistake at `path`; `at_key` if the key itself is wrong, not its value."""

    path: tuple[str | int, ...]
    message: str
    at_key: bool = False


def mistakes(model: type[BaseModel], error: ValidationError, ops: tuple[Op, ...] = ()) -> Iterator[Mistake]:
    """pydantic's errors in the words of this file: what, got, allowed and remedy.

    Args:
        ops: the operators of a task model; their parameters are either sizes or keys beside `shape`.
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


def show(value: object) -> str:
    """A value as the file would write it."""
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
    """The field that pydantic's path leads to, and the path without its part inside the value of an item."""
    for depth, part in enumerate(path):
        field = next(f for name, f in model.model_fields.items() if (f.alias or name) == part)
        section = _section(field)
        if section is None or depth == len(path) - 1:
            return field, path[: depth + 2]
        model = section
    raise AssertionError(path)


def _unknown_key(model: type[BaseModel], path: tuple[str | int, ...], ops: tuple[Op, ...]) -> str:
    key, parents = str(path[-1]), path[:-1]
    section = (_section(_field(model, parents)[0]) if parents else None) or model
    where = f" in {parents[-1]}" if parents else ""
    if parents == ("shape",) and key in model.model_fields:
        return f"unknown key {key!r}{where} (it belongs beside shape, not in it)"
    if not parents and any(key in sizes(op) for op in ops):
        return f"unknown key {key!r} (it belongs in shape: {{{key}: ...}})"
    allowed = [field.alias or name for name, field in section.model_fields.items()]
    return f"unknown key {key!r}{where}{did_you_mean(key, allowed)}; allowed: {', '.join(allowed)}"
