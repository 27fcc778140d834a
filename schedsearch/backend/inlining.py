"""Compiles the plain Python functions that a kernel calls into the kernel, for Numba, Numba-CUDA and numba-cuda-mlir alike.

Numba inlines functions that are defined inside a kernel. It refuses plain functions that the kernel captures or finds in its
module: it asks for a decorated device function instead, which needs a GPU. `inlining` replaces one pass of a
compiler, so that the bodies of such functions also replace their calls, before types are inferred. The same happens to
functions that an inlined function calls, and to functions that are passed as arguments. Captured `RunTimeNumber`s become
arguments of the kernel at the same time.

The pass is a subclass of Numba's; see `numba_private` for what that replaces.

See docs/decisions/045-captured-functions.md.
"""

from __future__ import annotations

import importlib
import operator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from schedsearch.backend.code_identity import inner_codes
from schedsearch.backend.numba_private import Core, dead_code_removed_by

_RUN_TIME = "run_time_"  # begins the names of the arguments that stand for `RunTimeNumber`s
_RANGE = 2  # arguments that a CPU kernel has after those of its params: start and stop


@dataclass(frozen=True)
class RunTimeNumber:
    """Stands for a captured number that the launch passes.

    Attributes:
        index: among the kernel's `KernelStep.run_time`.
        boolean: a truth value, which is passed as 0 or 1.
    """

    index: int
    boolean: bool = False


def inlining(compiler: Any, core: Core) -> Any:
    """A subclass of the class `compiler` that inlines plain functions; `core` is the package that its passes come from."""
    closures: Any = importlib.import_module(f"{core}.inline_closurecall")
    passes = importlib.import_module(f"{core}.untyped_passes")
    machinery = importlib.import_module(f"{core}.compiler_machinery")
    ir = importlib.import_module(f"{core}.ir")
    ir_utils = importlib.import_module(f"{core}.ir_utils")
    postproc = importlib.import_module(f"{core}.postproc")
    types = importlib.import_module("numba_cuda_mlir.types" if core.startswith("numba_cuda_mlir.") else "numba.types")
    inliner = _inliner(core, closures, ir, ir_utils)

    @machinery.register_pass(mutates_CFG=True, analysis_only=False)
    class MakeRoom(passes.FixupArgs):  # type: ignore[name-defined]
        """Arguments that the signature has and the function has not are `RunTimeNumber`s."""

        _name = "schedsearch_make_room"

        def run_pass(self, state: Any) -> bool:
            func_ir = state.func_ir
            room = len(state.args) - func_ir.arg_count
            if room > 0:
                names, at = list(func_ir.arg_names), func_ir.arg_count - (_RANGE if core == "numba.core" else 0)
                for block in func_ir.blocks.values():
                    for each in block.find_insts(ir.Assign):
                        if isinstance(each.value, ir.Arg) and each.value.index >= at:
                            each.value = ir.Arg(each.value.name, each.value.index + room, each.value.loc)
                names[at:at] = [f"{_RUN_TIME}{number}" for number in range(room)]
                func_ir.arg_names, func_ir.arg_count = tuple(names), len(names)
            return bool(super().run_pass(state))

    @machinery.register_pass(mutates_CFG=True, analysis_only=False)
    class InlineFunctions(passes.InlineClosureLikes):  # type: ignore[name-defined]
        _name = "schedsearch_inline_functions"

        def run_pass(self, state: Any) -> bool:
            inliner(state).run()
            _take_run_time_numbers(state.func_ir, ir, ir_utils, types.int64)
            if core.startswith("numba_cuda_mlir."):
                _convert_large_numbers(state.func_ir, ir, ir_utils, types.uint64)
            postproc.PostProcessor(state.func_ir).run()
            _define_in_scopes(state.func_ir.blocks)
            return True

    @machinery.register_pass(mutates_CFG=True, analysis_only=False)
    class TextsAsConstants(machinery.FunctionPass):  # type: ignore[name-defined]
        """Arguments of literal strings become constants, so comparisons with them are decided before types are inferred.
        Otherwise Numba compiles its comparison of strings into the kernel, which takes seconds."""

        _name = "schedsearch_texts_as_constants"

        def __init__(self) -> None:
            super().__init__()

        def run_pass(self, state: Any) -> bool:
            changed = False
            for block in state.func_ir.blocks.values():
                for each in block.find_insts(ir.Assign):
                    if isinstance(each.value, ir.Arg) and isinstance(state.args[each.value.index], types.StringLiteral):
                        each.value = ir.Const(state.args[each.value.index].literal_value, each.loc)
                        changed = True
            if changed:
                state.func_ir._definitions = ir_utils.build_definitions(state.func_ir.blocks)
            return changed

    class InliningCompiler(compiler):
        def define_pipelines(self) -> Any:
            pipelines = super().define_pipelines()
            for pipeline in pipelines:
                (at,) = (number for number, (each, _) in enumerate(pipeline.passes) if each is passes.InlineClosureLikes)
                pipeline.passes[at] = InlineFunctions, "inline calls of plain functions"
                (at,) = (number for number, (each, _) in enumerate(pipeline.passes) if each is passes.IRProcessing)
                pipeline.passes.insert(at + 1, (TextsAsConstants, "strings become constants"))
                (at,) = (number for number, (each, _) in enumerate(pipeline.passes) if each is passes.FixupArgs)
                pipeline.passes[at] = MakeRoom, "make room for numbers that a launch passes"
                pipeline.finalize()
            return pipelines

    return InliningCompiler


