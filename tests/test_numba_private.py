"""The names of Numba that the backend replaces or uses, and that Numba may change in any version."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba.cuda.core")

from numba.core import compiler, registry
from numba.core.codegen import CPUCodeLibrary
from numba.extending import intrinsic

from schedsearch.backend import numba_private
from schedsearch.backend.live_map import live_map

BACKEND = Path(numba_private.__file__).parent
CORES = ("numba.core", "numba.cuda.core")


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", numba_private.REPLACED)
def test_what_is_replaced_is_there_and_takes_what_its_stand_in_takes(name: str) -> None:
    assert parameters(found(name)) == numba_private.REPLACED[name]


@pytest.mark.parametrize("core", CORES)
def test_the_pass_that_inlines_closures_has_the_method_that_ours_overrides(core: str) -> None:
    closures = importlib.import_module(f"{core}.inline_closurecall")
    assert parameters(closures.InlineClosureCallPass._inline_closure) == ("self", "work_list", "block", "i", "func_def")
    assert {"work_list", "callee_validator", "replace_freevars"} <= set(parameters(closures.inline_closure_call))
    assert callable(closures.callee_ir_validator)


def test_a_library_of_compiled_functions_can_be_linked_without_generating_code() -> None:
    library = registry.cpu_target.target_context.codegen().create_library("empty")
    assert isinstance(library, CPUCodeLibrary)
    library.add_llvm_module(importlib.import_module("llvmlite.binding").parse_assembly(""))
    numba_private.link_and_optimise(library)
    assert not library._finalized
    assert {"flags", "pipeline_class"} <= set(parameters(compiler.compile_extra))


def test_an_intrinsic_tells_its_definition() -> None:
    def one(typing_context: Any) -> Any:
        return None

    assert numba_private.definition_of(intrinsic(one)) is one
    assert numba_private.definition_of(one) is None


def test_numba_has_its_own_functions_back_after_an_error() -> None:
    def stand_in(func_ir: Any) -> None:
        pass

    own = {name: found(name) for name in numba_private.REPLACED}
    with pytest.raises(ZeroDivisionError), numba_private.for_device((9, 0)):
        assert found("numba.cuda.dispatcher.get_current_device")().compute_capability == (9, 0)
        assert found("numba.cuda.core.analysis.compute_live_map") is live_map
        with numba_private.dead_code_removed_by(stand_in, "numba.core"):
            assert found("numba.core.inline_closurecall.dead_code_elimination") is stand_in
        _ = 1 // 0
    assert {name: found(name) for name in own} == own


def test_no_other_file_of_the_backend_assigns_to_a_module() -> None:
    """By the names that modules have in a file: imported ones, and results of `import_module`. `mlir_private` is the file of
    the other compiler, and `test_mlir_private` names what it assigns to."""
    for file in set(BACKEND.glob("*.py")) - {BACKEND / "mlir_private.py"}:
        tree = ast.parse(file.read_text())
        modules = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if isinstance(node, ast.Import) or f"{node.module}.{alias.name}" in sys.modules
        }
        for node in ast.walk(tree):
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("import_module"):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target  # type: ignore[attr-defined]
                modules.add(ast.unparse(target))
        written = [
            ast.unparse(target)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AugAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) in modules
        ]
        written += ["setattr"] if file.name != "numba_private.py" and "setattr(" in file.read_text() else []
        assert not written, file.name
