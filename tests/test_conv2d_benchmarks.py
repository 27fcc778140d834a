"""The convolution benchmarks without a GPU: the shapes that they time, how runs add up, and how data become tables."""

from __future__ import annotations

import importlib
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import integer_cases
import numpy as np
import pytest
from records_support import conv, record

from schedsearch.config import Config
from schedsearch.measurement import Outcome
from schedsearch.records.store import Store
from schedsearch.target import PRESETS

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FACTS = {"card": "a card, 1, 2, 3", "cpus": 2, "python": "3.12", "versions": {"torch": "2"}}
RUN = {"command": "first", "tuning_s": 10.0, "new_trials": 100, "shares": {"device": 0.2}}


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def conv2d(benchmark_module: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    program: ModuleType = benchmark_module("conv2d_fp16")
    monkeypatch.setattr(program.common, "facts", lambda: {**FACTS, "command": "now"})
    return program


@pytest.fixture
def chain(benchmark_module: Any) -> ModuleType:
    program: ModuleType = benchmark_module("resnet50_chain")
    return program


@pytest.fixture
def networks(tmp_path: Path) -> str:
    """A file like networks.json with one layer per network, which occurs twice."""
    data = {
        name: {"layers": [[size, size, 16, 32, 3, 3, 1, 1, 1, 1, 1, 1, 1, 2]]}
        for size, name in enumerate(("resnet50", "vgg16", "inception_v3"), 7)
    }
    (tmp_path / "networks.json").write_text(json.dumps(data))
    return str(tmp_path / "networks.json")


# --- The chain ---------------------------------------------------------------------------------------------------------
def test_the_chain_has_the_layers_of_resnet50(chain: ModuleType) -> None:
    """torchvision's resnet50 has 4.09 G multiply-adds and 25,557,032 parameters: 53,120 of them belong to batch norms and
    2,049,000 to the classifier."""
    layers = chain.layers()
    assert len(layers) == 53
    assert sum(layer.workload.signature[1].size for layer in layers) == 25_557_032 - 53_120 - 2_049_000
    assert sum(layer.workload.flops for layer in layers) / 2e9 == pytest.approx(4.09, abs=0.005)
    assert all([str(stage) for stage in layer.workload.epilogue] == ["bias", "relu"] for layer in layers)


def test_a_layer_of_the_chain_takes_the_output_of_its_producer(chain: ModuleType) -> None:
    layers = chain.layers()
    shapes = {"image": (1, 224, 224, 3), "pooled": (1, 56, 56, 64)}
    for layer in layers:
        assert layer.workload.signature[0].shape == shapes[layer.reads], layer.name
        shapes[layer.name] = layer.workload.output.shape
    assert shapes["stem"] == (1, 112, 112, 64)
    assert shapes["layer4.2.conv3"] == (1, 7, 7, 2048)


def test_the_unread_outputs_are_the_downsampled_ones_and_the_last(chain: ModuleType) -> None:
    layers = chain.layers()
    names = [layers[number].name for number in chain.unread(layers)]
    assert names == [*(f"layer{stage}.0.downsample" for stage in (1, 2, 3, 4)), "layer4.2.conv3"]


def test_a_pass_hands_outputs_on(chain: ModuleType) -> None:
    layers = chain.layers()
    outputs = chain.run(layers, ("image", "pooled"), lambda number, x: f"{layers[number].name}({x})")
    made = {layer.name: output for layer, output in zip(layers, outputs)}
    assert made["stem"] == "stem(image)"
    assert made["layer1.0.conv2"] == "layer1.0.conv2(layer1.0.conv1(pooled))"
    assert made["layer2.0.downsample"] == f"layer2.0.downsample({made['layer1.2.conv3']})"
    assert made["layer2.1.conv1"] == f"layer2.1.conv1({made['layer2.0.conv3']})"


# --- The choice of shapes ----------------------------------------------------------------------------------------------
def test_the_dtype_is_that_of_every_shape_and_output(conv2d: ModuleType) -> None:
    halves, _ = conv2d.chosen(conv2d.arguments(["--dtype", "bfloat16"]))
    assert [workload.replace(dtype="float16", out_dtype="float16") for workload in halves] == conv2d.chosen(
        conv2d.arguments([])
    )[0]
    assert {(workload.dtype, workload.out_dtype) for workload in halves} == {("bfloat16", "bfloat16")}


def test_the_epilogue_is_that_of_every_shape(conv2d: ModuleType) -> None:
    plain, _ = conv2d.chosen(conv2d.arguments([]))
    fused, _ = conv2d.chosen(conv2d.arguments(["--epilogue", "bias,relu"]))
    assert [workload.replace(epilogue=()) for workload in fused] == plain
    assert {tuple(map(str, workload.epilogue)) for workload in fused} == {("bias", "relu")}


def test_the_grouped_layers_are_those_of_known_networks(conv2d: ModuleType) -> None:
    """(groups, channels of each, pixels): ResNeXt doubles channels from stage to stage, RegNet keeps the width of groups."""
    workloads, layers = conv2d.chosen(conv2d.arguments(["--suite", "grouped"]))
    assert layers == [] and len(workloads) == len(conv2d.GROUPED)
    assert {workload.n for workload in workloads} == {1, 32}
    assert {(workload.groups, workload.c // workload.groups, workload.h) for workload in workloads} >= {
        (32, 4, 56), (32, 8, 28), (32, 16, 14), (32, 32, 7), (64, 4, 56), (64, 16, 14), (7, 24, 28), (4, 48, 28),
        (11, 112, 14),
    }  # fmt: skip


def test_one_network_is_picked_and_all_are_known(conv2d: ModuleType, networks: str) -> None:
    words = ["--suite", "networks", "--networks", networks, "--network", "resnet50 batch 32"]
    workloads, layers = conv2d.chosen(conv2d.arguments(words))
    assert [workload.label for workload in workloads] == ["conv2d 32x7x7x16 k32 3x3 p1 f16 NHWC"]
    assert [network for _, network, _ in layers] == [
        "resnet50 batch 1", "vgg16 batch 1", "inception_v3 batch 1", "resnet50 batch 32",
    ]  # fmt: skip


def test_an_unknown_network_is_refused_with_those_there_are(conv2d: ModuleType, networks: str) -> None:
    words = ["--suite", "networks", "--networks", networks, "--network", "resnet"]
    with pytest.raises(SystemExit, match=r"no network 'resnet'; allowed: resnet50 batch 1, vgg16 batch 1"):
        conv2d.chosen(conv2d.arguments(words))


@pytest.mark.parametrize("words", [["--suite", "networks"], ["--networks", "FILE"], ["--network", "vgg16 batch 1"]])
def test_networks_and_their_file_belong_together(conv2d: ModuleType, words: list[str]) -> None:
    with pytest.raises(SystemExit):
        conv2d.arguments(words)


def test_the_networks_are_those_of_torchvision(conv2d: ModuleType, chain: ModuleType, shared: Path) -> None:
    """torchvision documents 4.09, 15.47 and 5.71 G multiply-adds, including linear layers of 0.002, 0.124 and 0.002 G."""
    _, layers = conv2d.chosen(conv2d.arguments(["--suite", "networks", "--networks", str(shared / "cases/networks.json")]))
    linear = {"resnet50": 0.002, "vgg16": 0.124, "inception_v3": 0.002}
    for name, total, count in (("resnet50", 4.09, 53), ("vgg16", 15.47, 13), ("inception_v3", 5.71, 94)):
        found = [(workload, times) for workload, network, times in layers if network == f"{name} batch 1"]
        assert sum(times for _, times in found) == count
        assert sum(w.flops * times for w, times in found) / 2e9 == pytest.approx(total - linear[name], abs=0.01)
    resnet50 = Counter(layer.workload.replace(epilogue=()) for layer in chain.layers())
    assert resnet50 == Counter({workload: times for workload, network, times in layers if network == "resnet50 batch 1"})


def test_the_fastest_of_each_template_is_that_of_the_same_layer_and_verified(conv2d: ModuleType, tmp_path: Path) -> None:
    path, layer = tmp_path / "records.db", conv(groups=4)
    with Store.open(path) as store:
        for template, time_ns in (("conv2d_halo", 9000.0), ("conv2d_halo", 8000.0), ("conv2d_mma", 20500.0)):
            store.append(record(time_ns, workload=layer, template=template, config=Config({"time": int(time_ns)})))
        store.append(record(None, Outcome.WRONG_ANSWER, workload=layer, template="conv2d_stem"))
        store.append(record(1000.0, workload=conv(groups=2), template="conv2d_mma"))
    assert conv2d.fastest_by_template(layer, str(path)) == {"conv2d_halo": 8.0, "conv2d_mma": 20.5}


# --- Other element types -----------------------------------------------------------------------------------------------
@pytest.fixture
def types(benchmark_module: Any) -> ModuleType:
    program: ModuleType = benchmark_module("conv2d_types")
    return program


def test_int8_layers_are_fused_and_have_an_fp16_layer_that_does_the_same_work(types: ModuleType) -> None:
    workloads, _ = types.chosen(types.arguments(["--kind", "int8"]))
    assert len(workloads) == 15  # the 13 shapes and two large ones; TVM's is one of the 13
    for workload in workloads:
        half = types.own_fp16(workload)
        assert [stage.name for stage in workload.epilogue] == ["bias", "relu", "requantise"]
        assert [stage.name for stage in half.epilogue] == ["bias", "relu"]
        assert (half.dtype, half.flops) == ("float16", workload.flops)
        assert [spec.shape for spec in half.signature[:2]] == [spec.shape for spec in workload.signature[:2]]


def test_recorded_cases_are_timed_in_nhwc_each_shape_once(types: ModuleType, shared: Path) -> None:
    file = str(shared / "cases" / "operator_cases.json")
    workloads, layers = types.chosen(types.arguments(["--kind", "int8", "--suite", "cases", "--cases", file]))
    params = {**types.KINDS["int8"].params, "layout": "NHWC"}
    expected = {
        integer_cases.workload_of(case, "NHWC").replace(**params)
        for family in integer_cases.FAMILIES
        for case in integer_cases.cases(shared, family)
    }
    assert not layers and len(workloads) == len(expected) and set(workloads) == expected


def test_a_row_is_rated_by_the_fastest_peer_that_counts(types: ModuleType) -> None:
    row = types.rated(
        {"us": 10.0, "cudnn_int8_us": 30.0, "cudnn_fp16_us": 20.0, "fp16_us": 15.0}, types.KINDS["int8"].against
    )
    assert (row["peer"], row["cudnn_us"], row["ratio"], row["fp16_ratio"]) == ("cudnn_fp16_us", 20.0, 2.0, 1.5)
    assert "ratio" not in types.rated({"us": 10.0, "fp16_us": 15.0}, types.KINDS["int8"].against)


def test_a_networks_sum_has_our_fp16_too(conv2d: ModuleType, networks: str) -> None:
    layers = importlib.import_module("convolutions").network_layers(networks)[:1]
    (entry,) = conv2d.network_sums(layers, [{**row(layers[0][0].label, 3.0, 10.0), "fp16_us": 16.0}]).values()
    assert entry == {"ms": pytest.approx(0.02), "cudnn_ms": pytest.approx(0.06), "fp16_ms": pytest.approx(0.032),
                     "layers": 2, "missing": 0}  # fmt: skip


@pytest.fixture
def blocks(benchmark_module: Any) -> ModuleType:
    program: ModuleType = benchmark_module("conv2d_blocks")
    return program


def test_a_layer_has_a_row_for_every_x_that_divides_its_channels(blocks: ModuleType, networks: str) -> None:
    (layer,) = blocks.layers(networks, [4])
    found = {x: workload for x in blocks.XS if (workload := blocks.blocked(layer, x)) is not None}
    assert list(found) == ["4", "8", "16", "C"]  # of 16 and 32 channels
    assert found["8"].signature[0].shape == (4, 2, 7, 7, 8)  # NCHW8c
    assert found["8"].signature[1].shape == (4, 2, 3, 3, 8, 8)  # OIHW8o8i
    assert found["C"].signature[0].shape == (4, 7, 7, 16)
    assert {workload.flops for workload in found.values()} == {layer.flops}


def test_the_best_x_is_named_with_its_lead_over_the_second_and_over_four(blocks: ModuleType) -> None:
    rows = [{"layer": "a", "x": x, "us": us} for x, us in (("4", 8.0), ("16", 5.0), ("C", 4.0))]
    found = blocks.winners([*rows, {"layer": "a", "x": "8", "error": "none"}, {"layer": "b", "x": "C", "us": 1.0}])
    assert (found["a"]["best"], found["a"]["second"], found["a"]["four"]) == ("C", 1.25, 2.0)
    assert found["b"] == {"times": {"C": 1.0}, "best": "C"}
    assert "8.00" in blocks.table(rows) and "1.25" in blocks.table(rows)


def test_the_fastest_is_told_by_template_and_by_the_batchs_place(blocks: ModuleType, tmp_path: Path) -> None:
    path, layer = tmp_path / "records.db", conv()
    with Store.open(path) as store:
        for template, time_ns, batch in (("a", 9000.0, "bound"), ("a", 7000.0, "folded"), ("b", 8000.0, None)):
            config = Config({"time": int(time_ns), **({"batch": batch} if batch else {})})
            store.append(record(time_ns, workload=layer, template=template, config=config))
        store.append(record(None, Outcome.WRONG_ANSWER, workload=layer, template="c"))
    row = blocks.fastest(layer, str(path))
    assert (row["us"], row["template"], row["trials"]) == (7.0, "a", 3)
    assert row["template_us"] == {"a": 7.0, "b": 8.0} and row["batch_us"] == {"bound": 9.0, "folded": 7.0}
    assert row["packed_us"] == {} and "7.00" not in blocks.packed_table([{"layer": "plain", "x": "NCHW", **row}])


def test_a_plain_layer_tells_the_times_of_the_x_that_its_kernel_packs_to(
    blocks: ModuleType, networks: str, tmp_path: Path
) -> None:
    (layer,) = blocks.layers(networks, [4])  # 16 channels, 32 filters
    plain, path = blocks.blocked(layer.replace(c=20), "NCHW"), tmp_path / "records.db"
    assert [argument.shape for argument in plain.signature[:2]] == [(4, 20, 7, 7), (32, 20, 3, 3)]
    with Store.open(path) as store:
        for time_ns, x, batch in ((6000.0, 16, "bound"), (5000.0, 16, "folded"), (4000.0, 32, "folded")):
            config = Config({"x": x, "batch": batch})
            store.append(record(time_ns, workload=plain, template="conv2d_packed", config=config))
        store.append(record(3000.0, workload=plain, template="another", config=Config({"x": 64})))
    row = {"layer": "plain", "x": "NCHW", **blocks.fastest(plain, str(path))}
    assert row["packed_us"] == {"16": 5.0, "C": 4.0}  # 20 channels are filled up to 32
    assert blocks.winners([row]) == {}
    assert blocks.packed_table([row]).splitlines()[-1].split() == ["plain", "NCHW", "5.00", "4.00", "3.00", "another"]


def test_each_nth_layer_is_chosen_with_all_its_blocks(blocks: ModuleType, networks: str) -> None:
    words = ["--networks", networks, "--batch", "1", "--batch", "2", "--batch", "4"]
    every = [layer.n for layer, x, _ in blocks.chosen(blocks.arguments([*words, "--every", "2", "--x", "C"]))]
    named = [(layer.n, x) for layer, x, _ in blocks.chosen(blocks.arguments([*words, "--layers", "2x7x7"]))]
    assert every == [1, 4] and named == [(2, x) for x in ("4", "8", "16", "C", "NCHW")]


def test_rows_are_written_while_a_run_goes_on(blocks: ModuleType) -> None:
    written: list[int] = []
    often, seldom = blocks.Writer(written.append, seconds=0.0), blocks.Writer(written.append, seconds=1e6)
    for _ in range(3):
        often.on_trial(None)
        seldom.on_trial(None)
    assert written == [1, 2, 3]


# --- Runs that add up --------------------------------------------------------------------------------------------------
def row(label: str, ratio: float = 2.0, us: float = 10.0) -> dict[str, Any]:
    return {"workload": label, "ratio": ratio, "us": us, "cudnn_us": ratio * us}


def test_a_second_run_replaces_its_rows_and_keeps_the_others(conv2d: ModuleType) -> None:
    first = conv2d.report("networks", {"rows": [], "runs": []}, [row("a", 2.0), row("b", 8.0)], RUN)
    second_run = {"command": "second", "tuning_s": 30.0, "new_trials": 20, "shares": {"device": 0.6}}
    both = conv2d.report("networks", first, [row("a", 4.0), {"workload": "c", "error": "no"}], second_run)
    assert {entry["workload"]: entry.get("ratio") for entry in both["rows"]} == {"a": 4.0, "b": 8.0, "c": None}
    assert both["geometric_mean_ratio"] == pytest.approx(32**0.5)
    assert both["command"] == "first\nsecond"
    assert (both["tuning_s"], both["trials_per_s"]) == (40.0, 3.0)
    assert both["shares"] == {"device": pytest.approx((0.2 * 10 + 0.6 * 30) / 40)}
    assert both["runs"] == [RUN, second_run]


def test_rows_are_added_only_to_a_file_of_the_same_machine_and_suite(conv2d: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert conv2d.kept(str(path), "networks") == {"rows": [], "runs": []}
    conv2d.common.write(str(path), conv2d.report("networks", {"rows": [], "runs": []}, [row("a")], RUN))
    assert [entry["workload"] for entry in conv2d.kept(str(path), "networks")["rows"]] == ["a"]
    with pytest.raises(SystemExit, match="differs in suite"):
        conv2d.kept(str(path), "targets")
    conv2d.common.facts = lambda: {**FACTS, "card": "another"}
    with pytest.raises(SystemExit, match="differs in card"):
        conv2d.kept(str(path), "networks")


def test_a_networks_sum_counts_layers_as_often_as_they_occur(conv2d: ModuleType, networks: str) -> None:
    layers = importlib.import_module("convolutions").network_layers(networks)
    again = (layers[0][0].replace(k=64), layers[0][1], 3)
    sums = conv2d.network_sums([*layers, again], [row(layers[0][0].label, 3.0, 10.0)])
    assert sums == {
        "resnet50 batch 1": {
            "ms": pytest.approx(0.02), "cudnn_ms": pytest.approx(0.06), "layers": 2, "missing": 3,
        }
    }  # fmt: skip


# --- Tables ------------------------------------------------------------------------------------------------------------
def test_the_fused_table_shows_the_faster_layout_of_each_way_and_the_failures(benchmark_module: Any) -> None:
    tables = benchmark_module("render_tables")
    fused = {
        **row("conv2d 1x7x7x8 k8 1x1 f16 NHWC+bias+relu"),
        "separate_nchw_us": 9.0, "separate_nhwc_us": 7.5, "fused_nhwc_us": 8.0,
        "failed": {"compiled_nhwc": "TimeoutError: not done in 90 s"},
        "default_us": None, "tflops": 3.2, "trials": 5, "template": "conv2d_mma",
    }  # fmt: skip
    totals = {"geometric_mean_ratio": 2.0, "tuning_s": 1.0, "trials_per_s": 5.0, "shares": {"device": 0.5}}
    lines = tables.conv2d_fused({"rows": [fused], **totals}).splitlines()
    assert lines[2] == "| 1x7x7x8 k8 1x1 | 7.50 | 8.00 |  |  | 10.00 | 2.00 | 3 | 5 | conv2d_mma |"
    assert "- 1x7x7x8 k8 1x1, compiled_nhwc: TimeoutError: not done in 90 s" in lines


def test_the_commands_of_all_runs_are_shown(benchmark_module: Any) -> None:
    tables = benchmark_module("render_tables")
    command = "python benchmarks/a.py --db x.db --trials 3\npython benchmarks/a.py --out y.json --add"
    text = tables.origin({**FACTS, "command": command}, "data")
    assert text.endswith("\n\n    python benchmarks/a.py --trials 3\n    python benchmarks/a.py --add")


def test_the_chains_table_compares_with_the_fastest_way(benchmark_module: Any) -> None:
    tables = benchmark_module("render_tables")
    times = {"us": 200.0, "hot_us": 190.0, "launches": 53, "relative_error": 1e-3}
    text = tables.resnet50_chain({
        "layers": 53, "ratio": 1.5, "hot_ratio": 1.25, "sum_of_layers_us": 180.0, "trials": {"a": 60, "b": 68},
        "rows": [{"way": "schedsearch", **times}, {"way": "torch_compile", "error": "no\nreally"}],
    })  # fmt: skip
    assert "| ours, tuned | 200.0 | 190.0 | 53 | 1.0e-03 |" in text
    assert "- PyTorch, torch.compile: no\n" in text
    assert "**1.50x**" in text
    assert "64 trials per layer" in text


# --- The picture of the pipeline ---------------------------------------------------------------------------------------
def test_the_picture_of_the_pipeline_is_drawn_by_the_program(benchmark_module: Any) -> None:
    """To draw it again: python benchmarks/draw_pipeline.py --out docs/images/conv2d-pipeline.svg"""
    pipeline = benchmark_module("draw_pipeline")
    kept = BENCHMARKS.parent / "docs" / "images" / "conv2d-pipeline.svg"
    assert pipeline.draw() == kept.read_text(encoding="utf-8")


@pytest.mark.parametrize("persistent", [False, True])
def test_in_the_picture_a_buffer_does_one_thing_at_a_time(benchmark_module: Any, persistent: bool) -> None:
    bars = benchmark_module("draw_pipeline").ring(2, persistent)
    for lane in {bar.lane for bar in bars}:
        ordered = sorted((bar for bar in bars if bar.lane == lane), key=lambda bar: bar.start)
        assert all(before.end <= after.start for before, after in pairwise(ordered)), lane
    busy = sorted((bar for bar in bars if bar.kind != "load"), key=lambda bar: bar.start)
    assert all(before.end <= after.start for before, after in pairwise(busy))  # there is one set of tensor cores


def test_the_rank_correlation_of_predictions_does_not_depend_on_the_order_of_equal_ones(benchmark_module: Any) -> None:
    program = benchmark_module("conv2d_predictions")

    def correlation(measured: list[float], predicted: list[float]) -> float:
        found: float = program.Layer("", np.array(measured), np.array(predicted)).rank_correlation
        return found

    # By hand: ranks 1 2 3 4 and 1.5 1.5 3.5 3.5; sum of the products of the deviations 4, of their squares 5 and 4.
    assert correlation([10.0, 20.0, 30.0, 40.0], [5.0, 5.0, 7.0, 7.0]) == pytest.approx(4 / math.sqrt(20))
    assert correlation([20.0, 40.0, 10.0, 30.0], [5.0, 7.0, 5.0, 7.0]) == pytest.approx(4 / math.sqrt(20))
    assert math.isnan(correlation([1.0, 2.0], [3.0, 3.0]))


# --- Awkward channels --------------------------------------------------------------------------------------------------
def test_layers_of_awkward_channels_come_in_two_halves_and_have_templates(benchmark_module: Any) -> None:
    awkward = benchmark_module("awkward")
    halves = [awkward.chosen(awkward.arguments(["--half", half])) for half in ("1", "2")]
    layers = awkward.chosen(awkward.arguments([]))
    assert halves[0] + halves[1] == layers and len(layers) == 16
    assert all(layer.c % 8 or layer.k % 8 for layer in layers)
    fitting = awkward.fitting(layers, ["conv2d_mma"], PRESETS["h200"])
    assert fitting == {"conv2d_mma": layers}


def test_a_row_of_awkward_channels_has_a_column_for_each_template(benchmark_module: Any) -> None:
    awkward = benchmark_module("awkward")
    common = {"workload": "layer", "cudnn_nhwc_us": 6.0, "cudnn_us": 5.0, "ratio": 1.25}
    rows = [{**common, "template_us": {"a": 4.0}}, {"workload": "other", "error": "none"}]
    header, _, first, second = awkward.table(rows).splitlines()
    assert header.split() == ["layer,", "us", "a", "cuDNN", "NHWC", "cuDNN", "ratio"]
    assert first.split() == ["layer", "4.00", "6.00", "5.00", "1.25"] and second.split() == ["other", "none"]


def test_a_resumed_comparison_of_compilers_keeps_its_rows_and_names_all_commands(
    benchmark_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, file = benchmark_module("compilers"), tmp_path / "compilers.json"
    monkeypatch.setattr(program, "facts", lambda: {"command": "second"})
    earlier = {"command": "first", "toolchain": {"numba-cuda": "0.30.4"}, "rows": [{"template": "conv2d_mma"}]}
    file.write_text(json.dumps(earlier), encoding="utf-8")
    assert program.begun(file, {"numba-cuda": "0.30.4"}) == {**earlier, "command": "first\nsecond"}
    with pytest.raises(SystemExit, match=r"made with \{'numba-cuda': '0.30.4'\}.*Leave out --resume"):
        program.begun(file, {"numba-cuda": "0.30.5"})
