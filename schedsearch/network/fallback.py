"""Networks some of whose nodes another runtime computes, because no kernel does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from schedsearch.network.facts import is_decided_in_calls, isolated
from schedsearch.network.graph import Impossible, Network, Node
from schedsearch.network.implementations import NoImplementationError
from schedsearch.network.invalid import BY_CALL, UnknownShapeError
from schedsearch.network.lower import LAYOUTS, SLICES, lowering
from schedsearch.network.model import simplified
from schedsearch.network.observed_shapes import observe_shapes
from schedsearch.network.subgraphs import cuts, without_shape
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir


def lower_with_subgraphs(
    model: ir.Model,
    problem: Callable[[Workload], str],
    *,
    dtype: str | None = None,
    layouts: Sequence[str] = LAYOUTS,
    slices: Sequence[str] = SLICES,
    apart: Sequence[str] = (),
    over_time: bool = False,
    squeezes: bool = False,
) -> Network:
    """As `lower`; nodes that no kernel computes are in subgraphs, as few as possible.

    Besides nodes without an operator these are nodes with values whose shapes are not known before they run, and nodes whose
    workloads no template takes. Shapes that no inference finds are observed in ONNX Runtime, if it is installed.

    Args:
        model: from `read_model`; it may be changed.
        problem: why no kernel computes a workload on the device; "" if one does.

    Raises:
        ModelError: a node is against the rules of its operator, the shape or the dtype of an output or of a value on the
            border of a subgraph is impossible, or a subgraph is too large.
        UnknownShapeError: an output has a shape that each call decides.
    """
    if observe_shapes(model):
        model = simplified(model, "the model")  # what is computed from shapes is known now
    options: dict[str, Any] = {
        "dtype": dtype, "layouts": layouts, "slices": slices, "apart": apart, "over_time": over_time
    }  # fmt: skip
    options["squeezes"] = squeezes
    bodies = {
        node: [each if isinstance(each, Impossible) else lower_with_subgraphs(each, problem, **options) for each in several]
        for node, several in isolated(model)
    }
    reasons = without_shape(model)
    while True:
        try:
            found = lowering(model, subgraphs=cuts(model, reasons), bodies=bodies, **options)
        except NoImplementationError as error:
            more = dict.fromkeys(error.nodes, error.reason)
        except UnknownShapeError as error:
            remedy = f". {BY_CALL}" if any(map(is_decided_in_calls, model.graph.outputs)) else ""
            raise UnknownShapeError(f"{error}{remedy}") from None
        else:
            more = dict(found.left)
            for node in found.network.nodes:
                if isinstance(node, Node) and all(problem(workload) for workload in node.implementations):
                    more |= dict.fromkeys(found.nodes[node.name], problem(node.implementations[0]))
        if not more:
            return found.network
        reasons |= more
