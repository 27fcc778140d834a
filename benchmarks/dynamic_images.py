"""Images of any size in one executable, beside networks that are built for one size.

    python benchmarks/dynamic_images.py --out benchmarks/results/dynamic_images_h100.json
    python benchmarks/dynamic_images.py --target cpu --networks resnet50 --width 0.25 --most 2 96 96 --sizes 64,80 --repeat 5

A network of onnx_models.py is built twice: as a graph for n, h and w from 1, 32 and 32 to --most, and for the largest size
alone. Times are those of a call on the host's clock until its results are there, medians of --repeat: of the graph at the
largest size and at each of --sizes (batch 1), bounded and exact, and of the network for one size at its own. All kernels are
those of --db, or default ones. Results of every size are compared with those of onnx.reference if --check is given.

Needs onnx, onnx-ir and onnxscript, and PyTorch on a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import common
import numpy as np
import onnx
import onnx_models
from detector import time_us
from onnx import numpy_helper

import schedsearch
from schedsearch.device import open_device
from schedsearch.device.detect import detect

LEAST = {"n": 1, "h": 32, "w": 32}


def in_format(model: onnx.ModelProto, dtype: Any) -> onnx.ModelProto:
    """The model with weights, inputs and outputs of another float format."""
    for weight in model.graph.initializer:
        array = numpy_helper.to_array(weight)
        if array.dtype == np.float32:
            weight.CopyFrom(numpy_helper.from_array(array.astype(dtype), weight.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model


def opened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with names for batch, height and width of its input."""
    dims = model.graph.input[0].type.tensor_type.shape.dim
    for dim, name in zip((dims[0], dims[2], dims[3]), LEAST):
        dim.dim_param = name
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet50", "super_resolution"], choices=onnx_models.BUILDERS)
    parser.add_argument("--most", type=int, nargs=3, default=(4, 512, 512), metavar=("N", "H", "W"))
    parser.add_argument("--sizes", nargs="+", default=["512,512", "384,512", "256,256"], metavar="H,W")
    parser.add_argument("--width", type=float, default=1.0, help="factor of the numbers of channels")
    parser.add_argument("--target", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--db", default="dynamic_images.db", help="records; it may be missing")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="compare results with onnx.reference, which takes minutes")
    parser.add_argument("--out", help="a file for the numbers")
    options = parser.parse_args()
    target = detect(options.target)
    device = open_device(target)
    rows: list[dict[str, Any]] = []
    for name in options.networks:
        for row in measured(name, options, device, on_cuda=target.kind == "cuda"):
            rows.append(row)
            common.write(options.out, {"rows": rows})
    header = ("network", "n, h, w", "bounded, us", "exact, us", "one size, us", "bounded / one size", "difference")
    lines = [
        (
            row["network"], "x".join(map(str, row["size"])), f"{row['bounded_us']:.0f}", f"{row['exact_us']:.0f}",
            f"{row['one_size_us']:.0f}", f"{row['bounded_us'] / row['one_size_us']:.2f}", f"{row['difference']:.1e}",
        )
        for row in rows
    ]  # fmt: skip
    print(common.table(header, lines))
    device.close()


def measured(name: str, options: argparse.Namespace, device: Any, *, on_cuda: bool) -> Any:
    most = dict(zip(LEAST, options.most))
    dtype = np.float16 if on_cuda else np.float32
    sizes = [tuple(options.most), *((1, *map(int, text.split(","))) for text in options.sizes)]

    def model(n: int, h: int, w: int) -> onnx.ModelProto:
        return in_format(onnx_models.build(name, batch=n, size=(h, w), width=options.width), dtype)

    def placed(array: Any) -> Any:
        if not on_cuda:
            return array
        import torch

        return torch.from_numpy(array).cuda()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(opened(model(*options.most)), path)
        bounds = {size: (LEAST[size], most[size]) for size in LEAST}
        common_options: dict[str, Any] = {"db": options.db, "target": options.target}
        graph = schedsearch.build_dynamic(path, bounds, run_mode="exact", **common_options)
        for size in sizes:
            x = np.random.default_rng(0).standard_normal((size[0], 3, *size[1:])).astype(dtype)
            given = placed(x)
            onnx.save(model(*size), path)
            fixed = schedsearch.build(path, **common_options)
            one = fixed.bind(given)
            bound = graph.bind(given)
            row: dict[str, Any] = {"network": name, "size": size}
            row["bounded_us"] = time_us(bound.step, device.synchronize, options.repeat)
            row["exact_us"] = time_us(lambda given=given: graph(given), device.synchronize, options.repeat)
            row["one_size_us"] = time_us(one, device.synchronize, options.repeat)
            found, wanted = (
                np.asarray(each.cpu() if on_cuda else each, np.float64) for each in (graph(given), fixed(given))
            )
            row["difference"] = float(np.abs(found - wanted).max() / np.abs(wanted).max())
            if options.check:
                truth = onnx.reference.ReferenceEvaluator(onnx.load(path)).run(None, {"x": x})[0].astype(np.float64)
                row["error"] = float(np.abs(found - truth).max() / np.abs(truth).max())
            bound.close()
            yield row


if __name__ == "__main__":
    main()
