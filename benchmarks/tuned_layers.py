"""The workload files of benchmarks/tuned: what the records that come with the package are tuned for.

    python benchmarks/tuned_layers.py --folder benchmarks/tuned
    python benchmarks/tuned_layers.py --folder benchmarks/tuned --only products movement
    schedsearch records ship benchmarks/tuned/{first,depthwise,networks,int8}_1.yaml --db tuned.db --time 250s \
        --output schedsearch/tuned

Each file has every layer once, though several networks have it; its weight is how often they run it. Layers are those that
`schedsearch.build` looks up: with bias, addition and activation in their epilogue. A layer that an earlier file has is left
out of the later ones. The order of a file is that of the networks, the most used ones first.

first_1                     the networks that the documentation times: ResNet-50 and MobileNetV2 in float16, for one image
depthwise_1                 the depthwise convolutions of all networks, whose defaults lose the most
networks_1, networks_32     the torchvision networks of NETWORKS in float16, for 1 and 32 images
int8_1, int8_32             the quantised networks of onnx_models.py
products                    products of transformers in float16: HIDDEN sizes, ROWS rows, and their attention
depthwise                   the layers of depthwise.py, forward
movement                    the movements of data_movement.py
cpu                         small networks in float32 and layers of the tables, for a CPU

Needs torchvision for networks and for cpu; onnx, onnx-ir and onnxscript.
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import schedsearch
from schedsearch.target import PRESETS, Target
from schedsearch.task import Task
from schedsearch.workload import Workload

NETWORKS = (
    "resnet50", "mobilenet_v2", "efficientnet_b0", "resnet18", "mobilenet_v3_large", "convnext_tiny", "vgg16",
    "inception_v3", "regnet_y_400mf", "shufflenet_v2_x1_0", "densenet121", "googlenet", "mnasnet1_0", "squeezenet1_1",
    "resnext50_32x4d",
)  # fmt: skip
ON_A_CPU = ("mobilenet_v2", "resnet18")
INT8 = ("resnet50", "inception_v3", "vgg16", "mobilenet_v2")
HIDDEN = (768, 1024, 2048, 4096, 8192)
ROWS = (1, 8, 64, 4096)
CARD = PRESETS["h200"]  # for which plans are made; no card need be there
HEAD = 64  # columns of a head of attention

Layers = Iterator[tuple[str, Workload, int]]  # name, workload, how often


def of_torchvision(names: Iterable[str], batch: int, dtype: str, target: Target = CARD) -> Layers:
    for name in names:
        yield from of_network(name, batch, dtype, target)


@functools.cache
def of_network(name: str, batch: int, dtype: str, target: Target) -> tuple[tuple[str, Workload, int], ...]:
    model, example = torchvision_model(name, batch)
    return tuple(needed_by(name, model, example, dtype=dtype, target=target))


def torchvision_model(name: str, batch: int) -> tuple[Any, Any]:
    """A model with random weights, and images as it takes them."""
    import torch
    import torchvision

    more = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = getattr(torchvision.models, name)(weights=None, **more).eval()
    as_if_trained(model)
    size = 299 if name == "inception_v3" else 224
    return model, torch.zeros(batch, 3, size, size)


def as_if_trained(model: Any) -> None:
    """Numbers that training leaves: with a mean and a bias of 0 the folded layers would have no bias."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "running_mean")):
                values.normal_()
            elif name.endswith("running_var"):
                values.uniform_(0.5, 2.0)


def of_onnx(names: Iterable[str], batch: int) -> Layers:
    import tempfile

    import onnx
    import onnx_models

    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.onnx"
            onnx.save(onnx_models.build(name, batch=batch, int8=True), path)
            yield from needed_by(name, str(path), None, target=CARD)


def needed_by(name: str, model: Any, example: Any, **options: Any) -> Layers:
    """What `schedsearch.build` looks up for a model, by the plan that it makes without any record."""
    from schedsearch.deadline import NEVER
    from schedsearch.executable.build_options import BuildOptions
    from schedsearch.executable.coverage import needed, network_of
    from schedsearch.network.costs import RecordCosts

    chosen = BuildOptions.of(NEVER, check=False, **options)
    network = network_of(model, example, {}, chosen)
    counts = needed(network, RecordCosts(None, chosen.target, network=network))
    for number, (workload, count) in enumerate(counts.items(), 1):
        yield f"{name} {number}", workload, count


