"""From the calls of a graph to a `DynamicProgram`: which segment each belongs to, and where extents are in the block of
sizes.

A call whose shape function needs the values of an array, or the counted extents of one, that its own segment would compute
begins a new segment. So does a row of numbers. One that needs only numbers begins none: these are in the block of sizes.

See docs/decisions/156-segments-by-need.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from schedsearch.dynamic.program import DynamicCall, DynamicProgram, DynamicValue, Formula, Numbers, Segment
from schedsearch.ops.dependence import EXTENTS, STRIDE, Dependence, ShapeFunction
from schedsearch.ops.size_steps import SizeStep, Values, Words


class Segmentation:
    def __init__(
        self,
        values: Mapping[str, DynamicValue],
        inputs: Sequence[str],
        outputs: Sequence[str],
        calls: Sequence[DynamicCall | Numbers],
        same: Mapping[str, str],
        known: Mapping[str, tuple[int | Formula, ...]],
    ) -> None:
        self.known = known  # value -> its extents, if they follow from those of the inputs
        self.values, self.inputs, self.outputs, self.steps, self.same = dict(values), inputs, outputs, calls, same
        self.calls = [each for each in calls if isinstance(each, DynamicCall)]
        self.words: dict[str, Words] = {}
        self.fixed: dict[str, Words] = {}
        self.bounds = {name: value.shape for name, value in values.items()}

    def program(self) -> DynamicProgram:
        groups = self._groups()
        at = len(groups)  # behind the statuses
        for name in self.inputs:
            if self.values[name].sizes:
                at = self._place(name, at)
        at = self._place_fixed(at)
        for step in self.steps:
            for name, _ in _functions(step):
                if isinstance(step, Numbers) or name in self.known:
                    at = self._place(name, at)
        segments, pending = [], at
        for group in groups:
            steps, values = [], []
            calls = [each for each in group if isinstance(each, DynamicCall)]
            for call in calls:
                for output, function in call.shape_functions.items():
                    if not function.counted and call.outputs[output] not in self.known:
                        at = self._place(call.outputs[output], at)
            fetched = Words(pending, at - pending) if at > pending else None
            pending = at
            for each in group:
                for name, function in _functions(each):
                    if function.counted:
                        at = self._place(name, at)
                    else:
                        given = tuple(self._given(each, argument, function.needs[argument]) for argument in function.inputs)
                        bound = None if self.values[name].numbers else self.values[name].shape
                        steps.append(SizeStep(function, given, self.words[name], bound))
                        values.append(name)
            segments.append(Segment(tuple(calls), tuple(steps), tuple(values), fetched))
        for name in list(self.values):
            self.values[name] = self._finished(name)
        last = Words(pending, at - pending) if at > pending else None
        fixed = tuple((words, self.values[name].shape) for name, words in self.fixed.items())
        return DynamicProgram(self.values, tuple(self.inputs), tuple(self.outputs), tuple(segments), max(at, 1), fixed, last)

    def _place_fixed(self, at: int) -> int:
        """Places the extents of arrays whose shape is needed and never changes."""
        own = {name for step in self.steps for name, _ in _functions(step)}
        for step in self.steps:
            needed = [
                argument
                for _, function in _functions(step)
                for argument in (() if function.counted else function.inputs)
                if function.needs[argument] is Dependence.SHAPE
            ]
            if isinstance(step, DynamicCall):
                arguments = {spec.name for spec in step.workload.signature}
                needed += [argument for argument in step.inputs if f"{argument}{EXTENTS}" in arguments]
            for name in (step.inputs[argument] for argument in needed):
                if not (self.values[name].sizes or name in own or name in self.same or name in self.fixed):
                    self.fixed[name] = Words(at, len(self.values[name].shape))
                    at += len(self.values[name].shape)
        return at

    def _groups(self) -> list[list[DynamicCall | Numbers]]:
        """The calls and numbers of each segment, each as early as what it needs is there."""
        level: dict[str, int] = {}  # value -> the segment that makes it
        counted: set[str] = set()
        groups: list[list[DynamicCall | Numbers]] = [[]]
        for step in self.steps:
            inputs = (self.values[name] for name in step.inputs.values())
            own = max((level.get(value.view_of or value.name, 0) for value in inputs), default=0)
            for _, function in _functions(step):
                own = max([own, *(1 + level.get(name, -1) for name in self._waits_for(step, function, counted))])
            groups += [[] for _ in range(own + 1 - len(groups))]
            groups[own].append(step)
            made = [step.name] if isinstance(step, Numbers) else list(step.outputs.values())
            level |= dict.fromkeys(made, own)
            counted |= {name for name, function in _functions(step) if function.counted}
        return groups

    def _waits_for(self, step: DynamicCall | Numbers, function: ShapeFunction, counted: set[str]) -> Iterator[str]:
        """The values that must be there before a shape function can be computed."""
        for argument in function.inputs:
            value = self.values[step.inputs[argument]]
            root = self.same.get(value.name, value.name)
            if function.needs[argument] is Dependence.VALUE and not function.counted:
                if not value.numbers:
                    yield value.view_of or value.name
            elif root in counted:
                yield root

    def _place(self, name: str, at: int) -> int:
        """Words for extents, or for numbers."""
        count = self.bounds[name][0] if self.values[name].numbers else len(self.bounds[name])
        self.words[name] = Words(at, count)
        return at + count

    def _given(self, step: DynamicCall | Numbers, argument: str, need: Dependence) -> Words | Values:
        value = self.values[step.inputs[argument]]
        if need is Dependence.VALUE and value.numbers:
            return self.words[value.name]
        if need is Dependence.VALUE:
            count = 1
            for extent in value.shape:
                count *= extent
            return Values(value.name, value.dtype, count)
        root = self.same.get(value.name, value.name)
        return self._cut(root, value) or self.fixed[root]

    def _cut(self, root: str, value: DynamicValue) -> Words | None:
        """The words of a value with the extents of another, or of a view with the first of them."""
        return Words(self.words[root].first, len(value.shape)) if root in self.words else None

    def _finished(self, name: str) -> DynamicValue:
        value = self.values[name]
        if value.numbers:
            return replace(value, words=self.words[name])
        root = self.same.get(name, name)
        strided, names = True, {name, *(each.name for each in self.values.values() if each.view_of == name)}
        for call in self.calls:
            scalars = {scalar.name for scalar in call.workload.scalars}
            for mine, used in (*call.inputs.items(), *call.outputs.items()):
                strided &= used not in names or f"{mine}{STRIDE}0" in scalars
        counted = any(
            call.outputs[output] == root and function.counted and not value.view_of
            for call in self.calls
            for output, function in call.shape_functions.items()
        )
        return replace(
            value,
            words=self._cut(root, value),
            strided=strided,
            counted=counted,
            fixed=self.fixed.get(name),
            known=self.known.get(name),
        )


def _functions(step: DynamicCall | Numbers) -> Iterator[tuple[str, ShapeFunction]]:
    """The values whose extents a call computes, or the numbers, each with its function."""
    if isinstance(step, Numbers):
        yield step.name, step.function
    else:
        yield from ((step.outputs[output], function) for output, function in step.shape_functions.items())
