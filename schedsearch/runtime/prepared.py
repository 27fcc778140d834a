"""Constant arguments (weights, scales, folded biases) that are repacked once for many calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from schedsearch.device import Workspaces
from schedsearch.errors import ArgumentError
from schedsearch.runtime.arrays import ArrayView
from schedsearch.workload import Workload


class Preparer(Protocol):
    """The kernel that prepared an argument. Only itself takes the argument."""

    workload: Workload


class PreparedArgument:
    """One of the arguments of a `Prepared`. Calls take it instead of the array.

    Attributes:
        kernel: the kernel that it was prepared for.
        name: of the argument.
        array: the original array, which is kept alive.
        view: the description of the array when it was prepared.
        workspaces: the memory that the constant steps wrote, shared by all arguments that were prepared together; or None.
    """

    __slots__ = ("array", "kernel", "name", "view", "workspaces")

    def __init__(self, kernel: Preparer, name: str, array: Any, view: ArrayView, workspaces: Workspaces | None) -> None:
        self.kernel, self.name, self.array, self.view, self.workspaces = kernel, name, array, view, workspaces

    def __repr__(self) -> str:
        return f"<{self.name} prepared for {self.kernel.workload.label}>"


class Prepared(Mapping[str, PreparedArgument]):
    """The result of `Kernel.prepare`: argument name -> `PreparedArgument`, for `kernel(x, **prepared)`.

    It keeps the values that the arrays had: prepare again after changing an array.

    Attributes:
        kernel: the kernel that made it; no other kernel takes it.
        workspaces: the memory that the constant steps wrote, or None if the kernel has no such steps.
    """

    def __init__(
        self, kernel: Preparer, arrays: Mapping[str, Any], views: Mapping[str, ArrayView], workspaces: Workspaces | None
    ) -> None:
        self.kernel, self.workspaces = kernel, workspaces
        self._arguments = {
            name: PreparedArgument(kernel, name, array, views[name], workspaces) for name, array in arrays.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the repacked arguments take; 0 if the kernel reads the original arrays."""
        return self.workspaces.nbytes if self.workspaces else 0

    def __getitem__(self, name: str) -> PreparedArgument:
        return self._arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def __len__(self) -> int:
        return len(self._arguments)

    def __repr__(self) -> str:
        return f"<{', '.join(self)} of {self.kernel.workload.label}, {self.nbytes} bytes repacked>"


def take_prepared(kernel: Preparer, arguments: Mapping[str, object], constants: tuple[str, ...]) -> Workspaces | None:
    """The workspaces of the prepared ones among `arguments`, or None if the constant steps have to run.

    Args:
        kernel: the kernel that is called.
        arguments: name -> array or `PreparedArgument`.
        constants: names of the arguments that the kernel prepares, all of them together.

    Raises:
        ArgumentError: another kernel prepared one, one is passed for another argument, or they do not belong together.
    """
    given = {name: value for name, value in arguments.items() if isinstance(value, PreparedArgument)}
    for name, value in given.items():
        if value.kernel is not kernel:
            raise ArgumentError(
                f"{name} was prepared by another kernel ({value.kernel!r}); pass what this kernel's prepare returns"
            )
        if value.name != name:
            raise ArgumentError(f"{name} got the argument that was prepared as {value.name}; pass prepared[{name!r}]")
    if not given or not constants:
        return None
    plain = [name for name in constants if name not in given]
    if plain:
        raise ArgumentError(
            f"{', '.join(given)} is prepared and {', '.join(plain)} is not, but the kernel repacks {', '.join(constants)} "
            "together; pass everything that prepare returned"
        )
    workspaces = given[constants[0]].workspaces
    if any(given[name].workspaces is not workspaces for name in constants):
        raise ArgumentError(f"{', '.join(constants)} come from different calls of prepare; prepare them together")
    return workspaces