def products() -> Layers:
    for hidden in HIDDEN:
        for rows in ROWS:
            widths = ("qkv", 3 * hidden, hidden), ("out", hidden, hidden), ("up", 4 * hidden, hidden)
            for what, n, k in (*widths, ("down", hidden, 4 * hidden)):
                yield f"{what} {hidden}, {rows} rows", schedsearch.dense(m=rows, n=n, k=k, epilogue=["bias"]), 1
        for rows, keys in ((1, 4096), (64, 64), (512, 512)):
            heads = hidden // HEAD
            yield f"scores {hidden}, {rows} x {keys}", schedsearch.batch_matmul(b=heads, m=rows, n=keys, k=HEAD), 1
            values = schedsearch.batch_matmul(b=heads, m=rows, n=HEAD, k=keys, weight_layout="KN")
            yield f"values {hidden}, {rows} x {keys}", values, 1


def depthwise() -> Layers:
    import depthwise as table

    words = ["--direction", "forward", "--dtype", "float16", "--batch", "1", "32"]
    for workload in table.chosen(table.arguments(words)):
        yield workload.label, workload, 1


def movement() -> Layers:
    import data_movement as table

    for workload in [*table.targets(), *table.layouts(32)]:
        yield workload.label, workload, 1


def on_a_cpu() -> Layers:
    yield from of_torchvision(ON_A_CPU, 1, "float32", schedsearch.detect("cpu"))
    for hidden in HIDDEN[:2]:
        for rows in (1, 64):
            yield f"dense {hidden}, {rows} rows", schedsearch.dense(m=rows, n=hidden, k=hidden, dtype="float32"), 1


def only(op: str, layers: Layers) -> Layers:
    return (each for each in layers if each[1].op == op)


FILES: dict[str, tuple[str, str, Callable[[], Layers]]] = {
    "first_1": (
        "cuda", "Layers of ResNet-50 and MobileNetV2 for one image.", lambda: of_torchvision(NETWORKS[:2], 1, "float16")
    ),
    "depthwise_1": (
        "cuda", "Depthwise convolutions of torchvision's networks for one image.",
        lambda: only("depthwise_conv2d", of_torchvision(NETWORKS[2:], 1, "float16")),
    ),
    "networks_1": (
        "cuda", "Layers of torchvision's networks for one image.", lambda: of_torchvision(NETWORKS, 1, "float16")
    ),
    "networks_32": (
        "cuda", "Layers of torchvision's networks for 32 images.", lambda: of_torchvision(NETWORKS, 32, "float16")
    ),
    "int8_1": ("cuda", "Layers of quantised networks for one image.", lambda: of_onnx(INT8, 1)),
    "int8_32": ("cuda", "Layers of quantised networks for 32 images.", lambda: of_onnx(INT8, 32)),
    "products": ("cuda", "Products of matrices in transformers.", products),
    "depthwise": ("cuda", "Depthwise convolutions.", depthwise),
    "movement": ("cuda", "Movements of data.", movement),
    "cpu": ("cpu", "Layers of small networks in float32.", on_a_cpu),
}  # fmt: skip


def tasks_of(layers: Layers, known: set[Workload]) -> list[Task]:
    """Each workload once, if no file before has it."""
    names: dict[Workload, str] = {}
    weights: dict[Workload, int] = {}
    for name, workload, count in layers:
        if workload not in known:
            names.setdefault(workload, name)
            weights[workload] = weights.get(workload, 0) + count
    return [Task(workload, weight=weights[workload], name=name) for workload, name in names.items()]


def text_of(target: str, about: str, tasks: list[Task]) -> str:
    from schedsearch.workload_file import dump

    comment = f"{about} {len(tasks)} of them; weight: how often the networks run it.\nMade by benchmarks/tuned_layers.py."
    return dump(tasks, comment=comment).replace("\ndefaults:", f"\ntarget: {target}\ndefaults:", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="benchmarks/tuned")
    parser.add_argument("--only", nargs="+", choices=FILES, default=list(FILES), help="these files")
    options = parser.parse_args()
    known: dict[str, set[Workload]] = {"cuda": set(), "cpu": set()}
    for name in options.only:
        target, about, layers = FILES[name]
        tasks = tasks_of(layers(), known[target])
        known[target] |= {task.workload for task in tasks}
        path = Path(options.folder) / f"{name}.yaml"
        path.write_text(text_of(target, about, tasks), encoding="utf-8")
        print(f"{os.path.relpath(path)}: {len(tasks)} tasks", flush=True)


if __name__ == "__main__":
    main()
