"""Types that modules of all layers share, for annotations.

Each says what a value is where Python's types end, and why: formats of arrays are known when a program runs, JSON is checked
by its readers, and Numba types the functions that it compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]  # of a format that the workload names
else:  # NumPy takes long to import
    Array = object

JsonObject = dict[str, Any]  # with values of JSON, which the reader checks one by one
JsonMapping = Mapping[str, Any]  # the same where nothing is changed
ParamsByName = dict[str, Any]  # parameters of an operator; what each may be, the operator knows
GivenParams = Mapping[str, Any]  # the same as a user, a file or a model gives them: the operator judges every value
DeviceFunction = Callable[..., Any]  # compiled by Numba, which gives its parameters and results types of its own
