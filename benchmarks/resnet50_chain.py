"""ResNet-50's 53 convolutions at batch 1, each with bias and relu, in one CUDA graph: total time compared with PyTorch.

    python benchmarks/resnet50_chain.py --db benchmark.db --trials 64 --out resnet50_chain.json

Needs a CUDA device and PyTorch. The convolutions run in the order of the network, and each reads the same output as in the
network: the downsampling of a stage reads the input of the stage. Bias and relu follow every convolution. The residual
additions are left out, so nothing reads the outputs of the 4 downsampling layers. The max pool after the first layer is
computed once, before the graph.

PyTorch runs the same layers in channels_last: cuDNN's fused convolution, bias and relu; one operator after the other; and
the whole chain with torch.compile in its default mode. Times are those of a whole chain. "cold": a graph of chains that
rotate over sets of weights and activations which together exceed 2.5x L2; "hot": one set, as a deployed network runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import common

import schedsearch

if TYPE_CHECKING:
    import torch

STEM, POOLED = "stem", "pooled"
STAGES = ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3))  # middle channels, output size, blocks
EXPANSION = 4
WAY_LIMIT_S = 150.0  # of one way, compilation included


@dataclass(frozen=True)
class Layer:
    """`reads` names the layer whose output is the input: `image` for the first layer, `pooled` after the pool."""

    name: str
    reads: str
    workload: schedsearch.Workload


def layers() -> list[Layer]:
    """The convolutions of torchvision's resnet50 (stride in the 3x3 layers) in the order in which it runs them."""

    def conv(size: int, c: int, k: int, kernel: int, stride: int = 1) -> schedsearch.Workload:
        return schedsearch.Workload.conv2d(
            n=1, h=size, w=size, c=c, k=k, r=kernel, s=kernel, stride=stride, padding=kernel // 2, epilogue=("bias", "relu")
        )

    found = [Layer(STEM, "image", conv(224, 3, 64, 7, stride=2))]
    block_input, c, size = POOLED, 64, 56
    for stage, (middle, out_size, blocks) in enumerate(STAGES, 1):
        for block in range(blocks):
            name, stride, k = f"layer{stage}.{block}", size // out_size, EXPANSION * middle
            found += [
                Layer(f"{name}.conv1", block_input, conv(size, c, middle, 1)),
                Layer(f"{name}.conv2", f"{name}.conv1", conv(size, middle, middle, 3, stride)),
                Layer(f"{name}.conv3", f"{name}.conv2", conv(out_size, middle, k, 1)),
            ]
            if block == 0:
                found.append(Layer(f"{name}.downsample", block_input, conv(size, c, k, 1, stride)))
            block_input, c, size = f"{name}.conv3", k, out_size
    return found


def sources(chain: Sequence[Layer]) -> list[int]:
    """The index of each layer's input in (image, pooled, output of the first layer, of the second, ...)."""
    names = ["image", POOLED, *(layer.name for layer in chain)]
    return [names.index(layer.reads) for layer in chain]


def unread(chain: Sequence[Layer]) -> list[int]:
    """Numbers of the layers whose output no layer and no pool reads. The last one's output is the result of the chain."""
    read = {layer.reads for layer in chain} | {STEM}
    return [number for number, layer in enumerate(chain) if layer.name not in read]


def run(chain: Sequence[Layer], inputs: Sequence[Any], call: Callable[[int, Any], Any]) -> list[Any]:
    """The layers' outputs in order. `inputs` are image and pooled; `call` takes a layer's number and its input."""
    values = list(inputs)
    for number, source in enumerate(sources(chain)):
        values.append(call(number, values[source]))
    return values[len(inputs) :]


def bytes_of(chain: Sequence[Layer]) -> int:
    """Bytes of all weights, biases and outputs, and of the image."""
    own = sum(layer.workload.min_bytes - layer.workload.signature[0].nbytes for layer in chain)
    return own + chain[0].workload.signature[0].nbytes


