"""The second stage of `schedsearch.build`: which implementations the nodes of a graph have on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedsearch.executable.build_options import BuildOptions
from schedsearch.executable.onnx_runtime import check_runs
from schedsearch.network.graph import Control, Impossible, Network, Subgraph
from schedsearch.text import counted

if TYPE_CHECKING:
    import onnx_ir as ir

_CPU_LAYOUTS = ("NHWC", "NCHW")
_CPU_SLICES = ("float32",)  # dtypes of convolutions that store into slices there
_CPU_APART = ("DepthToSpace",)  # convolutions there cannot store through it
_LEAST_FOR_SQUEEZES = (9, 0)  # compute capability of clusters, by which one kernel computes squeeze-excite
_FEW_NODES = 4  # of a subgraph, in a line


def lowered(graph: ir.Model, options: BuildOptions, fallback: str | None = None) -> Network:
    """The network of a graph, with the layouts of inputs and outputs that callers want.

    Args:
        fallback: as of `schedsearch.build`; it says which nodes are in subgraphs.

    Raises: as `network.lower.lower` and `network.fallback.lower_with_subgraphs`.
    """
    from schedsearch.network.lower import LAYOUTS, SLICES, lower

    on_cpu, dtype = options.target.kind == "cpu", options.dtype
    layouts: tuple[str, ...] = LAYOUTS if options.layout == "auto" else (options.layout,)
    if on_cpu:
        layouts = tuple(each for each in layouts if each in _CPU_LAYOUTS)
    slices, apart = (_CPU_SLICES, _CPU_APART) if on_cpu else (SLICES, ())
    how: dict[str, Any] = {"dtype": dtype, "layouts": layouts, "slices": slices, "apart": apart}
    how["over_time"] = not on_cpu  # on CPUs kernels of images are faster (docs/decisions/351)
    how["squeezes"] = not on_cpu and not options.target.older_than(_LEAST_FOR_SQUEEZES) and "NHWC" in layouts
    if fallback is None:
        network = lower(graph, **how)
    else:
        from schedsearch.network.costs import no_template
        from schedsearch.network.fallback import lower_with_subgraphs

        problem = no_template(options.target)
        network = lower_with_subgraphs(graph, problem, **how)
    for each in network.all_nodes:
        if isinstance(each, Subgraph):
            check_runs(each)
            options.say(_text(each))
        for word, body in zip(("then", "else"), each.bodies if isinstance(each, Control) else ()):
            if isinstance(body, Impossible):
                options.say(f"calls that take the {word}_branch of {each.name} (If) fail with these shapes: {body.reason}")
    return network.with_io_layout(options.io_layout)


def _text(subgraph: Subgraph) -> str:
    reasons = list(zip(subgraph.sources, subgraph.reasons))
    more = len(reasons) - _FEW_NODES
    named = "; ".join(f"{name}: {reason}" for name, reason in reasons[:_FEW_NODES])
    others = f" and {more} more (--explain lists them)" if more > 0 else ""
    return f"ONNX Runtime computes {counted(len(reasons), 'node')} as {subgraph.name}: {named}{others}"
