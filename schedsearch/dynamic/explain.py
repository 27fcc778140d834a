"""What each call of a graph needs, and what a run costs the host, as a table."""

from __future__ import annotations

from schedsearch.dynamic.program import DynamicCall, DynamicProgram
from schedsearch.ops.dependence import EXTENTS, Dependence

_WORD = 8


def explain(program: DynamicProgram) -> str:
    """A line for each segment and call: what shapes need from whom, and what an exact run copies, waits for and allocates.

    A bounded run copies nothing to the host, waits for nothing and allocates nothing.

    Examples:
        >>> from schedsearch import dyn_strided_slice
        >>> from schedsearch.dynamic.graph import DynamicGraph
        >>> graph = DynamicGraph()
        >>> arrays = [graph.input("x", (64, 8), "float16"), *(graph.input(n, (2,), "int64") for n in ("begin", "end"))]
        >>> graph.output(graph.call(dyn_strided_slice(x=(64, 8), strided=False), *arrays, name="window"))
        >>> print(explain(graph.program()))
        segment 0: exact runs copy 16 bytes to the host and wait once
          window  needs the shape of x; the values of begin, end  allocates y
        bounded runs: 0 bytes to the host, 0 waits, 0 allocations
    """
    lines = []
    for number, segment in enumerate(program.segments):
        lines.append(f"segment {number}: {_fetched(segment.fetched.count if segment.fetched else 0)}")
        width = max((len(call.name) for call in segment.calls), default=0)
        lines += [f"  {call.name:{width}}  {_needs(call)}  {_allocates(call, program)}" for call in segment.calls]
    if program.last is not None:
        lines.append(f"outputs: {_fetched(program.last.count)}, for what kernels counted")
    lines.append("bounded runs: 0 bytes to the host, 0 waits, 0 allocations")
    return "\n".join(lines)


def _fetched(words: int) -> str:
    if not words:
        return "exact runs copy nothing to the host and wait for nothing"
    return f"exact runs copy {_WORD * words} bytes to the host and wait once"


def _needs(call: DynamicCall) -> str:
    found: dict[Dependence, dict[str, None]] = {Dependence.SHAPE: {}, Dependence.VALUE: {}}
    for function in call.shape_functions.values():
        for argument in function.inputs:
            found[function.needs[argument]][call.inputs[argument]] = None
    read = {spec.name for spec in call.workload.signature}
    found[Dependence.SHAPE] |= {name: None for argument, name in call.inputs.items() if f"{argument}{EXTENTS}" in read}
    texts = [
        f"the {'shape' if need is Dependence.SHAPE else 'values'} of {', '.join(names)}"
        for need, names in found.items()
        if names
    ]
    return f"needs {'; '.join(texts)}" if texts else "needs nothing"


def _allocates(call: DynamicCall, program: DynamicProgram) -> str:
    made = [output for output, name in call.outputs.items() if name in program.values]
    values = [program.values[call.outputs[output]] for output in made]
    if all(value.view_of for value in values):
        return "allocates nothing"
    at_bound = any(value.words and (value.counted or not value.strided) for value in values)
    return f"allocates {', '.join(made)}{' at the bound' if at_bound else ''}"
