"""Parameters of operators: what one is, what is wrong with a value, and the values of a workload as a typed object.

An operator declares its parameters once, as the fields of a frozen dataclass::

    @dataclass(frozen=True, eq=False, kw_only=True)
    class SoftmaxParams(Params):
        x: tuple[int, ...] = declared(extents("extents of x"))
        axis: int = declared(axis_number("the axis along which numbers sum to 1", -1))

`Op.normalise` checks and completes what a user gives, `Op.typed` makes the object of it, and a workload carries that as
`workload.params`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Self

from schedsearch.errors import Problem, did_you_mean
from schedsearch.typed import GivenParams, ParamsByName

MAX_INT = 2**31 - 1  # launch parameters and grid extents are 32-bit
_LONGEST_GOT = 200  # characters of a wrong value in a message


@dataclass(frozen=True)
class Parameter:
    """One parameter of an operator or a stage.

    Attributes:
        doc: one line.
        schema: JSON Schema of its value. Editors use it, and `Op.normalise` checks values by the keywords `type`, `enum`,
            `minimum` and `maximum`, `items`, `minItems` and `maxItems`. The keyword `default` makes a parameter optional.
        size: given under `shape:` in a workload file.
    """

    doc: str
    schema: GivenParams = field(default_factory=dict)
    size: bool = False

    @classmethod
    def count(cls, doc: str, *, least: int = 1, size: bool = True) -> Parameter:
        """An integer that must be given, such as an extent."""
        return cls(doc, {"type": "integer", "minimum": least, "maximum": MAX_INT}, size)

    @classmethod
    def choice(cls, doc: str, allowed: Sequence[object], default: object = None) -> Parameter:
        """One of several values. The first is the default unless `default` names another."""
        return cls(doc, {"enum": list(allowed), "default": allowed[0] if default is None else default})


def declared(parameter: Parameter) -> Any:
    """A field of `Params` that holds the value of this parameter."""
    return field(metadata={"parameter": parameter})


class Params(Mapping[str, Any]):
    """Normalised parameters of a workload: a frozen dataclass, which code that knows no operator reads as a mapping.

    Bases that several operators share only annotate their fields: each operator declares its own, in its own order.
    """

    @classmethod
    @functools.cache
    def parameters(cls) -> Mapping[str, Parameter]:
        """Every parameter by name, in the order of the fields."""
        return {each.name: each.metadata["parameter"] for each in dataclasses.fields(cls)}  # type: ignore[arg-type]

    @classmethod
    def of(cls, params: GivenParams) -> Self:
        """The parameters of a workload whose operator is known to have these.

        Raises:
            TypeError: they are those of another operator.

        Examples:
            >>> from schedsearch import softmax
            >>> from schedsearch.ops.softmax import SoftmaxParams
            >>> SoftmaxParams.of(softmax(x=(32, 1000)).params).axis
            -1
        """
        if not isinstance(params, cls):
            raise TypeError(f"expected the parameters {cls.__name__}, got {type(params).__name__}")
        return params

    def replace(self, **changes: Any) -> Self:
        """The same parameters but for some. Nothing is checked."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def __getitem__(self, name: str) -> Any:
        if name in self.parameters():
            return getattr(self, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters())

    def __len__(self) -> int:
        return len(self.parameters())

    def __hash__(self) -> int:
        return hash(tuple(self.values()))


def plain(value: object) -> Any:
    """A value as JSON has it: NumPy's integers, alone or in a list, as Python's, and an `Epilogue` as its stages."""
    if hasattr(value, "as_parameter"):
        return value.as_parameter()
    if isinstance(value, list | tuple):
        items = [plain(each) for each in value]
        return items if isinstance(value, list) else tuple(items)
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def unknown_parameters(owner: str, params: Iterable[str], known: Iterable[str]) -> list[Problem]:
    """A problem for each name that `owner`, an operator or stage, does not have."""
    names = list(known)
    allowed = f"allowed: {', '.join(names)}" if names else "it takes none"
    return [
        Problem(name, f"{owner} has no parameter {name!r}{did_you_mean(str(name), names)}; {allowed}", at_key=True)
        for name in params
        if name not in names
    ]


