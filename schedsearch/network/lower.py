"""From an ONNX graph to a `Network`: every node becomes part of a kernel call, or a view.

A kernel call begins at a node that has an operator, and takes the nodes behind it that its epilogue computes. Convolutions
and matrix products take nodes before everything else, and the one behind most others is the first to take: of two that are
added to one another, the deeper one takes the addition, so that the other one, such as the projection of a residual block,
can run beside those in front of it. The element-wise nodes that the others
leave become chains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from schedsearch.network.chain import Chain, Read
from schedsearch.network.compositions import (
    attention,
    blocks,
    determinants,
    einsum,
    losses,
    places,
    rotary,
    sampling,
    spectra,
    sums,
    unpooling,
)
from schedsearch.network.compositions.composition import left_of, noted
from schedsearch.network.compositions.resizing import RESIZED
from schedsearch.network.concatenations import without_concatenations
from schedsearch.network.convolutions import CONVOLUTIONS
from schedsearch.network.elementwise import ELEMENTWISE
from schedsearch.network.facts import (
    FLOATS,
    INTEGERS,
    constant_of,
    extents_of,
    inputs_of,
    is_onnx,
    isolated,
    name_of,
)
from schedsearch.network.graph import Constant, Impossible, Network, axes_of
from schedsearch.network.image_pools import POOLS
from schedsearch.network.implementations import IMAGE
from schedsearch.network.indexing import INDEXED
from schedsearch.network.invalid import UnknownShapeError
from schedsearch.network.movements import MOVEMENTS
from schedsearch.network.others import LAYER_NORMS, SOFTMAXES
from schedsearch.network.parts import Parts
from schedsearch.network.products import PRODUCTS
from schedsearch.network.recurrences import RECURRENCES
from schedsearch.network.reductions import REDUCTIONS
from schedsearch.network.refusals import LACKS, is_array, refused, why_left
from schedsearch.network.settings import size_problem
from schedsearch.network.slices import without_slices
from schedsearch.network.squeezes import SQUEEZES
from schedsearch.network.subgraphs import Cut, nodes_inside
from schedsearch.network.views import VIEWS, random_problem
from schedsearch.ops.registry import BUILT_IN

if TYPE_CHECKING:
    import onnx_ir as ir

LAYOUTS = ("NHWC", "NCHW", "NCHW32c")
SLICES = (*FLOATS, *INTEGERS)
# Those before take nodes first.
_FAMILIES: tuple[Mapping[str, Read], ...] = (
    CONVOLUTIONS,
    PRODUCTS,
    POOLS,
    SOFTMAXES,
    LAYER_NORMS,
    RESIZED,
    MOVEMENTS,
    INDEXED,
    RECURRENCES,
    REDUCTIONS,
    left_of(
        {
            **attention.REWRITTEN,
            **blocks.REWRITTEN,
            **einsum.REWRITTEN,
            **rotary.REWRITTEN,
            **determinants.REWRITTEN,
            **losses.REWRITTEN,
            **sampling.REWRITTEN,
            **spectra.REWRITTEN,
            **unpooling.REWRITTEN,
        }
    ),
    sums.LEFT,
    places.LEFT,
    ELEMENTWISE,
)
TAKEN = frozenset(
    {*VIEWS, "Split", *(op for family in _FAMILIES for op in family)}
)  # operators of ONNX; Split becomes Slice
_LAST_FIRST = (CONVOLUTIONS, PRODUCTS, ELEMENTWISE)


@dataclass(frozen=True)
class Lowering:
    """What became of a graph.

    Attributes:
        network: without the nodes that have no operator; their results are values that nothing makes.
        others: operator of ONNX -> names of its nodes that nothing stands for.
        reasons: operator of ONNX -> why the first of its `others` is left out, although others of its kind may not be.
        left: each node that nothing stands for -> why.
        nodes: name of each kernel call -> the nodes that it stands for.
    """

    network: Network
    others: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str]
    left: Mapping[ir.Node, str]
    nodes: Mapping[str, tuple[ir.Node, ...]]

    def is_other(self, node: ir.Node) -> bool:
        """Whether a node of `left` is one of `others`: not one that only moves what such nodes make."""
        return name_of(node) in self.others.get(node.op_type, ())


def lower(
    model: ir.Model,
    *,
    dtype: str | None = None,
    layouts: Sequence[str] = LAYOUTS,
    slices: Sequence[str] = SLICES,
    apart: Sequence[str] = (),
    over_time: bool = False,
    squeezes: bool = False,
) -> Network:
    """The network that a graph describes, with every implementation in which our operators compute its nodes.

    Args:
        model: from `read_model`.
        dtype: float16, bfloat16 or float32, in place of the model's dtype of floating-point numbers, also of the
            network's inputs and outputs. Integers keep their dtypes.
        layouts: that images may have in memory. Convolutions may read one and write another.
        slices: dtypes of convolutions that write into slices of what they are concatenated to, if that makes the
            concatenation unnecessary.
        apart: operators of ONNX whose nodes belong to no other node's kernel call, e.g. DepthToSpace where convolutions
            cannot store through it.
        over_time: depthwise convolutions of images of one row are those over time, depthwise_conv1d.
        squeezes: squeeze-excite is one kernel (`network.squeezes`), where a device has one.

    Raises:
        NoOperatorError: nodes have no operator; all are listed.
        ModelError: a shape is not known, an input and a weight do not fit one
            another, or no layout can hold the arrays of a node.
    """
    options: dict[str, Any] = {"dtype": dtype, "layouts": layouts, "slices": slices, "apart": apart}
    network, left = _with_bodies(model, **options, over_time=over_time, squeezes=squeezes)
    if left:
        raise refused(left)
    return network


def _with_bodies(model: ir.Model, **options: Any) -> tuple[Network, dict[ir.Node, str]]:
    """The network of a graph, and why nodes of it and of its bodies have no operator."""
    left: dict[ir.Node, str] = {}
    bodies: dict[ir.Node, list[Network | Impossible]] = {}
    for node, several in isolated(model):
        bodies[node] = []
        for body in several:
            network, lacking = (body, {}) if isinstance(body, Impossible) else _with_bodies(body, **options)
            bodies[node].append(network)
            left |= lacking
    found = lowering(model, bodies=bodies, **options)
    return found.network, {node: why for node, why in found.left.items() if found.is_other(node)} | left


def lowering(
    model: ir.Model,
    *,
    dtype: str | None = None,
    layouts: Sequence[str] = LAYOUTS,
    mixed: bool = True,
    slices: Sequence[str] | None = SLICES,
    cuts: bool = True,
    apart: Sequence[str] = (),
    over_time: bool = False,
    squeezes: bool = False,
    subgraphs: Sequence[Cut] = (),
    bodies: Mapping[ir.Node, Sequence[Network | Impossible]] = MappingProxyType({}),
) -> Lowering:
    """As `lower`, of a graph that may have nodes without an operator.

    Args:
        mixed: convolutions may have an output of another layout than their input.
        squeezes: as of `lower`.
        slices: as of `lower`; None: no operator stores into a slice of a concatenation.
        cuts: element-wise chains may read slices where they are.
        subgraphs: nodes that another runtime computes.
        bodies: each of `isolated(model)` -> the networks of its branches.
    """
    dtypes = None if slices is None else tuple(slices)
    families = (SQUEEZES, *_FAMILIES) if squeezes else _FAMILIES
    constants = {str(value.name): found for value in model.graph.outputs if (found := fixed(value)) is not None}
    parts = Parts(model, dtype, tuple(layouts), mixed, over_time, constants)
    graph = _Graph(model, parts, dtypes, cuts, tuple(apart), families, tuple(subgraphs), bodies)
    graph.read()
    return graph.result()


@dataclass
class _Graph:
    """A graph while its nodes become a network's.

    Attributes:
        parts: of the network.
        taken: nodes that belong to a chain.
        needed: values that a chain reads.
        unread: conversions between numbers and integers, and transpositions, whose results nothing reads.
    """

    model: ir.Model
    parts: Parts
    slices: tuple[str, ...] | None
    cuts: bool
    apart: tuple[str, ...]
    families: tuple[Mapping[str, Read], ...]
    subgraphs: tuple[Cut, ...] = ()
    bodies: Mapping[ir.Node, Sequence[Network | Impossible]] = field(default_factory=dict)
    taken: set[ir.Node] = field(default_factory=set)
    needed: set[ir.Value] = field(default_factory=set)
    unread: set[ir.Node] = field(default_factory=set)
    reasons: dict[ir.Node, str] = field(default_factory=dict)

    def read(self) -> None:
        places = {node: place for place, node in enumerate(self.model.graph)}
        self.taken.update(inner for node in places for inner in nodes_inside(node))
        for cut in self.subgraphs:
            self.taken.update(cut.reasons)
            self.needed.update(cut.reads)
        for node in self.bodies:
            self.taken.add(node)
            self.needed.update(value for value in node.inputs if value is not None and value.const_value is None)
        self._views_of_transposes(places)
        chains = self._chains(places, depths_of(places))
        self.parts.arrays = frozenset(str(value.name) for value in (*self.needed, *self.model.graph.outputs))
        chains = without_slices(chains, self.unread, self.slices) if self.cuts else chains
        for chain in without_concatenations(chains, self.slices, self.cuts):
            chain.nodes.sort(key=places.__getitem__)
            self.parts.add_chain(chain, places[chain.nodes[-1]])
        for cut in (each.with_writes(self.needed) for each in self.subgraphs):
            if cut.writes:
                self.parts.add_subgraph(cut, max(map(places.__getitem__, cut.reasons)))
        for node, bodies in self.bodies.items():
            self.parts.add_control(node, bodies, places[node])
        self._views(places)
        if self.subgraphs or self.bodies:
            self.parts.sort()

    def _chains(self, places: Mapping[ir.Node, int], depths: Mapping[ir.Node, int]) -> list[Chain]:
        """The nodes that one kernel computes together, family by family: earlier families take what later ones could."""
        apart = {node for node in places if node.op_type in self.apart}
        chains = []
        deepest_first = sorted(places, key=lambda node: (depths[node], places[node]), reverse=True)
        for family in self.families:
            for node in deepest_first if family in _LAST_FIRST else places:
                if node in self.taken or node.op_type not in family or not is_onnx(node) or self._is_unread(node):
                    continue
                try:
                    chain = size_problem(node) or family[node.op_type](node, self.taken | apart if apart else self.taken)
                except UnknownShapeError as error:
                    chain = str(error)
                if isinstance(chain, str) or chain.op not in BUILT_IN:
                    self.reasons[node] = chain if isinstance(chain, str) else ""
                    continue
                self.taken.update(chain.nodes)
                for each in (*chain.before, chain):
                    self.needed.update(value for value in each.arguments.values() if not isinstance(value, Constant))
                    chains.append(each)
        return chains

    def _views(self, places: Mapping[ir.Node, int]) -> None:
        """Adds the views of which no chain and no subgraph is."""
        for node, place in places.items():
            if node.op_type not in VIEWS or not is_onnx(node) or node in self.taken:
                continue
            if problem := random_problem(node) or size_problem(node):
                self.reasons[node] = problem
            elif _is_known(node):
                self.taken.add(node)
                self.parts.add_view(node, place)
            elif node.inputs and node.inputs[0] is not None and is_array(node.outputs[0]):
                try:
                    [extents_of(node, value) for value in (node.inputs[0], node.outputs[0])]
                except UnknownShapeError as error:
                    self.reasons[node] = str(error)

    def _views_of_transposes(self, places: Mapping[ir.Node, int]) -> None:
        """Transposes between NCHW and NHWC are views: the same bytes, which the planner converts where a reader needs it."""
        for node, place in places.items():
            if node.op_type != "Transpose" or not is_onnx(node) or not _is_known(node):
                continue
            permutation = tuple(node.attributes.get_ints("perm", ()))
            pair = {(0, 2, 3, 1): ("NHWC", IMAGE), (0, 3, 1, 2): (IMAGE, "NHWC")}.get(permutation)
            if pair is not None and set(pair) <= {*self.parts.layouts, IMAGE} and node not in self.taken:
                self.taken.add(node)
                self.needed.update(inputs_of(node, 1))
                self.parts.add_view(node, place, pair)

    def result(self) -> Lowering:
        others: dict[str, list[str]] = {}
        reasons: dict[str, str] = {}
        left = [node for node in reversed(self.model.graph) if node not in self.taken and not self._is_unread(node)]
        for node in reversed(left):
            if node.op_type not in (*VIEWS, "Constant") or node in self.reasons:
                others.setdefault(node.op_type, []).append(name_of(node))
                if reason := self._reason(node):
                    reasons.setdefault(node.op_type, reason)
        network = self.parts.network(complete=not others)
        listed = {op: tuple(names) for op, names in others.items()}
        why = {node: self._reason(node) or LACKS for node in reversed(left) if node.op_type != "Constant"}
        return Lowering(network, listed, reasons, why, self.parts.members)

    def _reason(self, node: ir.Node) -> str:
        return why_left(node, TAKEN) or self.reasons.get(node) or noted(node) or size_problem(node)

    def _is_unread(self, node: ir.Node) -> bool:
        """Whether nothing reads the result of a conversion or transposition, because chains read what is before it."""
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear", "Transpose"):
            return False
        users = [user for value in node.outputs for user, _ in value.uses()]
        if any(value.is_graph_output() or value in self.needed for value in node.outputs):
            return False
        if not all(user in self.taken or user in self.unread for user in users):
            return False
        self.unread.add(node)
        return True


def depths_of(nodes: Iterable[ir.Node]) -> dict[ir.Node, int]:
    """How many nodes stand one behind another up to each of them, which come in an order in which they can run."""
    found: dict[ir.Node, int] = {}
    for node in nodes:
        makers = (None if value is None else value.producer() for value in node.inputs)
        found[node] = 1 + max((found.get(maker, 0) for maker in makers if maker is not None), default=0)
    return found


def fixed(value: ir.Value) -> Constant | None:
    """The constant that an output of a model is; None if it is computed."""
    array = constant_of(value)
    return None if array is None else Constant(str(value.name), axes_of(array.ndim), array)


def _is_known(node: ir.Node) -> bool:
    value = node.inputs[0] if node.inputs else None
    shapes = [None if each is None else each.shape for each in (value, node.outputs[0])]
    return value is not None and value.const_value is None and all(each is not None and each.is_static() for each in shapes)
