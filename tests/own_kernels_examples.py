"""The modules of examples/own_kernel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "own_kernel"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"own_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as for an imported module
    spec.loader.exec_module(module)
    return module
