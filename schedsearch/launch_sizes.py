"""Launch plans of one machine code for several sizes: one plan, with a rule for each number that depends on the size.

The plans of all sizes are made from the template when a range is tuned. A number that is linear in the size is kept as a
line, which has the right value at each of these sizes; any other, such as a count of tiles, is listed for each size. Nothing
is fitted or extrapolated. Deployment looks the numbers up, and needs no template.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from schedsearch.errors import PlanError
from schedsearch.identity import canonical_json
from schedsearch.launch import LaunchPlan
from schedsearch.typed import JsonMapping, JsonObject
from schedsearch.workload import MAX_SIZES

_LARGEST = 2**62

Path = tuple[str | int, ...]


class Rule(Protocol):
    """How a number depends on the size."""

    def at(self, size: int, position: int) -> Any:
        """The number for a size, which is the plan's `position`-th."""


@dataclass(frozen=True)
class Quotient:
    """(scale * size + offset) // divisor * factor. What is made now is a line: rows, elements, bytes. Files of before have
    tiles, too."""

    scale: int
    offset: int
    divisor: int = 1
    factor: int = 1

    def at(self, size: int, position: int) -> int:
        return (self.scale * size + self.offset) // self.divisor * self.factor

    @classmethod
    def through(cls, sizes: Sequence[int], values: Sequence[int]) -> Quotient | None:
        """The line on which these values lie at these sizes, with a divisor and a factor of 1; None if there is none."""
        scale, rest = divmod(values[-1] - values[0], sizes[-1] - sizes[0])
        line = cls(scale, values[0] - scale * sizes[0])
        return line if not rest and [line.at(size, 0) for size in sizes] == list(values) else None


@dataclass(frozen=True)
class Listed:
    """A value for each size, in order."""

    values: tuple[Any, ...]

    def at(self, size: int, position: int) -> Any:
        return self.values[position]


@dataclass(frozen=True)
class SizedData:
    """JSON objects of several sizes that differ in single values only.

    Attributes:
        sizes: the sizes, rising.
        base: the object of the smallest size.
        rules: place in `base` -> rule, for everything that differs between sizes.
    """

    sizes: tuple[int, ...]
    base: JsonMapping
    rules: Mapping[Path, Rule]

    @staticmethod
    def alike(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
        """Whether two objects differ in single values only."""
        return dict(_leaves(one, ())).keys() == dict(_leaves(other, ())).keys()

    @classmethod
    def between(cls, objects: Mapping[int, JsonMapping]) -> Self:
        """From the object of each size.

        Raises:
            ValueError: the objects differ in more than single values.
        """
        sizes = tuple(sorted(objects))
        leaves = [dict(_leaves(objects[size], ())) for size in sizes]
        if any(each.keys() != leaves[0].keys() for each in leaves):
            raise ValueError("the objects of the sizes have different parts")
        rules = {}
        for path in leaves[0]:
            values = [each[path] for each in leaves]
            if any(value != values[0] for value in values):
                rules[path] = _rule(sizes, values)
        return cls(sizes, objects[sizes[0]], rules)

    def data(self, size: int) -> JsonObject:
        """The object of one of `sizes`.

        Raises:
            PlanError: a rule is for a place that there is not, or the size is not one of `sizes`.
        """
        if size not in self.sizes:
            raise PlanError(f"the plan has no size {size}; it has {ranges_text(self.sizes)}")
        data, position = json.loads(canonical_json(self.base)), self.sizes.index(size)
        for path, rule in self.rules.items():
            try:
                place = data
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]]  # it must be there
                place[path[-1]] = rule.at(size, position)
            except (KeyError, IndexError, TypeError) as error:
                raise PlanError(f"a rule is for {'/'.join(map(str, path))}, which the plan does not have") from error
        found: JsonObject = data
        return found

    def to_json(self) -> str:
        rules = [[list(path), _rule_json(rule)] for path, rule in self.rules.items()]
        return canonical_json({"sizes": runs(self.sizes), "plan": self.base, "rules": rules})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of `to_json`. What the rules lead to is checked by `at`.

        Raises:
            PlanError: the text is not such a plan.
        """
        try:
            data = json.loads(text)
            spans = [range(_whole(low), _whole(high) + 1) for low, high in data["sizes"]]
            count = sum(map(len, spans))
            sizes = tuple(size for span in spans for size in span) if count <= MAX_SIZES else ()
            if not sizes or list(sizes) != sorted(set(sizes)):
                raise PlanError(f"{count} sizes; allowed: 1 to {MAX_SIZES}, rising")
            rules = {tuple(path): _rule_of(rule, len(sizes)) for path, rule in data["rules"]}
            return cls(sizes, dict(data["plan"]), rules)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise PlanError(f"the plan of a range of sizes cannot be read: {error!r}; tune again") from error


class SizedPlan(SizedData):
    """The launch plans of several sizes."""

    @classmethod
    def of(cls, plans: Mapping[int, LaunchPlan]) -> SizedPlan:
        """From the plan of each size.

        Raises:
            ValueError: the plans differ in more than single values.
        """
        return cls.between({size: json.loads(canonical_json(dataclasses.asdict(plan))) for size, plan in plans.items()})

    def at(self, size: int) -> LaunchPlan:
        """The plan of one of `sizes`.

        Raises:
            PlanError: the plan is not sound, or the size is not one of `sizes`.
        """
        return LaunchPlan.from_json(canonical_json(self.data(size)))


def runs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Rising sizes as closed intervals.

    >>> runs([1, 2, 3, 7])
    [(1, 3), (7, 7)]
    """
    found: list[tuple[int, int]] = []
    for size in sizes:
        if found and size == found[-1][1] + 1:
            found[-1] = found[-1][0], size
        else:
            found.append((size, size))
    return found


def ranges_text(sizes: Sequence[int]) -> str:
    """The sizes in words: "1 to 3, 7"."""
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in runs(sizes))


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, Any]]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if not items and items is not None:
        yield path, type(value).__name__  # empty, which differs from anything else
    elif items is None:
        yield path, value
    else:
        for key, item in items:
            yield from _leaves(item, (*path, key))


def _rule(sizes: Sequence[int], values: Sequence[Any]) -> Rule:
    formula = Quotient.through(sizes, values) if all(type(value) is int for value in values) else None
    return formula or Listed(tuple(values))


def _rule_json(rule: Rule) -> Any:
    return list(rule.values) if isinstance(rule, Listed) else dataclasses.asdict(rule)  # type: ignore[call-overload]


def _rule_of(data: Any, count: int) -> Rule:
    if isinstance(data, list):
        if len(data) != count:
            raise PlanError(f"{len(data)} values are listed for {count} sizes")
        return Listed(tuple(data))
    rule = Quotient(**data)
    if any(abs(_whole(value)) > _LARGEST for value in dataclasses.astuple(rule)) or rule.divisor < 1:
        raise PlanError(f"the formula {data} has a number that is not possible")
    return rule


def _whole(value: object) -> int:
    if type(value) is not int:
        raise PlanError(f"{value!r} is not an integer")
    return value
