"""Our analysis of live variables gives Numba's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from schedsearch.backend.inlining import _define_in_scopes
from schedsearch.backend.live_map import live_map


def nested(n: int, data: Any) -> int:
    total = first = 0
    for i in range(n):
        if data[i] < 0:
            continue
        while total < i:
            total += data[i] * first
            if total > 99:
                break
        first = i
    return total if n > 3 else first


def straight(n: int, data: Any) -> int:
    twice = n + n
    data[0] = twice
    return twice


def endless(n: int, data: Any) -> int:
    while True:
        n += 1
        if data[n]:
            data[n] = n


def ir_of(function: Callable[..., Any]) -> Any:
    pytest.importorskip("numba.cuda.core")
    from numba.cuda.core import bytecode, interpreter

    identity = bytecode.FunctionIdentity.from_function(function)
    return interpreter.Interpreter(identity).interpret(bytecode.ByteCode(func_id=identity))


@pytest.mark.parametrize("function", [nested, straight, endless])
def test_the_same_variables_live_at_each_block(function: Callable[..., Any]) -> None:
    blocks = ir_of(function).blocks
    from numba.cuda.core import analysis

    cfg, found = analysis.compute_cfg_from_blocks(blocks), analysis.compute_use_defs(blocks)
    wanted = analysis.compute_live_map(cfg, blocks, found.usemap, found.defmap)
    assert live_map(cfg, blocks, found.usemap, found.defmap) == wanted


def test_every_scope_defines_every_variable() -> None:
    blocks = ir_of(nested).blocks
    from numba.cuda.core import ir

    for block in list(blocks.values())[::2]:
        block.scope = ir.Scope(block.scope, block.loc)
    _define_in_scopes(blocks)
    names = {var.name for block in blocks.values() for each in block.body for var in each.list_vars()}
    for block in blocks.values():
        assert all(name in block.scope.localvars for name in names)
