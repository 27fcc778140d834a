"""A stage of `schedsearch.build`: which weights stay in the file of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from schedsearch.executable.assemble import Executable
from schedsearch.executable.build_options import BuildOptions
from schedsearch.executable.program import Reference
from schedsearch.executable.reading import ReadModel
from schedsearch.executable.references import find
from schedsearch.network.graph import Network
from schedsearch.text import counted


def with_references(executable: Executable, network: Network, read: ReadModel, options: BuildOptions) -> Executable:
    """The executable with what `find` finds, if the options say that weights stay in the model's file."""
    if options.weights != "reference" or read.path is None or options.out is None:
        return executable
    program = executable.program
    found = find(program, network.all_constants, read.path, options.out.parent)
    nbytes = {sha256: data.nbytes for sha256, data in zip(program.weights, executable.weights)}
    say_weights(nbytes, found, str(read.path), options.say)
    return replace(executable, references=found)


def say_weights(nbytes: Mapping[str, int], found: Mapping[str, Reference], model: str, say: Callable[[str], None]) -> None:
    """Says how much stays outside; `nbytes`: of each weight."""
    kept = sum(each for sha256, each in nbytes.items() if sha256 in found)
    say(f"{len(found)} of {counted(len(nbytes), 'weight')} ({kept:,} of {sum(nbytes.values()):,} bytes) stay in {model}")
