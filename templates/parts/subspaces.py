"""Several configuration spaces as one: some knobs choose among them, or a configuration has a part for each.

A template that runs another one on arguments of different forms has a space for each form: other values, other limits,
other derived quantities under the same names. `one_of` makes one space of them, whose first knobs name the form.

A template that runs several others, one after the other, has the knobs of each. `side_by_side` gives them prefixes.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from schedsearch.space import Columns, ConfigSpace, Constraint, Knob, Value

Choice = tuple[Value, ...]
Formula = Callable[[Columns], Any]


def one_of(choices: Sequence[Knob], spaces: Mapping[Choice, ConfigSpace]) -> ConfigSpace:
    """The knobs `choices` and all others; their values choose a space, whose rules and formulas hold.

    A knob that the chosen space lacks has its first value. A derived quantity that it lacks is 0.

        >>> few = ConfigSpace([Knob("tile", (1, 2), "tile")])
        >>> many = ConfigSpace([Knob("tile", (2, 4), "tile")])
        >>> space = one_of([Knob("form", ("few", "many"), "form")], {("few",): few, ("many",): many})
        >>> space.check({"form": "few", "tile": 4})
        ['breaks the rule: tile is one of 1, 2 if form is few; 2, 4 if form is many (got form=few, tile=4)']

    Args:
        spaces: values of `choices`, in their order, -> the space. Other combinations of values are illegal.
    """
    cases = _Cases(tuple(knob.name for knob in choices), tuple(spaces))
    knobs = _united(spaces)
    constraints = [
        Constraint(f"{' '.join(cases.names)} is one of {', '.join(map(_words, spaces))}", cases.exist),
        *_of_values(cases, knobs, spaces),
    ]
    for key in _all_keys([_rules(space) for space in spaces.values()]):
        constraints.append(Constraint(key[0], cases.formula([_rules(space).get(key) for space in spaces.values()], True)))
    derived = {
        name: cases.formula([space.derived.get(name) for space in spaces.values()], 0)
        for name in _all_keys([space.derived for space in spaces.values()])
    }
    return ConfigSpace([*choices, *knobs.values()], constraints, derived)


def side_by_side(spaces: Mapping[str, ConfigSpace]) -> ConfigSpace:
    """The knobs, rules and derived quantities of several spaces, whose names get prefixes.

        >>> of_a, of_b = (ConfigSpace([Knob("tile", values, "tile")]) for values in ((1, 2), (4,)))
        >>> space = side_by_side({"a_": of_a, "b_": of_b})
        >>> space.names, own_values({"a_tile": 2, "b_tile": 4}, "b_")
        (('a_tile', 'b_tile'), {'tile': 4})

    Args:
        spaces: prefix -> space; no prefix is the beginning of another.
    """
    return joined(*(prefixed(space, prefix, prefix.rstrip("_")) for prefix, space in spaces.items()))


def joined(*spaces: ConfigSpace) -> ConfigSpace:
    """The knobs, rules and derived quantities of several spaces, whose names all differ."""
    return ConfigSpace(
        [knob for space in spaces for knob in space.knobs],
        [rule for space in spaces for rule in space.constraints],
        {name: formula for space in spaces for name, formula in space.derived.items()},
    )


def prefixed(space: ConfigSpace, prefix: str, label: str) -> ConfigSpace:
    """The space with a prefix for all names, and a label before the texts."""
    return ConfigSpace(
        [Knob(prefix + knob.name, knob.values, f"{label}: {knob.doc}") for knob in space.knobs],
        [Constraint(f"{label}: {rule.reason}", _within(rule.predicate, prefix)) for rule in space.constraints],
        {prefix + name: _within(formula, prefix) for name, formula in space.derived.items()},
    )


def fixing(space: ConfigSpace, values: Mapping[str, Value]) -> ConfigSpace:
    """The space without some knobs, which always have these values."""

    fixed = dict(values)

    def given(formula: Formula) -> Formula:
        return lambda columns: formula(ChainMap(fixed, columns))  # type: ignore[arg-type]  # it only reads

    return ConfigSpace(
        [knob for knob in space.knobs if knob.name not in values],
        [Constraint(rule.reason, given(rule.predicate)) for rule in space.constraints],
        {name: given(formula) for name, formula in space.derived.items()},
    )


def own_values(config: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The part of a configuration that has a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in config.items() if name.startswith(prefix)}


def _within(formula: Formula, prefix: str) -> Formula:
    return lambda columns: formula(_Prefixed(columns, prefix))


class _Prefixed(Mapping[str, Any]):
    """The columns of a space whose names have a prefix, under their own names."""

    def __init__(self, columns: Columns, prefix: str) -> None:
        self._columns, self._prefix = columns, prefix

    def __getitem__(self, name: str) -> Any:
        return self._columns[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._columns if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(name.startswith(self._prefix) for name in self._columns)


class _Cases:
    """Formulas that differ from choice to choice. Each computes the rows of its choice."""

    def __init__(self, names: tuple[str, ...], choices: Sequence[Choice]) -> None:
        self.names, self.choices = names, choices

    def formula(self, formulas: Sequence[Formula | None], otherwise: Any) -> Formula:
        """One formula for all choices, of one for each. `otherwise` is the result where there is none."""

        def formula(columns: Columns) -> Any:
            parts = []
            for own, rows in zip(formulas, self._rows(columns)):
                parts.append((rows, np.asarray(otherwise if own is None else own(_Some(columns, rows)))))
            length = sum(len(rows) for rows, _ in parts)
            result = np.empty(length, np.result_type(*(part.dtype for _, part in parts)))
            for rows, part in parts:
                result[rows] = part
            return result

        return formula

    def exist(self, columns: Columns) -> NDArray[np.bool_]:
        """Whether there is a space for the choice of each row."""
        found: NDArray[np.bool_] = np.logical_or.reduce(self._chosen(columns))
        return found

    def _rows(self, columns: Columns) -> list[NDArray[np.intp]]:
        """For each choice its rows. A combination without a space belongs to the first choice."""
        chosen = self._chosen(columns)
        chosen[0] |= ~np.logical_or.reduce(chosen)
        return [np.flatnonzero(mask) for mask in chosen]

    def _chosen(self, columns: Columns) -> list[NDArray[np.bool_]]:
        masks = {
            (name, choice[place]): columns[name] == choice[place]
            for choice in self.choices
            for place, name in enumerate(self.names)
        }
        return [np.logical_and.reduce([masks[pair] for pair in zip(self.names, choice)]) for choice in self.choices]


def _united(spaces: Mapping[Choice, ConfigSpace]) -> dict[str, Knob]:
    """The knobs of all spaces by name, with all of their values."""
    found: dict[str, Knob] = {}
    for space in spaces.values():
        for knob in space.knobs:
            first = found.get(knob.name, knob)
            found[knob.name] = Knob(knob.name, tuple(dict.fromkeys((*first.values, *knob.values))), first.doc)
    return found


def _of_values(cases: _Cases, knobs: Mapping[str, Knob], spaces: Mapping[Choice, ConfigSpace]) -> Iterator[Constraint]:
    """For each knob whose values differ: they are those of the chosen space."""
    for name, knob in knobs.items():
        own = {
            choice: space.knobs[space.names.index(name)].values if name in space.names else knob.values[:1]
            for choice, space in spaces.items()
        }
        if len({frozenset(values) for values in own.values()}) == 1:
            continue
        allowing: dict[str, list[str]] = {}
        for choice, values in own.items():
            allowing.setdefault(", ".join(map(str, values)), []).append(_words(choice))
        names = " ".join(cases.names)
        reason = "; ".join(f"{values} if {names} is {' or '.join(of)}" for values, of in allowing.items())
        formulas = [_is_among(name, values) for values in own.values()]
        yield Constraint(f"{name} is one of {reason}", cases.formula(formulas, True))


def _is_among(name: str, values: Sequence[Value]) -> Formula:
    return lambda columns: np.isin(columns[name], np.array(values))


def _rules(space: ConfigSpace) -> dict[tuple[str, int], Formula]:
    """(reason, how many rules before have the same reason) -> rule."""
    found: dict[tuple[str, int], Formula] = {}
    for rule in space.constraints:
        number = sum(reason == rule.reason for reason, _ in found)
        found[rule.reason, number] = rule.predicate
    return found


def _all_keys(mappings: Sequence[Mapping[Any, Any]]) -> list[Any]:
    """Keys of all mappings, each once, in the order of the first mapping that has it."""
    return list(dict.fromkeys(key for mapping in mappings for key in mapping))


def _words(choice: Choice) -> str:
    return " ".join(map(str, choice))


class _Some(Mapping[str, Any]):
    """Some rows of a space's columns."""

    def __init__(self, columns: Columns, rows: NDArray[np.intp]) -> None:
        self._columns, self._rows = columns, rows

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)
