"""The .c and .h of one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schedsearch.c_export.chosen import Chosen, needed, pointer_names
from schedsearch.c_export.describe import description
from schedsearch.c_export.plan_source import Memory, plan_source
from schedsearch.c_export.text import comment, parameter_names, string, words
from schedsearch.identity import canonical_json
from schedsearch.ops.dtypes import SCALAR_FORMATS

_OVERLENGTH = 4000  # characters of a string literal; ISO C compilers need not support more than 4095
_TAKEN = ("stream", "workspace", "prepared", "pointers", "scalars", "kernel", "image")
_C_TYPES = {name: f"{name}_t" for name in SCALAR_FORMATS} | {"float32": "float", "float64": "double", "bool": "uint8_t"}


@dataclass(frozen=True)
class Signature:
    """The C functions of one kernel.

    Attributes:
        names: workload's name -> C name of each array, in the order of a call.
        scalars: (C name, C type, member of schedsearch_scalar) of each scalar.
        constants: workload's names of the arrays that NAME_prepare repacks.
        remaining: workload's names of the arrays that NAME_with_prepared takes.
    """

    name: str
    names: dict[str, str]
    outputs: frozenset[str]
    scalars: tuple[tuple[str, str, str], ...]
    constants: tuple[str, ...]
    remaining: tuple[str, ...]

    @classmethod
    def of(cls, chosen: Chosen) -> Signature:
        workload, plan = chosen.workload, chosen.plan
        arrays = pointer_names(workload)
        plain = [scalar.name for scalar in workload.scalars]
        made = parameter_names((*arrays, *plain), (*_TAKEN, chosen.name))
        members = ["boolean" if scalar.dtype == "bool" else scalar.dtype for scalar in workload.scalars]
        types = [_C_TYPES[scalar.dtype] for scalar in workload.scalars]
        constants = tuple(name for name in arrays if name in plan.constants)
        used_later = needed(plan, arrays, constant=False)
        return cls(
            chosen.name,
            dict(zip(arrays, made)),
            frozenset(output.name for output in workload.outputs),
            tuple(zip(made[len(arrays) :], types, members)),
            constants,
            tuple(name for name in arrays if name not in constants or name in used_later),
        )

    @property
    def prototypes(self) -> list[str]:
        """Without semicolons: the plain call; then those with repacked constants, if the kernel has any."""
        scalars = [f"{kind} {name}" for name, kind, _ in self.scalars]
        found = [self._prototype("", [*self._arrays(self.names), *scalars, "void *workspace"])]
        if self.constants:
            found.append(self._prototype("_prepare", [*self._arrays(self.constants), "void *prepared"]))
            last = ["void *workspace", "const void *prepared"]
            found.append(self._prototype("_with_prepared", [*self._arrays(self.remaining), *scalars, *last]))
        return found

    def _arrays(self, names: Sequence[str] | dict[str, str]) -> list[str]:
        return [f"{'' if name in self.outputs else 'const '}void *{self.names[name]}" for name in names]

    def _prototype(self, suffix: str, parameters: list[str]) -> str:
        return f"int {self.name}{suffix}(\n    {', '.join(['CUstream stream', *parameters])})"

    @property
    def definitions(self) -> list[str]:
        """The functions of `prototypes`."""
        values = [
            f"    scalars[{number}].bits = 0;\n    scalars[{number}].{member} = {name};"
            for number, (name, _, member) in enumerate(self.scalars)
        ]
        scalars = "\n".join([f"    schedsearch_scalar scalars[{len(values)}];", *values, ""]) if values else ""
        given = "scalars" if values else "NULL"
        kernel = f"&{self.name}_kernel"
        calls = [
            (list(self.names), scalars, f"schedsearch_run({kernel}, stream, pointers, {given}, workspace)"),
            (self.constants, "", f"schedsearch_prepare({kernel}, stream, pointers, prepared)"),
            (
                self.remaining,
                scalars,
                f"schedsearch_run_prepared({kernel}, stream, pointers, {given}, workspace, prepared)",
            ),
        ]
        return [
            f"{prototype}\n{{\n{self._pointers(names)}{before}    return {call};\n}}"
            for prototype, (names, before, call) in zip(self.prototypes, calls)
        ]

    def _pointers(self, given: Sequence[str]) -> str:
        values = "\n".join(
            f"    pointers[{number}] = {self.names[name] if name in given else 'NULL'};"
            for number, name in enumerate(self.names)
        )
        return f"    const void *pointers[{len(self.names)}];\n{values}\n"


def header(chosen: Chosen) -> str:
    """The .h of a kernel."""
    signature, memory, name = Signature.of(chosen), Memory.of(chosen.plan), chosen.name
    prototypes = signature.prototypes
    repacked = ", ".join(signature.names[each] for each in signature.constants)
    prepared = f"""
