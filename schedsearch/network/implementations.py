"""The workloads that compute a chain, one for each layout that values may have in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from schedsearch.errors import WorkloadError
from schedsearch.network import shuffles
from schedsearch.network.chain import Chain
from schedsearch.network.facts import FLOATS, extents_of, name_of
from schedsearch.network.graph import Constant, Value, axes_of
from schedsearch.network.invalid import IN_ONNX_RUNTIME, ModelError
from schedsearch.network.layouts import same_bytes
from schedsearch.ops import Layout
from schedsearch.ops.data_movement import DTYPES as MOVED
from schedsearch.typed import GivenParams, ParamsByName
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

IMAGE = "NCHW"
Letters = dict[str, str]  # argument or output -> its layout, where the workload has other letters
_Candidates = Iterator[tuple[ParamsByName, Letters]]


class NoImplementationError(ModelError):
    """No layout can hold the arrays of some nodes.

    Attributes:
        nodes: of the model, those of one chain.
        reason: the message without its remedy, for callers that run the nodes in another way.
    """

    def __init__(self, reason: str, nodes: Sequence[ir.Node]) -> None:
        super().__init__(f"{reason}. Run it {IN_ONNX_RUNTIME}")
        self.reason, self.nodes = reason, tuple(nodes)


def implementations_of(
    chain: Chain, dtype: str | None, layouts: Sequence[str], *, mixed: bool
) -> tuple[tuple[Workload, ...], dict[Workload, Letters]]:
    """The workloads of a chain, and the letters of each; see `Node`.

    Args:
        dtype: in place of the dtype of floating-point numbers; None: the model's own.
        layouts: of images.
        mixed: also workloads of which the output has another layout than the input.

    Raises:
        NoImplementationError: no layout can hold the chain's arrays.
    """
    params = typed(chain, dtype)
    found: list[Workload] = []
    letters: dict[Workload, Letters] = {}
    reasons, of_images = [], False
    for candidate, names in _CANDIDATES[chain.op](chain, params, layouts, mixed):
        of_images = of_images or "layout" in candidate
        slice_of = _slice_of(chain, candidate, names)
        if slice_of is None:
            continue
        try:
            workload = Workload(chain.op, {**candidate, **slice_of})
        except WorkloadError as error:
            reasons.append("; ".join(each.message for each in error.problems))
            continue
        if workload in found:  # the bytes are the same in both layouts
            continue
        found.append(workload)
        if names:
            letters[workload] = names
    if not found:
        where = f" in {' or '.join(layouts)}" if of_images else ""
        because = f": {reasons[0]}" if reasons else ""
        raise NoImplementationError(f"node {name_of(chain.nodes[0])} is not possible{where}{because}", chain.nodes)
    return tuple(found), letters


def _slice_of(chain: Chain, candidate: GivenParams, names: Letters) -> ParamsByName | None:
    """The parameter `slice_of` of a chain that stores into a slice, in the layout of a candidate; None if the slice does not
    consist of whole blocks there."""
    if chain.offset is None:
        return {}
    layout = Layout.parse(names.get("y") or candidate.get("output_layout") or candidate["layout"])
    if chain.offset % layout.block("C") or chain.channels % layout.block("C"):
        return None
    if chain.op == "conv2d":  # it counts channels, and has them already
        return {}
    return {"slice_of": layout.shape(dict(zip(IMAGE, extents_of(chain.nodes[-1], chain.value))))}


def typed(chain: Chain, dtype: str | None) -> ParamsByName:
    """The chain's parameters with its epilogue and the chosen dtype of floating-point numbers."""
    params, stages = dict(chain.params), chain.stages
    constants = [name for name, operand in chain.arguments.items() if isinstance(operand, Constant)]
    if dtype is not None:
        params |= {key: dtype for key in ("dtype", "out_dtype", "rois_dtype") if params.get(key) in FLOATS}
        if chain.op == "elementwise":
            params["inputs"] = [
                [name, dtype if of_input in FLOATS and name not in constants else of_input, *rest]
                for name, of_input, *rest in params["inputs"]
            ]
        to = "dequantise" if dtype == "float32" else {"dequantise": {"to": dtype}}
        stages = [to if stage == "dequantise" else stage for stage in stages]
    return {**params, "epilogue": stages} if stages else params