def _inliner(core: Core, closures: Any, ir: Any, ir_utils: Any) -> Any:
    """A subclass of Numba's class that inlines closures: it inlines captured plain functions, too."""

    class Inliner(closures.InlineClosureCallPass):
        def __init__(self, state: Any) -> None:
            super().__init__(state.func_ir, state.flags.auto_parallel)
            self._typing_context = state.typingctx
            self._typing_context.refresh()  # what was registered since the last compilation
            self._modules: dict[CodeType, dict[str, Any]] = {}  # code of inner functions -> globals of their module
            self._within: dict[int, tuple[CodeType | FunctionType, ...]] = {}  # id of a block -> what it was inlined from

        def run(self) -> None:
            """Numba's pass ends by removing dead code. It regards a store as dead if the array is not read later and is not
            an argument, but arrays of kernels lie at addresses. Here all stores stay."""
            with dead_code_removed_by(self._remove_dead_values, core):
                super().run()

        @staticmethod
        def _remove_dead_values(func_ir: Any) -> None:
            stores = (each for block in func_ir.blocks.values() for each in block.find_insts(ir.SetItem))
            ir_utils.dead_code_elimination(func_ir, alias_map={}, arg_aliases={each.target.name for each in stores})

        def _inline_closure(self, work_list: Any, block: Any, index: int, callee: Any) -> bool:
            if isinstance(callee, ir.FreeVar | ir.Global) and isinstance(callee.value, FunctionType):
                ir_utils.require(not self._is_known_to_numba(callee.value))
                function: Any = callee.value
                code, module = function.__code__, function.__globals__
                self._modules |= dict.fromkeys(inner_codes(code), module)
            else:
                ir_utils.require(isinstance(callee, ir.Expr) and callee.op == "make_function")
                function, code = callee, callee.code
                module = self._modules.get(code, self.func_ir.func_id.func.__globals__)
            identity = callee.value if function is not callee else code  # functions of one factory share their code
            within = self._within.get(id(block), ())
            if identity in within:
                raise ValueError(f"{code.co_name} calls itself; it is compiled into the kernel: write a loop instead")
            known = len(work_list)
            closures.inline_closure_call(
                self.func_ir, module, block, index, function,
                work_list=work_list,
                callee_validator=closures.callee_ir_validator,
                replace_freevars=function is callee,  # a captured function brings its cells along
            )  # fmt: skip
            after, *inlined = [each for _, each in work_list[known:]]
            self._within[id(after)] = within
            self._within |= {id(each): (*within, identity) for each in inlined}
            return True

        def _is_known_to_numba(self, function: FunctionType) -> bool:
            """Whether Numba has an implementation of its own for calls of `function`."""
            try:
                self._typing_context.resolve_value_type(function)
            except ValueError:
                return False
            return True

    return Inliner


