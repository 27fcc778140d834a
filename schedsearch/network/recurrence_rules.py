"""What onnx's checker leaves out of LSTM, GRU and RNN: attributes, and shapes that do not fit one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from schedsearch.network.facts import constant_input, differ, partial_extents
from schedsearch.ops.recurrent import CELLS, DIRECTIONS, FUNCTIONS
from schedsearch.typed import ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir

_NAMES = {name.replace("_", ""): name for name in FUNCTIONS}  # of ONNX, in lower case -> ours
_WORDS = ", ".join("".join(part.capitalize() for part in name.split("_")) for name in FUNCTIONS)
_Extents = list[int | None]


def cell_of(node: ir.Node) -> str:
    return str(node.op_type).lower()


def functions_of(node: ir.Node) -> ParamsByName | str:
    """The activations of a node and the numbers that it gives for them, or what is wrong.

    Returns:
        `activations`, our names for each direction; `alpha` and `beta`, lists with None where a default is needed.
    """
    cell, attributes = CELLS[cell_of(node)], node.attributes
    directions = 2 if attributes.get_string("direction", "forward") == "bidirectional" else 1
    expected = cell.functions * directions
    words = attributes.get_strings("activations", ())
    if words and len(words) != len(expected):
        return f"has {len(words)} activations; allowed: {len(expected)}"
    if unknown := [word for word in words if word.lower() not in _NAMES]:
        return f"has the activation {unknown[0]!r}; allowed: {_WORDS}"
    names = [_NAMES[word.lower()] for word in words] or list(expected)
    found: ParamsByName = {"activations": names}
    for number in ("alpha", "beta"):
        left = [float(each) for each in attributes.get_floats(f"activation_{number}", ())]
        takers = [getattr(FUNCTIONS[name], number) is not None for name in names]
        if len(left) > sum(takers):
            return (
                f"has {len(left)} numbers in activation_{number}; allowed: up to {sum(takers)}, which its activations take"
            )
        found[number] = [left.pop(0) if takes and left else None for takes in takers]
    return found


def wrong_recurrence(node: ir.Node) -> Iterator[str]:
    """What is wrong with a node."""
    read = node.attributes
    direction, layout = read.get_string("direction", "forward"), read.get_int("layout", 0)
    if direction not in DIRECTIONS:
        yield f"has direction {direction!r}; allowed: {', '.join(DIRECTIONS)}"
    if layout not in (0, 1):
        yield f"has layout {layout}; allowed: 0 or 1"
    if "clip" in read and not read.get_float("clip", 0.0) > 0:
        yield f"has clip {read.get_float('clip', 0.0):g}; allowed: a number above 0"
    if isinstance(found := functions_of(node), str):
        yield found
    yield from _shapes(node, 2 if direction == "bidirectional" else 1, bool(layout))


def _shapes(node: ir.Node, directions: int, batch_first: bool) -> Iterator[str]:
    gates, hidden = CELLS[cell_of(node)].gates, node.attributes.get_int("hidden_size", 0)
    x = partial_extents(node, 0) or [None, None, None]
    steps, rows = x[:2][:: -1 if batch_first else 1]
    state: _Extents = [rows, directions, hidden] if batch_first else [directions, rows, hidden]
    wanted: dict[int, tuple[str, _Extents]] = {
        1: ("weight W", [directions, gates * hidden, x[2]]),
        2: ("weight R", [directions, gates * hidden, hidden]),
        3: ("bias", [directions, 2 * gates * hidden]),
        4: ("sequence_lens", [rows]),
        5: ("first state", state),
        6: ("first cell state", state),
        7: ("peephole weight", [directions, 3 * hidden]),
    }
    for place, (what, shape) in wanted.items():
        given = partial_extents(node, place)
        if given is not None and (len(given) != len(shape) or any(map(differ, given, shape))):
            shown = ", ".join("?" if each is None else str(each) for each in shape)
            yield f"has a {what} of shape {given}; allowed: [{shown}]"
    lens = constant_input(node, 4)
    if lens is not None and steps is not None and ((lens < 0) | (lens > steps)).any():
        wrong = int(lens[(lens < 0) | (lens > steps)][0])
        yield f"has a sequence of {wrong} steps in sequence_lens; allowed: 0 to {steps}, the steps of its input"