@dataclass(frozen=True)
class Data:
    """The inputs of one pass: (weight, bias) per layer, the image, and the pooled output of the first layer in float32."""

    weights: list[tuple[torch.Tensor, ...]]
    inputs: tuple[torch.Tensor, torch.Tensor]


def draw(chain: Sequence[Layer]) -> Data:
    import torch
    import torch_conv2d as peers

    operands = [peers.operands(layer.workload, "NHWC") for layer in chain]
    weights = [tuple(tensors[1:]) for tensors in operands]
    image = operands[0][0]
    stem = peers.convolve(chain[0].workload, image.float(), *(tensor.float() for tensor in weights[0]))
    pooled = torch.nn.functional.max_pool2d(stem, 3, 2, 1).half().contiguous(memory_format=torch.channels_last)
    return Data(weights, (image, pooled))


Pass = Callable[[], "Sequence[torch.Tensor]"]  # one pass over the chain; returns outputs


def ours(chain: Sequence[Layer], kernels: dict[schedsearch.Workload, schedsearch.Kernel], data: Data) -> Pass:
    """All launches packed in advance, with outputs at fixed addresses."""
    steps: list[Any] = []

    def bind(number: int, x: torch.Tensor) -> torch.Tensor:
        step = kernels[chain[number].workload].bind(x, *data.weights[number])
        steps.append(step)
        y: torch.Tensor = step.y
        return y

    outputs = run(chain, data.inputs, bind)

    def call() -> Sequence[torch.Tensor]:
        for step in steps:
            step()
        return outputs

    return call


def one_by_one(chain: Sequence[Layer], ways: Sequence[Callable[..., torch.Tensor]], data: Data) -> Pass:
    """One call of PyTorch per layer."""
    return lambda: run(chain, data.inputs, lambda i, x: ways[i](x, *data.weights[i]))


def compiled(chain: Sequence[Layer]) -> Callable[[Data], Pass]:
    """The chain as one function under torch.compile. It returns the outputs that nothing reads, so that all are computed."""
    import torch
    import torch_conv2d as peers

    plan = list(zip(sources(chain), [peers.geometry(layer.workload) for layer in chain]))
    wanted = [2 + number for number in unread(chain)]

    def forward(inputs: Any, weights: Any) -> Any:
        values = list(inputs)
        for (source, geometry), (weight, bias) in zip(plan, weights):
            values.append(torch.nn.functional.conv2d(values[source], weight, bias, *geometry).relu())
        return [values[place] for place in wanted]

    torch._dynamo.reset()
    function = torch.compile(forward, fullgraph=True, dynamic=False)
    return lambda data: lambda: function(data.inputs, data.weights)


def launches(call: Pass) -> int:
    """Kernels in a graph of one pass."""
    import torch
    from cuda.bindings import driver

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        outputs = call()
    raw = driver.CUgraph(graph.raw_cuda_graph())
    _, _, count = driver.cuGraphGetNodes(raw)
    _, nodes, _ = driver.cuGraphGetNodes(raw, count)
    kinds = [driver.cuGraphNodeGetType(node)[1] for node in nodes]
    del outputs
    return sum(kind == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL for kind in kinds)