def _define_in_scopes(blocks: dict[int, Any]) -> None:
    """Defines all variables in every scope, as Numba's `fixup_var_define_in_scope`, which does so for each block: blocks
    share few scopes, and a kernel of a hundred inlined functions has hundreds of blocks and ten thousand variables."""
    used: dict[str, Any] = {}
    for block in blocks.values():
        for each in block.body:
            for var in each.list_vars():
                used.setdefault(var.name, var)
    for scope in {id(block.scope): block.scope for block in blocks.values()}.values():
        for name, var in used.items():
            if name not in scope.localvars:
                scope.localvars.define(name, var)


def _take_run_time_numbers(func_ir: Any, ir: Any, ir_utils: Any, int64: Any) -> None:
    """Replaces captured `RunTimeNumber`s by arguments, converted to the type of captured numbers or truth values."""
    room = [index for index, name in enumerate(func_ir.arg_names) if name.startswith(_RUN_TIME)]
    numbers = set()
    for block in func_ir.blocks.values():
        body = []
        for each in block.body:
            constant = isinstance(each, ir.Assign) and isinstance(each.value, ir.FreeVar | ir.Global | ir.Const)
            number = each.value.value if constant else None
            if isinstance(number, RunTimeNumber):
                numbers.add(number.index)
                body += _taken(each, number, room[number.index], ir, int64)
            else:
                body.append(each)
        block.body = body
    if len(numbers) != len(room):
        raise TypeError(f"the launch passes {len(room) - len(numbers)} more arguments than the function takes")
    if numbers:
        func_ir._definitions = ir_utils.build_definitions(func_ir.blocks)


def _convert_large_numbers(func_ir: Any, ir: Any, ir_utils: Any, uint64: Any) -> None:
    """Numbers from 2**63 on become conversions of int64s of the same bits: numba-cuda-mlir has no other constants."""
    found = False
    for block in func_ir.blocks.values():
        body = []
        for each in block.body:
            constant = isinstance(each, ir.Assign) and isinstance(each.value, ir.FreeVar | ir.Global | ir.Const)
            if constant and type(each.value.value) is int and each.value.value >= 1 << 63:
                scope, loc, found = each.target.scope, each.loc, True
                bits, kind = scope.redefine("$bits", loc), scope.redefine("$bits_of", loc)
                body += [
                    ir.Assign(ir.Const(each.value.value - (1 << 64), loc), bits, loc),
                    ir.Assign(ir.Global("uint64", uint64, loc), kind, loc),
                    ir.Assign(ir.Expr.call(kind, (bits,), (), loc), each.target, loc),
                ]
            else:
                body.append(each)
        block.body = body
    if found:
        func_ir._definitions = ir_utils.build_definitions(func_ir.blocks)


def _taken(assign: Any, number: RunTimeNumber, index: int, ir: Any, int64: Any) -> list[Any]:
    """The statements that assign an argument instead of a captured number."""
    scope, loc = assign.target.scope, assign.loc
    given, other = scope.redefine("$run_time", loc), scope.redefine("$run_time_of", loc)
    if number.boolean:
        value = ir.Expr.binop(operator.ne, given, other, loc)
        constant = ir.Const(0, loc)
    else:
        value = ir.Expr.call(other, (given,), (), loc)
        constant = ir.Global("int64", int64, loc)
    return [
        ir.Assign(ir.Arg(f"{_RUN_TIME}{number.index}", index, loc), given, loc),
        ir.Assign(constant, other, loc),
        ir.Assign(value, assign.target, loc),
    ]
