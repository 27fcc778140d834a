"""A package of AOTInductor with an operator of an export, in a process of its own: PyTorch's compiler and loader may crash.

    python c_export_package.py pack LIBRARY NAME GIVEN PACKAGE     compiles a model that calls NAME, or none if it is ""
    python c_export_package.py run LIBRARY PACKAGE GIVEN Y         as a program does that only runs models

GIVEN is a file of torch.save with the list of the operator's arguments: x and constants. Y gets twice the operator's output.
"""

from __future__ import annotations

import faulthandler
import sys
from typing import Any

import torch

HANGS_S = 120.0  # then it ends and says where it was


class Model(torch.nn.Module):
    """Twice the output of an operator of x and constants, or, without one, of an addition."""

    def __init__(self, operator: Any, constants: list[Any]) -> None:
        super().__init__()
        self.operator = operator
        for i, each in enumerate(constants):
            self.register_buffer(f"constant{i}", each)

    def forward(self, x: Any) -> Any:
        constants = [each for _, each in self.named_buffers()]
        return (self.operator(x, *constants) if self.operator else x + constants[0].sum()) * 2


def pack(name: str, given: str, package: str) -> None:
    x, *constants = torch.load(given)
    operator = getattr(torch.ops.schedsearch_c, name) if name else None
    program = torch.export.export(Model(operator, constants), (x,))
    torch._inductor.aoti_compile_and_package(program, package_path=package)


def run(package: str, given: str, y: str) -> None:
    loaded = torch._inductor.aoti_load_package(package)
    torch.save(loaded(torch.load(given)[0]), y)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    task, library, *words = sys.argv[1:]
    torch.ops.load_library(library)
    {"pack": pack, "run": run}[task](*words)
