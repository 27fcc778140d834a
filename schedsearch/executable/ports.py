"""What the inputs and outputs of a network look like, and the inputs of a call in the network's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from schedsearch.errors import ArgumentError, UsageError, did_you_mean
from schedsearch.text import printable
from schedsearch.typed import Array


@dataclass(frozen=True)
class Size:
    """An extent that a caller chooses, from `least` to `most`.

    Raises:
        UsageError: the limits are reversed or negative.
    """

    name: str
    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise UsageError(f"{self.name}={self.least}..{self.most}; allowed: LEAST..MOST with 0 <= LEAST <= MOST")

    def __str__(self) -> str:
        return f"{self.name}={self.least}..{self.most}"


@dataclass(frozen=True)
class Port:
    """An input or output of a network: a contiguous array.

    Attributes:
        shape: of the array in memory. An extent is an integer, or a `Size` that callers choose with an input.
        layout: what each dimension of `shape` is: NCHW or NHWC of an image; the letters ABC... of other arrays have no
            meaning.
        axes: the same letters in the model's order, e.g. NCHW.
        exact: false of an output whose shape the network computes; `shape` is its bound.
    """

    name: str
    shape: tuple[int | Size, ...]
    dtype: str
    layout: str
    axes: str
    exact: bool = True

    @property
    def bound(self) -> tuple[int, ...]:
        """The largest shape."""
        return self.at({}).bound if self.sizes else tuple(each for each in self.shape if isinstance(each, int))

    @property
    def sizes(self) -> dict[str, Size]:
        """The sizes in `shape`, by name."""
        return {each.name: each for each in self.shape if isinstance(each, Size)}

    @property
    def extents(self) -> str:
        """The shape for messages: [n=1..64, 3, 224, 224]."""
        return f"[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        layout = "" if self.layout == self.axes else f" {self.layout}"
        return f"{printable(self.name)} {self.dtype} {'' if self.exact else 'up to '}{self.extents}{layout}"

    def at(self, sizes: Mapping[str, int]) -> Port:
        """The port at chosen sizes; those that are not named are the largest."""
        shape = (sizes.get(each.name, each.most) if isinstance(each, Size) else each for each in self.shape)
        return replace(self, shape=tuple(shape))

    def sizes_of(self, shape: Sequence[int]) -> dict[str, int]:
        """The sizes that an array of this shape has, as far as they are within their limits."""
        if len(shape) != len(self.shape):
            return {}
        pairs = zip(self.shape, shape)
        return {each.name: n for each, n in pairs if isinstance(each, Size) and each.least <= n <= each.most}

    def in_model_order(self, array: Array) -> Array:
        """An array of `shape` with its dimensions in the model's order: a view."""
        return array.transpose([self.layout.index(axis) for axis in self.axes])


def in_order(names: Sequence[str], ports: Sequence[Port], args: Sequence[object], named: Mapping[str, object]) -> list[Any]:
    """The arrays of a call in the order of the network's inputs.

    Args:
        names: of the inputs.
        ports: descriptions of the inputs, for messages.

    Raises:
        ArgumentError: an input is missing, unknown or given twice.
    """
    if len(args) > len(names):
        raise ArgumentError(f"{len(args)} arrays by position; the network takes {len(names)}: {', '.join(map(str, ports))}")
    found = dict(zip(names, args))
    for name, array in named.items():
        if name not in names:
            raise ArgumentError(f"unknown input {name!r}{did_you_mean(name, names)}; allowed: {', '.join(names)}")
        if name in found:
            raise ArgumentError(f"{name} is given by position and by name; give it once")
        found[name] = array
    missing = [name for name in names if name not in found]
    if missing:
        raise ArgumentError(f"missing {', '.join(missing)}; the network takes {', '.join(map(str, ports))}")
    return [found[name] for name in names]