def missing_parameters(params: Mapping[str, object], required: Mapping[str, Parameter]) -> list[Problem]:
    return [
        Problem(name, f"{name} ({parameter.doc}) is missing; give {_wanted(parameter.schema)}")
        for name, parameter in required.items()
        if name not in params
    ]


def one_of(name: str, value: object, allowed: Sequence[object]) -> list[Problem]:
    """A problem if `value` is not one of `allowed`."""
    if any(value == each and type(value) is type(each) for each in allowed):
        return []
    hint = did_you_mean(value, [each for each in allowed if isinstance(each, str)]) if isinstance(value, str) else ""
    return [Problem(name, f"{name} {value!r} is not possible{hint}; allowed: {', '.join(map(str, allowed))}")]


def judge(value: Any, schema: GivenParams) -> str:
    """Why a value does not match a schema, as "must be ..., got ..."; empty if it does."""
    if "enum" in schema:
        allowed = schema["enum"]
        if any(value == each and type(value) is type(each) for each in allowed):
            return ""
        hint = did_you_mean(value, [each for each in allowed if isinstance(each, str)]) if isinstance(value, str) else ""
        return f"{value!r} is not possible{hint}; allowed: {', '.join(map(str, allowed))}"
    if "anyOf" in schema:
        if any(not judge(value, each) for each in schema["anyOf"]):
            return ""
    elif _is_of(value, schema):
        return ""
    got = repr(value)
    if is_int(value) and _is_of(value, {"type": schema.get("type")}) and value > schema.get("maximum", value):
        return f"must be at most {schema['maximum']}, got {value}"
    return f"must be {_wanted(schema)}, got {got if len(got) <= _LONGEST_GOT else got[:_LONGEST_GOT] + ' ...'}"


def _is_of(value: Any, schema: GivenParams) -> bool:
    kind = schema.get("type")
    fits = {
        None: True,
        "integer": is_int(value),
        "number": is_int(value) or (isinstance(value, float) and math.isfinite(value)),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "array": isinstance(value, list | tuple),
    }[kind]
    if not fits:
        return False
    if kind in ("integer", "number"):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    if kind == "array":
        enough = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return enough and not any(judge(each, schema.get("items", {})) for each in value)
    return True


def _wanted(schema: GivenParams) -> str:
    """What a schema asks for, in words."""
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "anyOf" in schema:
        return " or ".join(map(_wanted, schema["anyOf"]))
    kind = schema.get("type")
    if kind == "array":
        least, most = schema.get("minItems"), schema.get("maxItems")
        many = f"at most {most} " if not least and most is not None else ""
        if least:
            many = f"{least} " if least == most else f"at least {least} " if most is None else f"{least} to {most} "
        return f"a list of {many}values, each {_wanted(schema.get('items', {}))}"
    words = {"integer": "an integer", "number": "a number", "string": "a string", "boolean": "true or false"}
    least, most = schema.get("minimum"), schema.get("maximum")
    limit = f" of at least {least}" if least is not None else ""
    if most is not None and most != MAX_INT:
        limit = f" from {least} to {most}" if least is not None else f" of at most {most}"
    return words.get(str(kind), "a value") + limit


def frozen(value: object) -> Any:
    """The same value with tuples instead of lists, so that it is hashable."""
    return tuple(map(frozen, value)) if isinstance(value, list | tuple) else value


def schema_defaults(parameters: Mapping[str, Parameter]) -> ParamsByName:
    """The default of each parameter whose schema has one."""
    return {name: frozen(each.schema["default"]) for name, each in parameters.items() if "default" in each.schema}