def measure(passes: Sequence[Pass], numbers: Sequence[int], truth: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Microseconds of a pass, cold and hot, kernels launched, and relative errors of the outputs of the first set.

    Args:
        passes: one per set of data.
        numbers: those of the layers whose outputs a pass returns, the last of the chain at the end.
        truth: every layer's correct output.
    """
    import torch_conv2d as peers

    errors = [peers.relative_error(y, truth[number]) for y, number in zip(passes[0](), numbers)]
    row: dict[str, Any] = {"relative_error": errors[-1], "worst_relative_error": max(errors)}
    row["us"] = common.cold_graph_us([lambda call=call: call()[-1] for call in passes])
    row["hot_us"] = common.cold_graph_us([lambda: passes[0]()[-1]])
    try:
        row["launches"] = launches(passes[0])
    except Exception as error:  # a PyTorch that cannot show its graphs
        row["launches"], row["launches_unknown"] = None, f"{type(error).__name__}: {error}"[:300]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trials", type=int, default=64, help="trials per layer, including those of earlier runs with this --db"
    )
    parser.add_argument("--time", type=float, help="seconds of tuning over all layers")
    parser.add_argument("--seed", type=int, default=0, help="of the tuner")
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write; it is written after every way to compute the chain")
    options = parser.parse_args()
    import torch
    import torch_conv2d as peers

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False  # of the reference
    torch.set_grad_enabled(False)
    chain = layers()
    workloads = list(dict.fromkeys(layer.workload for layer in chain))
    started = time.perf_counter()
    summary = schedsearch.tune(
        workloads, options.db, target="cuda", trials=options.trials, time_s=options.time, seed=options.seed
    )
    sets = common.sets_needed(bytes_of(chain), torch.cuda.get_device_properties(0).L2_cache_size)
    result: dict[str, Any] = {
        "layers": len(chain), "sets": sets, "bytes": bytes_of(chain), "tuning_s": time.perf_counter() - started,
        "trials": {task.workload.label: task.trials for task in summary.tasks}, "rows": [],
    }  # fmt: skip
    data = [draw(chain) for _ in range(sets)]
    weights = [[tensor.float() for tensor in pair] for pair in data[0].weights]
    inputs = [tensor.float() for tensor in data[0].inputs]
    truth = run(chain, inputs, lambda i, x: peers.convolve(chain[i].workload, x, *weights[i]))
    every, ends = range(len(chain)), unread(chain)

    def by_us() -> list[Pass]:
        kernels = {
            workload: schedsearch.compile(workload, options.db, target="cuda", allow=("exact",)) for workload in workloads
        }
        result["kernels"] = {
            workload.label: {
                "template": kernel.provenance.template,
                "config": dict(kernel.config),
                "us": (kernel.provenance.time_ns or 0) / 1e3,
            }
            for workload, kernel in kernels.items()
        }
        result["sum_of_layers_us"] = sum(result["kernels"][layer.workload.label]["us"] for layer in chain)
        return [ours(chain, kernels, each) for each in data]

    def fused() -> list[Pass]:
        ways = [peers.fused(layer.workload) for layer in chain]
        return [one_by_one(chain, ways, each) for each in data]

    def separate() -> list[Pass]:
        ways = [partial(peers.convolve, layer.workload) for layer in chain]
        return [one_by_one(chain, ways, each) for each in data]

    def by_torch_compile() -> list[Pass]:
        function = compiled(chain)
        return [function(each) for each in data]

    for name, make, numbers in (
        ("schedsearch", by_us, every),
        ("cudnn_fused", fused, every),
        ("cudnn_separate", separate, every),
        ("torch_compile", by_torch_compile, ends),
    ):
        try:
            with peers.time_limit(WAY_LIMIT_S):
                row = {"way": name, **measure(make(), numbers, truth)}
        except Exception as error:  # torch.compile may raise anything; the other ways are still timed
            row = {"way": name, "error": f"{type(error).__name__}: {error}"[:500]}
        result["rows"].append(row)
        times = {row["way"]: row for row in result["rows"] if "us" in row}
        mine = times.pop("schedsearch", None)
        if mine and times:
            result["ratio"] = min(row["us"] for row in times.values()) / mine["us"]
            result["hot_ratio"] = min(row["hot_us"] for row in times.values()) / mine["hot_us"]
        common.write(options.out, result)
        print(row, flush=True)
    cells = [
        (row["way"], f"{row['us']:.1f}", f"{row['hot_us']:.1f}", row["launches"], f"{row['relative_error']:.1e}")
        for row in result["rows"]
        if "us" in row
    ]
    print(common.table((f"{len(chain)} layers, us", "cold", "hot", "launches", "error"), cells))
    ratios = ", ".join(f"{name} {result[name]:.3f}" for name in ("ratio", "hot_ratio") if name in result)
    print(f"{ratios}; the layers one by one {result.get('sum_of_layers_us', 0):.1f} us; tuned in {result['tuning_s']:.0f} s")


if __name__ == "__main__":
    main()
