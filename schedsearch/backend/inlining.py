"""Compiles the plain Python functions that a kernel calls into the kernel, for Numba and Numba-CUDA alike.

Numba inlines functions that are defined inside a kernel. It refuses plain functions that the kernel captures or finds in its
module: it asks for a decorated device function instead, which needs a GPU. `inlining` replaces one pass of a
compiler, so that the bodies of such functions also replace their calls, before types are inferred. The same happens to
functions that an inlined function calls, and to functions that are passed as arguments.

The pass is a subclass of Numba's. It rests on two private names: `InlineClosureCallPass._inline_closure`, and
`dead_code_elimination` in the module of that class.
"""

from __future__ import annotations

import importlib
from types import CodeType, FunctionType
from typing import Any, Literal

from numba.types import StringLiteral


def inlining(compiler: Any, core: Literal["numba.core", "numba.cuda.core"]) -> Any:
    """A subclass of the class `compiler` that inlines plain functions; `core` is the package that its passes come from."""
    closures: Any = importlib.import_module(f"{core}.inline_closurecall")
    passes = importlib.import_module(f"{core}.untyped_passes")
    machinery = importlib.import_module(f"{core}.compiler_machinery")
    ir = importlib.import_module(f"{core}.ir")
    ir_utils = importlib.import_module(f"{core}.ir_utils")
    postproc = importlib.import_module(f"{core}.postproc")

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
            closures.dead_code_elimination = self._remove_dead_values
            try:
                super().run()
            finally:
                closures.dead_code_elimination = ir_utils.dead_code_elimination

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

    @machinery.register_pass(mutates_CFG=True, analysis_only=False)
    class InlineFunctions(passes.InlineClosureLikes):  # type: ignore[name-defined]
        _name = "schedsearch_inline_functions"

        def run_pass(self, state: Any) -> bool:
            Inliner(state).run()
            postproc.PostProcessor(state.func_ir).run()
            ir_utils.fixup_var_define_in_scope(state.func_ir.blocks)
            return True

    @machinery.register_pass(mutates_CFG=True, analysis_only=False)
    class TextsAsConstants(machinery.FunctionPass):  # type: ignore[name-defined]
        """Arguments of literal texts become constants, so that comparisons with them are decided before types are inferred.
        Otherwise Numba compiles its comparison of texts into the kernel, which takes seconds."""

        _name = "schedsearch_texts_as_constants"

        def __init__(self) -> None:
            super().__init__()

        def run_pass(self, state: Any) -> bool:
            changed = False
            for block in state.func_ir.blocks.values():
                for each in block.find_insts(ir.Assign):
                    if isinstance(each.value, ir.Arg) and isinstance(state.args[each.value.index], StringLiteral):
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
                pipeline.passes.insert(at + 1, (TextsAsConstants, "texts become constants"))
                pipeline.finalize()
            return pipelines

    return InliningCompiler


def inner_codes(code: CodeType) -> list[CodeType]:
    """The code objects of functions defined inside a function, at any depth."""
    own = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return own + [inner for each in own for inner in inner_codes(each)]
