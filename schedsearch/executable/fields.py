"""Reads dataclasses from JSON that anybody may have written: types are checked, no field is unknown or missing."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from schedsearch.text import quoted, type_text

T = TypeVar("T")
_Read = Callable[[Any], Any]


class FieldError(ValueError):
    """Something is not as its type says.

    Attributes:
        later: it has a field that this version does not know.
    """

    def __init__(self, what: str, *, later: bool = False) -> None:
        super().__init__(what)
        self.where: list[str] = []
        self.later = later

    def __str__(self) -> str:
        place = "/".join(reversed(self.where))
        return f"{place}: {self.args[0]}" if place else str(self.args[0])


def read(kind: type[T], data: Any) -> T:
    """A value of a dataclass from the JSON object that `dataclasses.asdict` leads to.

    Fields may be str, int, float, bool, literals, dataclasses, tuples, mappings from strings, and None beside one of these.

    Raises:
        FieldError: the data has another type somewhere, or an object has an unknown field or lacks one.
    """
    hint: Any = kind
    made: T = _reader(hint)(data)
    return made


def check_object(data: Any, fields: Mapping[str, type], optional: Mapping[str, type] = types.MappingProxyType({})) -> None:
    """Checks that an object has fields of these Python types, and no other ones. Raises FieldError as `read` does."""
    if not isinstance(data, dict):
        raise FieldError(f"it is {type_text(data)}; allowed: an object")
    known = {**fields, **optional}
    _check_names(data, known, fields)
    for name, value in data.items():
        if type(value) is not known[name]:
            raise _at(FieldError(f"{quoted(value)} is {type_text(value)}; allowed: {known[name].__name__}"), name)


@functools.cache
def _reader(hint: Any) -> _Read:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _object(hint)
    if origin is typing.Literal:
        return _one_of(args)
    if origin is tuple:
        return _tuple(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(args[1])
    if isinstance(hint, types.UnionType):
        (kind,) = (each for each in args if each is not types.NoneType)
        inner = _reader(kind)
        return lambda data: None if data is None else inner(data)
    return _plain(hint)


def _plain(kind: type) -> _Read:
    allowed: tuple[type, ...] = (float, int) if kind is float else (kind,)

    def read_plain(data: Any) -> Any:
        if type(data) not in allowed:
            raise FieldError(f"{quoted(data)} is {type_text(data)}; allowed: {kind.__name__}")
        return data

    return read_plain


def _one_of(values: tuple[Any, ...]) -> _Read:
    def read_one(data: Any) -> Any:
        if not isinstance(data, str) or data not in values:
            raise FieldError(f"{quoted(data)}; allowed: {', '.join(map(str, values))}")
        return data

    return read_one


def _tuple(args: tuple[Any, ...]) -> _Read:
    length = None if args[-1] is Ellipsis else len(args)
    inner = _reader(args[0])  # all tuples of programs have one type throughout

    def read_tuple(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list) or (length is not None and len(data) != length):
            raise FieldError(f"it is {type_text(data)}; allowed: a list{'' if length is None else f' of {length}'}")
        made = []
        for number, each in enumerate(data):
            try:
                made.append(inner(each))
            except FieldError as error:
                raise _at(error, str(number)) from None
        return tuple(made)

    return read_tuple


def _mapping(value: Any) -> _Read:
    inner = _reader(value)

    def read_mapping(data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise FieldError(f"it is {type_text(data)}; allowed: an object")
        made = {}
        for name, each in data.items():
            try:
                made[name] = inner(each)
            except FieldError as error:
                raise _at(error, name) from None
        return made

    return read_mapping


def _object(kind: Any) -> _Read:
    hints = typing.get_type_hints(kind)
    known = {each.name: _reader(hints[each.name]) for each in dataclasses.fields(kind)}
    absent = dataclasses.MISSING
    required = [each.name for each in dataclasses.fields(kind) if each.default is absent and each.default_factory is absent]

    def read_object(data: Any) -> Any:
        if not isinstance(data, dict):
            raise FieldError(f"it is {type_text(data)}; allowed: an object")
        if not data.keys() <= known.keys() or len(data) < len(known):
            _check_names(data, known, required)
        made = {}
        for name, each in data.items():
            try:
                made[name] = known[name](each)
            except FieldError as error:
                raise _at(error, name) from None
        return kind(**made)

    return read_object


def _check_names(data: Mapping[str, Any], known: Mapping[str, Any], required: typing.Iterable[str]) -> None:
    for name in data:
        if name not in known:
            raise FieldError(f"there is a field {quoted(name)}, which this version does not know", later=True)
    for name in required:
        if name not in data:
            raise FieldError(f"the field {name!r} is missing")


def _at(error: FieldError, name: str) -> FieldError:
    error.where.append(name if len(name) <= 60 else f"{name[:57]}...")
    return error
