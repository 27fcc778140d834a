"""The private names of numba-cuda-mlir that the backend uses, and that it may change in any version."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda_mlir", reason="needs numba-cuda-mlir: make test-mlir")

from schedsearch.backend import mlir_private

BACKEND = Path(mlir_private.__file__).parent


@pytest.mark.parametrize("name", mlir_private.USED)
def test_what_is_called_is_there_and_takes_what_it_is_given(name: str) -> None:
    found = mlir_private.named(name)
    parameters = tuple(inspect.signature(found).parameters)
    assert parameters[: len(mlir_private.USED[name])] == mlir_private.USED[name]


def test_the_compute_capability_of_a_card_is_back_after_an_error() -> None:
    tools = mlir_private.named("numba_cuda_mlir.tools")
    own = tools._cached_cc
    with pytest.raises(ZeroDivisionError), mlir_private.for_device((9, 0)):
        assert tools.get_gpu_compute_capability(tuple) == (9, 0)
        _ = 1 // 0
    assert tools._cached_cc == own


def test_no_other_module_imports_the_package() -> None:
    for path in BACKEND.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("numba_cuda_mlir") for name in names), path.name
