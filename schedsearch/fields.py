"""Dataclasses as JSON that anybody may have written: what a type or a rule does not allow is refused where it stands.

A dataclass declares everything once: types, rules of single values (`Annotated[int, Within(1, 1024)]`), and in a method
`mistake` what its fields must be together. Standard library only, because deployment reads launch plans by it.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from schedsearch.errors import did_you_mean
from schedsearch.text import quoted, type_text

T = TypeVar("T")
_Read = Callable[[Any], Any]


class Rule(Protocol):
    """What a single value must obey, as an annotation of its type: `Annotated[int, Within(1, 1024)]`."""

    def broken(self, value: Any) -> str:
        """What is allowed, if the value, which has the right type, is not; else ""."""


@dataclass(frozen=True)
class Within:
    """A number from `low` to `high`, and a multiple."""

    low: float
    high: float
    multiple: int = 1

    def broken(self, value: float) -> str:
        if not self.low <= value <= self.high:
            return f"{self.low} to {self.high}" if self.low < self.high else f"{self.low}"
        return f"multiples of {self.multiple}" if self.multiple > 1 and value % self.multiple else ""


@dataclass(frozen=True)
class Matches:
    """Text of this form, which `allowed` describes."""

    pattern: str
    allowed: str

    def broken(self, value: str) -> str:
        return "" if re.fullmatch(self.pattern, value) else self.allowed


@dataclass(frozen=True)
class AmongThese:
    """One of these values."""

    values: tuple[object, ...]

    def broken(self, value: object) -> str:
        return "" if value in self.values else ", ".join(map(str, self.values))


@dataclass(frozen=True)
class Count:
    """A collection or a text of `low` to `high` items."""

    low: int
    high: int

    def broken(self, value: typing.Sized) -> str:
        return "" if self.low <= len(value) <= self.high else f"{self.low} to {self.high} items, not {len(value)}"


def unless_default(default: Any) -> Any:
    """A field of a dataclass with a default that `Codec.write` leaves out, so that adding the field changes no identity."""
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata={"unless": default})
    return dataclasses.field(default=default, metadata={"unless": default})


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
    """As `Codec.read`, of data without leaves."""
    return _PLAIN.read(kind, data)


def check_object(data: Any, fields: Mapping[str, type], optional: Mapping[str, type] = types.MappingProxyType({})) -> None:
    """Checks that an object has fields of these Python types, and no other ones. Raises FieldError as `read` does."""
    if not isinstance(data, dict):
        raise FieldError(f"it is {type_text(data)}; allowed: an object")
    known = {**fields, **optional}
    _check_names(data, known, fields)
    for name, value in data.items():
        if type(value) is not known[name]:
            raise _at(FieldError(f"{quoted(value)} is {type_text(value)}; allowed: {known[name].__name__}"), name)


class Codec:
    """Dataclasses as JSON data.

    Fields may be str, int, float, bool, literals, dataclasses, tuples, mappings from strings or integers, and unions of
    these that JSON data tell apart: by their type, and dataclasses by a literal `kind` or by the names of their fields.
    `Annotated` adds a `Rule`. A dataclass may have a method `mistake`, which says what is wrong with its fields together.

    Args:
        leaves: other types, each with the function that writes its values as JSON data, or that reads them; so a codec with
            leaves works in one direction.
    """

    def __init__(self, leaves: Mapping[Any, Callable[[Any], Any]] = types.MappingProxyType({})) -> None:
        self._leaves = dict(leaves)
        self._known: dict[Any, _Read] = {}

    def write(self, value: Any) -> Any:
        """The JSON data of a value."""
        if (leaf := self._leaves.get(type(value))) is not None:
            return leaf(value)
        if dataclasses.is_dataclass(value):
            fields = [(each, getattr(value, each.name)) for each in dataclasses.fields(value)]
            return {each.name: self.write(item) for each, item in fields if not _is_left_out(each, item)}
        if isinstance(value, Mapping):
            return {str(name): self.write(each) for name, each in value.items()}
        return [self.write(each) for each in value] if isinstance(value, tuple | list) else value

    def read(self, kind: type[T], data: Any) -> T:
        """Inverse of `write`, for a value of this type.

        Raises:
            FieldError: the data has another type somewhere or breaks a rule, or an object has an unknown field or lacks one.
        """
        made: T = self._reader(kind)(data)
        return made

    def _reader(self, hint: Any) -> _Read:
        if hint not in self._known:
            self._known[hint] = lambda data: self._known[hint](data)  # a type may hold itself
            self._known[hint] = self._made(hint)
        return self._known[hint]

    def _made(self, hint: Any) -> _Read:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if (leaf := self._leaves.get(origin or hint)) is not None:
            return typing.cast(_Read, leaf)
        if dataclasses.is_dataclass(hint):
            return self._object(hint)
        if origin is typing.Literal:
            return _one_of(args)
        if origin is tuple:
            return self._tuple(args)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(*args)
        if origin is Annotated:
            return _ruled(self._reader(args[0]), args[1:])
        if origin in (types.UnionType, typing.Union):
            kinds = {_kind(each): each for each in args}
            return self._by_kind(kinds) if None not in kinds and len(kinds) == len(args) else self._union(args)
        return _plain(hint)

    def _by_kind(self, kinds: Mapping[str | None, Any]) -> _Read:
        readers = {name: self._reader(kind) for name, kind in kinds.items()}

        def read_one(data: Any) -> Any:
            name = data.get("kind") if isinstance(data, dict) else None
            if not isinstance(name, str) or name not in readers:
                raise FieldError(f"it is of the kind {quoted(name)}; allowed: {', '.join(map(str, readers))}")
            return readers[name](data)

        return read_one

    def _union(self, kinds: tuple[Any, ...]) -> _Read:
        readers = [(kind, self._reader(kind)) for kind in kinds if kind is not types.NoneType]
        optional = len(readers) < len(kinds)

        def read_one(data: Any) -> Any:
            if optional and data is None:
                return None
            fitting = [reader for kind, reader in readers if len(readers) == 1 or _fits(kind, data)]
            if not fitting:
                allowed = ", ".join(_without_rules(kind).__name__ for kind, _ in readers)
                raise FieldError(f"{quoted(data)} is {type_text(data)}; allowed: {allowed}")
            return fitting[0](data)

        return read_one

    def _tuple(self, args: tuple[Any, ...]) -> _Read:
        readers = [self._reader(each) for each in args if each is not Ellipsis]
        length = None if args[-1] is Ellipsis else len(args)

        def read_tuple(data: Any) -> tuple[Any, ...]:
            if not isinstance(data, list) or (length is not None and len(data) != length):
                raise FieldError(f"it is {type_text(data)}; allowed: a list{'' if length is None else f' of {length}'}")
            made = []
            for number, each in enumerate(data):
                try:
                    made.append(readers[0 if length is None else number](each))
                except FieldError as error:
                    raise _at(error, str(number)) from None
            return tuple(made)

        return read_tuple

    def _mapping(self, key: Any, value: Any) -> _Read:
        inner = self._reader(value)
        name_of = self._reader(key)

        def read_mapping(data: Any) -> dict[Any, Any]:
            if not isinstance(data, dict):
                raise FieldError(f"it is {type_text(data)}; allowed: an object")
            made: dict[Any, Any] = {}
            for name, each in data.items():
                if key is int and not (name.isascii() and name.isdecimal() and len(name) < 20):
                    raise FieldError(f"{quoted(name)} is not a number")
                try:
                    made[int(name) if key is int else name_of(name)] = inner(each)
                except FieldError as error:
                    raise _at(error, name) from None
            return made

        return read_mapping

    def _object(self, kind: Any) -> _Read:
        hints = typing.get_type_hints(kind, include_extras=True)
        mistake: Callable[[Any], str] | None = getattr(kind, "mistake", None)
        known = {each.name: self._reader(hints[each.name]) for each in dataclasses.fields(kind)}
        absent = dataclasses.MISSING
        fields = dataclasses.fields(kind)
        required = [each.name for each in fields if each.default is absent and each.default_factory is absent]

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
            found = kind(**made)
            if mistake is not None and (text := mistake(found)):
                raise FieldError(text)
            return found

        return read_object


_PLAIN = Codec()


def _fits(kind: Any, data: Any) -> bool:
    """Whether JSON data can be of one of several types."""
    kind = _without_rules(kind)
    if dataclasses.is_dataclass(kind):
        return isinstance(data, dict) and data.keys() <= {each.name for each in dataclasses.fields(kind)}
    return type(data) is (list if typing.get_origin(kind) is tuple else kind)


def _is_left_out(field: dataclasses.Field[Any], value: object) -> bool:
    default = field.metadata.get("unless", dataclasses.MISSING)
    return default == value and (not isinstance(value, int | float) or type(value) is type(default))


def _kind(hint: Any) -> str | None:
    """The literal `kind` of a dataclass."""
    named = typing.get_type_hints(hint).get("kind") if dataclasses.is_dataclass(hint) else None
    values = typing.get_args(named) if typing.get_origin(named) is typing.Literal else ()
    return values[0] if len(values) == 1 else None


def _without_rules(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def _ruled(read: _Read, rules: tuple[Rule, ...]) -> _Read:
    def read_ruled(data: Any) -> Any:
        value = read(data)
        for rule in rules:
            if allowed := rule.broken(value):
                got = "it" if isinstance(value, tuple | dict) else quoted(value)
                raise FieldError(f"{got} is not possible; allowed: {allowed}")
        return value

    return read_ruled


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


def _check_names(data: Mapping[str, Any], known: Mapping[str, Any], required: typing.Iterable[str]) -> None:
    for name in data:
        if name not in known:
            hint = did_you_mean(name, known)
            raise FieldError(f"there is a field {quoted(name)}{hint}, which this version does not know", later=True)
    for name in required:
        if name not in data:
            raise FieldError(f"the field {name!r} is missing")


def _at(error: FieldError, name: str) -> FieldError:
    error.where.append(name if len(name) <= 60 else f"{name[:57]}...")
    return error
