"""One way to compute a workload (`Config`): a value for each knob."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.typed import JsonObject


class Config(Mapping[str, "int | str | bool"]):
    """One value per knob. Immutable, hashable, independent of the order of its knobs."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, int | str | bool] = MappingProxyType({}), /, **more: int | str | bool) -> None:
        merged = {**values, **more}
        self._values: JsonObject = {name: merged[name] for name in sorted(merged)}
        self._hash = hash(tuple(self._values.items()))

    @classmethod
    def from_json(cls, text: str) -> Config:
        return cls(json.loads(text))

    @property
    def json(self) -> str:
        return canonical_json(self._values)

    @property
    def id(self) -> str:
        return sha256_hex(self.json)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Config):
            return self._values == other._values
        return NotImplemented if not isinstance(other, Mapping) else self._values == dict(other)

    def __repr__(self) -> str:
        return "Config(" + ", ".join(f"{name}={value!r}" for name, value in self._values.items()) + ")"

    def __reduce__(self) -> tuple[object, ...]:
        return Config, (self._values,)