/* {name}_prepare repacks {repacked} once, into {memory.prepared_bytes} bytes
 * of memory on the GPU. Calls with the result leave that out and need {memory.scratch_bytes} bytes of workspace. */
{prototypes[1]};
{prototypes[2]};
size_t {name}_prepared_bytes(void);
""" if signature.constants else ""  # fmt: skip
    guard = f"SCHEDSEARCH_{name.upper()}_H"
    return f"""/* {comment(chosen.workload.label)}
 * for {comment(chosen.best.row.target)}, {chosen.time_ns / 1e3:.2f} us. Written by schedsearch. */
#ifndef {guard}
#define {guard}

#include "schedsearch.h"

#ifdef __cplusplus
extern "C" {{
#endif

/* Enqueues the kernel on a stream of the current context. The arrays are on the GPU; the workspace is
 * {memory.workspace_bytes} bytes there{", so it may be NULL" if not memory.workspace_bytes else ""}. */
{prototypes[0]};
size_t {name}_workspace_bytes(void);
{prepared}
/* JSON: shapes, dtypes, alignments, device, time, origin. */
const char *{name}_describe(void);

/* Loads the machine code now, e.g. before a stream is captured. */
int {name}_load(void);

extern const schedsearch_kernel {name}_kernel;

#ifdef __cplusplus
}}
#endif

#endif
"""


def source(chosen: Chosen) -> str:
    """The .c of a kernel."""
    signature, memory, name, workload = Signature.of(chosen), Memory.of(chosen.plan), chosen.name, chosen.workload
    texts = {"workload_text": workload.json, "description": canonical_json(description(chosen))}
    pragma = """
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Woverlength-strings"
#endif
""" if any(len(string(text)) > _OVERLENGTH for text in texts.values()) else ""  # fmt: skip
    literals = "\n".join(f"static const char {each}[] =\n    {string(text)};\n" for each, text in texts.items())
    fields = [
        string(name), string(workload.id), "workload_text", "description",
        len(signature.names), "pointer_bytes", len(signature.scalars),
        memory.workspace_bytes, memory.prepared_bytes, memory.scratch_bytes, "&code",
    ]  # fmt: skip
    prepared = (
        f"size_t {name}_prepared_bytes(void)\n{{\n    return {name}_kernel.prepared_bytes;\n}}\n"
        if signature.constants
        else ""
    )
    sizes = [str(spec.span_bytes) for spec in (*workload.signature, *workload.outputs)]
    functions = "\n\n".join(signature.definitions)
    return f"""/* {comment(workload.label)}; written by schedsearch. */
#include "{name}.h"

#include "schedsearch_code.h"
{pragma}
/* {len(chosen.artifact.code)} bytes of machine code for {comment(chosen.plan.arch)}, sha256 of it with its launch plan
 * {chosen.artifact.sha256} */
static const uint64_t image[] = {{
{words(chosen.artifact.code)}
}};

{plan_source(chosen)}
static const size_t pointer_bytes[] = {{{", ".join(sizes)}}};
{literals}
const schedsearch_kernel {name}_kernel = {{
    {", ".join(map(str, fields))}
}};

{functions}

size_t {name}_workspace_bytes(void)
{{
    return {name}_kernel.workspace_bytes;
}}

{prepared}
const char *{name}_describe(void)
{{
    return {name}_kernel.description;
}}

int {name}_load(void)
{{
    return schedsearch_load(&{name}_kernel);
}}
"""
