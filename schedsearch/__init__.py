"""schedsearch: search for fast schedules of parameterised kernels, keep them, serve them.

Nothing is imported until it is used (PEP 562), so that `import schedsearch` is cheap wherever it runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from schedsearch import compat

if TYPE_CHECKING:
    from schedsearch.config import Config
    from schedsearch.device.detect import detect
    from schedsearch.ops.conv2d import conv2d
    from schedsearch.runtime import Kernel, KernelCache, compile, explain
    from schedsearch.session import tune
    from schedsearch.target import Target
    from schedsearch.template import Template, load_templates
    from schedsearch.workload import Workload

compat.install()

_HOMES = {
    "Config": "schedsearch.config",
    "Kernel": "schedsearch.runtime",
    "KernelCache": "schedsearch.runtime",
    "Target": "schedsearch.target",
    "Template": "schedsearch.template",
    "Workload": "schedsearch.workload",
    "compile": "schedsearch.runtime",
    "conv2d": "schedsearch.ops.conv2d",
    "detect": "schedsearch.device.detect",
    "explain": "schedsearch.runtime",
    "load_templates": "schedsearch.template",
    "tune": "schedsearch.session",
}

__all__ = [
    "Config",
    "Kernel",
    "KernelCache",
    "Target",
    "Template",
    "Workload",
    "compile",
    "conv2d",
    "detect",
    "explain",
    "load_templates",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'schedsearch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
