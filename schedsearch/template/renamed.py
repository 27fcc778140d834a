"""Knobs under the names of earlier versions: a template declares what it renamed, and reads what was written before.

Records, journals and workload files keep the names that they were written with. Whatever hands a configuration to a template
asks `Template.current` for it first, and whatever restricts its space asks `Template.restricted`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schedsearch.config import Config
from schedsearch.errors import ConfigError

Value = int | str | bool
Values = Mapping[Value, Mapping[str, Value]]
Renamed = Mapping[str, str | Values]


def current_config(config: Mapping[str, Value], renamed: Renamed) -> Config:
    """The configuration in the knobs of today; equal to `config` if it has them.

    Example:
        >>> renamed = {"group_m": "band", "grid": {"persistent": {"persistent": True}, "split": {"persistent": False}}}
        >>> current_config({"bn": 64, "group_m": 8, "grid": "split"}, renamed)
        Config(band=8, bn=64, persistent=False)
    """
    values = dict(config)
    for old, now in renamed.items():
        if old not in config or config.keys() >= _names(now):
            continue
        value = values.pop(old)
        values |= {now: value} if isinstance(now, str) else now.get(value, {old: value})
    return Config(values)


def current_restriction(
    restrict: Mapping[str, Sequence[Value]], renamed: Renamed, knobs: Mapping[str, Sequence[Value]]
) -> dict[str, Sequence[Value]]:
    """The restrictions of knobs under the names of today; those of other templates' knobs are left out.

    A name that is a knob of today means that knob, unless it is restricted to values that only the earlier knob had.

    Args:
        knobs: those of today, with their values.

    Raises:
        ConfigError: a knob whose values changed is restricted to what it never was.

    Example:
        >>> renamed = {"group_m": "band", "grid": {"persistent": {"persistent": True}, "split": {"persistent": False}}}
        >>> current_restriction({"group_m": [8], "grid": ["split"]}, renamed, {"band": (1, 8), "persistent": (True, False)})
        {'band': [8], 'persistent': [False]}
    """
    found: dict[str, Sequence[Value]] = {}
    for name, values in restrict.items():
        now = renamed.get(name, name)
        if isinstance(now, str):
            found[name if name in knobs else now] = values
        elif name in knobs and (not _listed(values) or all(value in knobs[name] for value in values)):
            found[name] = values
        elif _listed(values) and values and all(value in now for value in values):
            found |= {knob: list(dict.fromkeys(now[value][knob] for value in values)) for knob in sorted(_names(now))}
        else:
            said = "; ".join(
                f"{value!r} is now " + ", ".join(f"{knob}: {one!r}" for knob, one in of.items()) for value, of in now.items()
            )
            raise ConfigError(f"knob {name!r} cannot be restricted to {values!r}; of its earlier values {said}")
    return {name: values for name, values in found.items() if name in knobs}


def _listed(values: object) -> bool:
    return isinstance(values, list | tuple)


def _names(now: str | Values) -> set[str]:
    return {now} if isinstance(now, str) else {name for of in now.values() for name in of}
