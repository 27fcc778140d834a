"""What callers give `optimize_` and the backend, checked before anything is tuned or replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from schedsearch.errors import ArgumentError, DatabaseError, UsageError, did_you_mean, first_line
from schedsearch.records.location import require_file
from schedsearch.records.shipped import any_shipped
from schedsearch.runtime.fallback import check_levels
from schedsearch.text import type_text

Filter = Callable[[nn.Module, str], bool]
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_options(given: dict[str, Any]) -> None:
    """Checks the values of options by their names; a name that is not known here is not looked at.

    Raises:
        TypeError: a value is of a type that is not allowed.
        UsageError: a value is of an allowed type, but impossible.
    """
    for name, value in given.items():
        if (check := _CHECKS.get(name)) is not None:
            check(name, value)


def check_database(db: str | os.PathLike[str], allow: Sequence[str], tune: bool) -> None:
    """Raises DatabaseError if a database cannot be read, or with `tune` be made, because of where it is."""
    path = require_file(db)
    if path.is_dir():
        raise DatabaseError(f"{path} is a folder; give the file of a database, e.g. {path / 'records.db'}")
    if path.exists():
        return
    if tune and not path.absolute().parent.is_dir():
        raise DatabaseError(f"there is no folder {path.absolute().parent} for the database {path.name}; make it first")
    levels = check_levels(allow)
    if not tune and "default" not in levels and not ("shipped" in levels and any_shipped()):
        raise DatabaseError(f"there is no database {path}; give one that schedsearch made, or tune=True to make it")


class CheckedFilter:
    """A caller's filter, which is asked once for each layer.

    Args:
        filter_fn: (module, its name) -> whether its layer may be swapped; None: all may.
    """

    def __init__(self, filter_fn: Filter | None) -> None:
        self._filter = filter_fn
        self._known: dict[tuple[int, str], bool] = {}

    def __call__(self, module: nn.Module, name: str) -> bool:
        """Raises TypeError if the answer is neither True nor False, and whatever the caller's function raises."""
        if self._filter is None:
            return True
        key = id(module), name
        if key not in self._known:
            found = self._filter(module, name)
            if type(found) is not bool:
                raise TypeError(
                    f"filter_fn returns {_shown(found)} for {name!r}; allowed: True (the layer may be swapped) or False; "
                    "bool(...) makes one of them"
                )
            self._known[key] = found
        return self._known[key]


def checked_example(example: object) -> tuple[Any, ...]:
    """The arguments that an example stands for.

    Raises:
        ArgumentError: it has no tensor, or one that no kernel serves: of a class of its own, sparse or quantised.
    """
    args = example if isinstance(example, tuple) else (example,)
    leaves = pytree.tree_leaves(args)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    for each in tensors:
        kind = _strange(each)
        if kind:
            raise ArgumentError(f"the example is {kind}; allowed: torch.Tensor, dense and in floating point or integers")
    if not tensors:
        kinds = ", ".join(sorted({type(each).__name__ for each in leaves})) or "nothing"
        raise ArgumentError(
            f"the example has no tensor; got: {kinds}; give an input as later calls have it, or a tuple of several"
        )
    return args


def check_devices(model: torch.device | None, args: tuple[object, ...]) -> None:
    """Raises ArgumentError if an example does not lie where the model does.

    Args:
        model: the device of its parameters and buffers; None if it has none.
    """
    inputs = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
    devices = sorted({str(each.device) for each in inputs})
    if model is None and len(devices) > 1:
        raise ArgumentError(f"the tensors of the example lie on {' and '.join(devices)}; allowed: one device")
    if model is not None and devices != [str(model)]:
        raise ArgumentError(
            f"the example is on {' and '.join(devices)} and the model on {model}; give example.to({str(model)!r})"
        )


def misfit(model: nn.Module, args: tuple[object, ...], error: Exception) -> ArgumentError:
    """What to tell whoever gave an example on which the model fails."""
    inputs = [each for each in pytree.tree_leaves(args) if isinstance(each, torch.Tensor)]
    given = ", ".join(f"{_name(each.dtype)} {list(each.shape)} on {each.device}" for each in inputs)
    kinds = sorted({_name(each.dtype) for each in model.parameters()})
    weights = f"; its parameters are {' and '.join(kinds)}" if kinds else ""
    text = first_line(error).removesuffix(", but expected one of:")
    several = "; for several inputs give a tuple of them, not a list" if len(args) == 1 and isinstance(args[0], list) else ""
    return ArgumentError(
        f"the model fails on the example: {text}; the example is {given}{weights}; give an input as later calls have "
        f"it{several}"
    )


def _strange(tensor: torch.Tensor) -> str:
    """What makes a tensor one that no kernel takes; empty if nothing does."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        return type_text(tensor)
    if tensor.is_quantized:
        return f"quantised ({_name(tensor.dtype)})"
    return "" if tensor.layout == torch.strided else f"a tensor in the layout {_name(tensor.layout)}"


def _name(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _flag(name: str, value: object) -> None:
    if type(value) is not bool:
        raise TypeError(f"{name} is {_shown(value)}; allowed: True or False")


def _trials(name: str, value: object) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} is {_shown(value)}; allowed: an integer, 1 or more")
    if value < 1:
        raise UsageError(f"{name} {value} is not possible; allowed: an integer, 1 or more")


def _seconds(name: str, value: Any) -> None:
    if type(value) not in (int, float):
        raise TypeError(f"{name} is {_shown(value)}; allowed: a number of seconds, more than 0")
    if not value > 0:  # NaN, too
        raise UsageError(f"{name} {value} is not possible; allowed: a number of seconds, more than 0")


def _path(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f"{name} is {_shown(value)}; allowed: the path of a database, as a string or a pathlib.Path")
    if not os.fspath(value):
        raise UsageError(f"{name} is empty; allowed: the path of a database")


def _levels(name: str, value: object) -> None:
    if not isinstance(value, str | list | tuple | set | frozenset) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{name} is {_shown(value)}; allowed: names of levels, e.g. ('exact', 'same_architecture')")
    if not check_levels(value):
        raise UsageError(f"{name} is empty, so that no kernel may be found; allowed: one level or more, e.g. ('exact',)")


def _mode(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {_shown(value)}; allowed: {', '.join(MODES)}")
    if value not in MODES:
        raise UsageError(f"unknown {name} {value!r}{did_you_mean(value, MODES)}; allowed: {', '.join(MODES)}")


def _function(what: str) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if value is not None and not callable(value):
            raise TypeError(f"{name} is {_shown(value)}; allowed: {what}, or None")

    return check


def _timer(name: str, value: object) -> None:
    if value is not None and not callable(getattr(value, "ns", None)):
        raise TypeError(f"{name} is {_shown(value)}; allowed: an object with a method ns(runs), or None")


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "db": _path,
    "tune": _flag,
    "trials": _trials,
    "tune_s": _seconds,
    "networks": _flag,
    "layers": _flag,
    "network": _flag,
    "mode": _mode,
    "allow": _levels,
    "filter_fn": _function("a function of a module and its name"),
    "report": _function("a function that takes a Report"),
    "timer": _timer,
}