def _convolutions(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    for layout in layouts:
        yield {**params, "layout": layout}, {}
    plain = [layout for layout in layouts if not Layout.parse(layout).blocks]
    if mixed and chain.op == "conv2d":
        for layout in plain:
            for output in plain:
                if output != layout:
                    yield {**params, "layout": layout, "output_layout": output}, {}


def _over_time(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    """A sequence is an image of one row: NCHW holds the bytes of NCT, and NHWC those of NTC."""
    for image, sequence in (("NCHW", "NCT"), ("NHWC", "NTC")):
        if image in layouts:
            yield {**params, "layout": sequence}, {"x": image, "y": image}


def _images(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    for layout in layouts:
        yield {**params, "layout": layout}, {}


def _dense(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    """The weight is packed when a network is loaded, so both layouts are possible; the model's own comes first."""
    weight = chain.arguments["weight"]
    assert isinstance(weight, Constant)
    for layout in (weight.axes, weight.axes[::-1]):
        yield {**params, "weight_layout": layout}, {}
        if not mixed:
            return


def _plain(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    yield params, {}


def _elementwise(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    """Inputs have the layout of y; those of fewer dimensions, that of the axes that they have. Without one that fits, and of
    formats that no kernel brings into another layout, arrays are in the plain order."""
    if chain.shuffles:
        yield from shuffles.candidates(chain, params, layouts)
        return
    plain = Layout.parse(axes_of(len(params["y"])))
    dtypes = {params["out_dtype"], *(dtype for _, dtype, *_ in params["inputs"])}
    possible = memory_layouts(len(params["y"]), layouts) if dtypes <= set(MOVED) else []
    found = [_elementwise_in(layout, plain.text, params) for layout in possible]
    if not any(found):
        found = [_elementwise_in(plain, plain.text, params)]
    yield from (each for each in found if each is not None)


def _elementwise_in(layout: Layout, axes: str, params: ParamsByName) -> tuple[ParamsByName, Letters] | None:
    """The parameters with all arrays in a layout, and the letters of each; None where one cuts a block or has none."""
    inputs, names = [], {"y": layout.text}
    sizes = dict(zip(axes, params["y"]))
    for name, dtype, *lists in params["inputs"]:
        own, missing = axes_of(len(lists[0])), len(axes) - len(lists[0])
        shape, *cut = ([neutral] * missing + list(each) for neutral, each in zip((1, 1, 0, 1), lists))
        if missing:
            letters = _letters_of_fewer(layout, axes, own, cut[0] if cut else shape)
            if letters is None:
                return None
            names[name] = letters
        else:
            names[name] = layout.text
        if layout.text == axes:
            inputs.append([name, dtype, *lists])
            continue
        in_memory = _cut_in_memory(layout, axes, cut) if cut else []
        if in_memory is None or not fills(layout, dict(zip(axes, shape))):
            return None
        inputs.append([name, dtype, list(layout.shape(dict(zip(axes, shape)))), *in_memory])
    if not fills(layout, sizes):
        return None
    return {**params, "y": layout.shape(sizes), "inputs": inputs}, names


def _letters_of_fewer(layout: Layout, axes: str, own: str, shape: Sequence[int]) -> str | None:
    """The letters of an array of the last axes only, so that its bytes are those of `shape`, of all axes, in a layout: its
    own order where that is the same; None where the layout has blocks, which only images have."""
    if same_bytes(Value("", axes, tuple(shape), "float32"), layout.text, axes):
        return own
    if layout.blocks:
        return None
    behind = axes[len(axes) - len(own) :]
    return "".join(own[behind.index(axis)] for axis in layout.dimensions if axis in behind)


def _cut_in_memory(layout: Layout, axes: str, cut: Sequence[Sequence[int]]) -> list[list[int]] | None:
    """`slice_of`, `begin` and `strides` of an input that is a slice, of its dimensions in memory; None if blocks are cut."""
    whole, begin, strides = (dict(zip(axes, numbers)) for numbers in cut)
    if not fills(layout, whole) or any(strides[axis] != 1 or begin[axis] % block for axis, block in layout.blocks):
        return None
    return [
        list(layout.shape(whole)),
        [0 if axis.islower() else begin[axis] // layout.block(axis) for axis in layout.dimensions],
        [1 if axis.islower() else strides[axis] for axis in layout.dimensions],
    ]


def _gather(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    """Slices of images along one axis by a row of indices in every layout without blocks, all else in the plain order."""
    rank = len(params["x"])
    axes = axes_of(rank)
    same_rank = chain.value.shape is not None and len(chain.value.shape) == rank
    if params["by"] != "slices" or len(params["indices"]) != 1 or not same_rank or axes != IMAGE:
        yield params, {}
        return
    for layout in memory_layouts(rank, layouts):
        if not layout.blocks:
            axis = layout.axes.index(axes[params["axis"]])
            shape = layout.shape(dict(zip(axes, params["x"])))
            yield {**params, "x": shape, "axis": axis}, {"x": layout.text, "y": layout.text}


def _softmax(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    rank = len(params["x"])
    axes = axes_of(rank)
    for layout in memory_layouts(rank, layouts):
        if not layout.blocks:
            shape = layout.shape(dict(zip(axes, params["x"])))
            axis = layout.axes.index(axes[params["axis"]])
            yield {**params, "x": shape, "axis": axis}, {"x": layout.text, "y": layout.text}


def _layer_norm(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    """The plain order only: the last axes make a row."""
    axes = axes_of(len(params["x"]))
    yield params, {"x": axes, "y": axes}


def _transpose(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    axes = axes_of(len(params["x"]))
    yield params, {"x": axes, "y": axes}


def _concat(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
    rank = len(params["x"][0])
    for layout in memory_layouts(rank, layouts):
        sizes = [dict(zip(axes_of(rank), shape)) for shape in params["x"]]
        if all(fills(layout, each) for each in sizes):
            axis = layout.axes.index(axes_of(rank)[params["axis"]])
            shapes = [layout.shape(each) for each in sizes]
            names = dict.fromkeys((*chain.arguments, "y"), layout.text)
            yield {**params, "x": shapes, "axis": axis}, names


def _boxes(defaults: Mapping[str, object]) -> Callable[..., _Candidates]:
    """Of slices and pads: lists with a number for each dimension, that of blocks' dimensions being the default."""

    def candidates(chain: Chain, params: ParamsByName, layouts: Sequence[str], mixed: bool) -> _Candidates:
        rank = len(params["x"])
        axes = axes_of(rank)
        for layout in memory_layouts(rank, layouts):
            sizes = dict(zip(axes, params["x"]))
            lists = {name: dict(zip(axes, params[name])) for name in defaults}
            of_axis = {
                name: sizes if default is None else dict.fromkeys(axes, default) for name, default in defaults.items()
            }
            blocked = {axis for axis, _ in layout.blocks}
            untouched = all(lists[name][axis] == of_axis[name][axis] for name in defaults for axis in blocked)
            if not fills(layout, sizes) or not untouched:
                continue
            shape = layout.shape(sizes)
            memory = {
                name: [
                    (extent if default is None else default) if axis in blocked or axis.islower() else lists[name][axis]
                    for axis, extent in zip(layout.dimensions, shape)
                ]
                for name, default in defaults.items()
            }
            yield {**params, **memory, "x": shape}, {"x": layout.text, "y": layout.text}

    return candidates


def memory_layouts(rank: int, layouts: Sequence[str]) -> list[Layout]:
    """The layouts of values with so many dimensions: those of images for 4, else the plain order."""
    if rank != len(IMAGE):
        return [Layout.parse(axes_of(rank))]
    return [Layout.parse(layout) for layout in layouts]


def fills(layout: Layout, sizes: Mapping[str, int]) -> bool:
    """Whether a value fills every block of the layout."""
    return all(sizes[axis] % layout.block(axis) == 0 for axis in layout.axes)


_CANDIDATES: Mapping[str, Callable[[Chain, ParamsByName, Sequence[str], bool], _Candidates]] = {
    "conv2d": _convolutions,
    "depthwise_conv2d": _convolutions,
    "depthwise_conv1d": _over_time,
    "dense": _dense,
    "batch_matmul": _plain,
    "gather": _gather,
    "scatter": _plain,
    "topk": _plain,
    "recurrent": _plain,
    "roi_align": _images,
    "elementwise": _elementwise,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "pool2d": _images,
    "squeeze_excite": _images,
    "resize": _images,
    "depth_to_space": _images,
    "space_to_depth": _images,
    "transpose": _transpose,
    "concat": _concat,
    "pad": _boxes({"before": 0, "after": 0}),
    "strided_slice": _boxes({"begin": 0, "end": None, "strides": 1}),
}
