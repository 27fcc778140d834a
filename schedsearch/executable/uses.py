"""Where the calls of a program use its inputs and outputs, and which addresses these may have.

A *port* is an input or output: `input0`, `input1`, ..., `output0`, ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from schedsearch.device.contract import LoadedKernel, check_alignment
from schedsearch.executable.controlled import port_inside
from schedsearch.executable.onnx_runtime import OnnxModel
from schedsearch.executable.program import Program

KINDS = ("input", "output")  # of ports


class Use(NamedTuple):
    """One use of an input or output by a call.

    Attributes:
        call: its number.
        name: of its argument or output.
        offset: bytes from the start of the input or output.
    """

    call: int
    name: str
    offset: int


class Uses:
    """The uses of all ports of a program.

    Args:
        kernels, models: what calls run, by the names of their artifacts.
        bodies: number of a call -> the uses of the programs inside of it.

    Attributes:
        of: port -> its uses.
    """

    def __init__(
        self,
        program: Program,
        kernels: Mapping[str, LoadedKernel],
        models: Mapping[str, OnnxModel],
        bodies: Mapping[int, Sequence[Uses]],
    ) -> None:
        self._program, self._kernels, self._models, self._bodies = program, kernels, models, bodies
        self.of: dict[str, list[Use]] = {port: [] for port in by_port([0] * len(program.inputs), [0] * len(program.outputs))}
        for number, call in enumerate(program.calls):
            for name, index in call.buffers.items():
                place = program.arrays[index].place
                if place.space in KINDS:
                    use = Use(number, name, place.offset + call.offsets.get(name, 0))
                    self.of[f"{place.space}{place.number}"].append(use)
        self._alignments = {port: self._alignment(uses) for port, uses in self.of.items()}

    def check(self, port: str, address: int) -> None:
        """Raises ArgumentError if the address of a port lacks an alignment that a call needs."""
        alignment = self._alignments[port]
        if not alignment or address % alignment:
            for use in self.of[port]:
                self._check(use.call, use.name, address + use.offset)

    def _alignment(self, uses: Sequence[Use]) -> int:
        """An alignment in bytes that suits all calls; 0 if one of them is no kernel and has to be asked."""
        calls, needed = self._program.calls, 1
        for use in uses:
            if not calls[use.call].is_kernel:
                return 0
            alignment = self._kernels[calls[use.call].artifact].artifact.plan.alignments.get(use.name, 1)
            if use.offset % alignment:
                return 0
            needed = math.lcm(needed, alignment)
        return needed

    def _check(self, number: int, name: str, address: int) -> None:
        call = self._program.calls[number]
        if number in self._bodies:
            port = port_inside(call, name)
            for body in self._bodies[number] if port is not None else ():
                body.check(str(port), address)
        elif call.foreign is not None:
            self._models[call.artifact].check_address(name, address)
        else:
            check_alignment(self._kernels[call.artifact].artifact.plan, name, address)


def by_port(inputs: Sequence[int], outputs: Sequence[int]) -> dict[str, int]:
    """The addresses of inputs and outputs, in the network's order, by port."""
    return {f"{kind}{number}": each for kind, some in zip(KINDS, (inputs, outputs)) for number, each in enumerate(some)}
