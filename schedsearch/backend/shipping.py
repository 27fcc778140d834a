"""Functions by value: pickled with their code, so that a process can use them that cannot import their module."""

from __future__ import annotations

import contextlib
import pickle
import sys
from typing import Any

from schedsearch.errors import UsageError


def pack(value: object, modules: tuple[str, ...] = ()) -> bytes:
    """Pickles a value; functions of `modules`, of notebooks and of scripts are pickled by value.

    Raises:
        UsageError: something that a function captures cannot be pickled.
    """
    from numba import cloudpickle

    by_value = [sys.modules[name] for name in modules if name in sys.modules and name != "__main__"]
    with contextlib.ExitStack() as stack:
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            return bytes(cloudpickle.dumps(value))
        except Exception as error:  # any exception of a captured object
            raise UsageError(
                f"the kernel cannot be sent to compiler processes: {type(error).__name__}: {error}; pass what it captures "
                "as an argument, or capture numbers only"
            ) from error


def unpack(data: bytes) -> Any:
    """The inverse of `pack`. It runs code of the sender, which must be this user's own process."""
    return pickle.loads(data)
