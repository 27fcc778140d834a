"""What building takes from a model and says about it, for networks of fixed sizes and of several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.executable.program import Reference
from schedsearch.network.costs import no_template
from schedsearch.network.graph import Network
from schedsearch.target import Target
from schedsearch.text import counted

if TYPE_CHECKING:
    import onnx_ir

    from schedsearch.network_check.source import Source

_CPU_LAYOUTS = ("NHWC", "NCHW")
_CPU_SLICES = ("float32",)  # dtypes of convolutions that store into slices there
_CPU_APART = ("DepthToSpace",)  # convolutions there cannot store through it


def source_of_file(path: Path, dtype: str | None) -> Source:
    from schedsearch.network_check.source import Source

    return Source.of_file(path, dtype)


def unchecked(has_no_model: bool) -> str:
    """What is said of a network that was not compared with its model."""
    why = "a Network has no model that it could be compared with" if has_no_model else "as asked"
    return f"the network is unchecked, {why}: its results were not compared with the model's"


def lower_for(graph: onnx_ir.Model, dtype: str | None, layout: str, target: Target, fallback: str | None = None) -> Network:
    from schedsearch.network.fallback import lower_with_subgraphs
    from schedsearch.network.lower import LAYOUTS, SLICES, lower

    layouts: tuple[str, ...] = LAYOUTS if layout == "auto" else (layout,)
    if target.kind == "cpu":
        layouts = tuple(each for each in layouts if each in _CPU_LAYOUTS)
    slices, apart = (_CPU_SLICES, _CPU_APART) if target.kind == "cpu" else (SLICES, ())
    if fallback is None:
        return lower(graph, dtype=dtype, layouts=layouts, slices=slices, apart=apart)
    problem = functools.partial(no_template, target=target)
    return lower_with_subgraphs(graph, problem, dtype=dtype, layouts=layouts, slices=slices, apart=apart)


def say_weights(
    nbytes: Mapping[str, int], outside: Mapping[str, Reference], model: Path, say: Callable[[str], None]
) -> None:
    kept = sum(each for sha256, each in nbytes.items() if sha256 in outside)
    say(f"{len(outside)} of {counted(len(nbytes), 'weight')} ({kept:,} of {sum(nbytes.values()):,} bytes) stay in {model}")
