"""Writes the tables of the documentation from the data in benchmarks/results/.

    python benchmarks/render_tables.py

It replaces the text between `<!-- table: NAME -->` and `<!-- end -->`. If there are no data yet, it writes the command that
makes them. A test compares the pages with the data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import batch_one_tables
import common
import compiler_tables
import real_tables
import record_tables
import sequence_tables
import summary_tables
import torch_tables
from conv2d_tables import (
    before_after,
    blocks,
    conv2d_awkward,
    conv2d_fastest,
    conv2d_float8,
    conv2d_float32,
    conv2d_fp16,
    conv2d_fp16_short,
    conv2d_fused,
    conv2d_grouped,
    conv2d_halo_predictions,
    conv2d_ideas_table,
    conv2d_int8_search,
    conv2d_predictions_table,
    cpu_conv2d,
    int8_cases,
    int8_networks,
    networks,
    profile,
    resnet50_chain,
)
from table_text import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if MARKED.search(path.read_text(encoding="utf-8"))
)
_MACHINE_OPTIONS = r" --(dbs?|out) \S+"  # where a run kept its files says nothing to a reader


def origin(data: dict[str, Any], name: str) -> str:
    """Machine, versions and commands as a paragraph, one per line."""
    command = re.sub(r"\S*benchmarks/(?=\w+\.py)", "benchmarks/", re.sub(_MACHINE_OPTIONS, "", data["command"]))
    command = re.sub(r"(?<=--networks )\S+/", "", command)
    command = command.replace("\n", "\n    ")
    versions = data.get("versions") or data.get("toolchain") or {}
    named = ", ".join(f"{package} {version}" for package, version in versions.items() if package != "schedsearch")
    return f"{_machine(data)}; {named}.\n\nData: `benchmarks/results/{name}.json`, made by\n\n    {command}"


def _machine(data: dict[str, Any]) -> str:
    if data.get("card"):
        card, driver, *_ = data["card"].split(", ")
        return f"{card}, driver {driver}, {data['cpus']} CPU cores, Python {data['python']}"
    if "target" in data:
        return f"{data['target']['name']}, {data['target']['simd_bits']}-bit SIMD, {data['threads']} threads"
    return f"{data['machine']['cpu']}, {data['machine']['cores']} cores"


def two_versions(data: dict[str, Any]) -> str:
    """Two versions measured in turns: what was measured, and the ratio."""
    rows = [
        (row["what"], f"{row['before']:.2f}", f"{row['after']:.2f}", f"{row['after'] / row['before']:.3f}")
        for row in data["rows"]
    ]
    return markdown(("", "before", "after", "after / before"), rows)


def faults(data: dict[str, Any]) -> str:
    """One row per scenario of a campaign of injected faults (tests/faults)."""
    tried = [row for row in data["scenarios"] if row["tries"]]
    rows = []
    for row in tried:
        each_s = row["seconds"] / row["tries"]
        times = f"{each_s:.1f}" if each_s >= 0.1 else f"{each_s:.4f}"
        rows.append((f"`{row['name']}`", row["what"], f"{row['tries']:,}", f"{row['held']:,}", times, row["peak_mib"]))
    tries, held = (sum(row[key] for row in tried) for key in ("tries", "held"))
    rows.append(("all", "", f"{tries:,}", f"{held:,}", "", max(row["peak_mib"] for row in tried)))
    where = data["machine"]
    machine = f"{where['cpu']}, {where['cores']} cores, Python {where['python']}"
    command = re.sub(_MACHINE_OPTIONS, "", data["command"])
    text = f"`{command}` took {data['seconds'] / 60:.0f} minutes on {where['date']}; {machine}."
    ratios = [fact["after_ns"] / fact["before_ns"] for row in tried for fact in row["facts"] if "before_ns" in fact]
    if ratios and tried[0]["target"] == "cuda":
        text += f" A right candidate took {median(ratios):.2f} times as long after the faults of a run as before (median)."
    header = ("fault", "what happens", "tries", "held", "seconds each", "peak MiB")
    return f"{text}\n\n{markdown(header, rows)}"


def launch_overhead(data: dict[str, Any]) -> str:
    rows = [(row["call"], f"{row['host_us']:.2f}", _goal(row["goal_us"])) for row in data["rows"]]
    return markdown(("host time of a call", "us", "goal"), rows)


def lookup_latency(data: dict[str, Any]) -> str:
    rows = [
        (name, *(_short(result[key]) for key in ("median_us", "p99_us")), _goal(result["limit_us"]))
        for name, result in data["results"].items()
    ]
    return markdown((f"database of {data['records']:,} records, us", "median", "99th percentile", "goal"), rows)


def layout_plan(data: dict[str, Any]) -> str:
    """Planners on made-up times: losses over the best plan, and seconds."""
    header = (
        "network, layouts, spread", "fastest kernels", "all NHWC", "pairwise", "integer program", "planner, s", "program, s"
    )  # fmt: skip
    losses = ("fastest_kernels_loss", "all_nhwc_loss", "pairwise_loss", "integer_program_loss")
    rows = [
        (
            f"{row['network']}, {row['layouts']}, {row['spread']:g}",
            *(f"{row[loss]:.3f}" for loss in losses),
            *(f"{row[seconds]:.2f}" for seconds in ("planner_s", "integer_program_s")),
        )
        for row in data["rows"]
    ]
    return markdown(header, rows)


def c_call(data: dict[str, Any]) -> str:
    rows = [(row["kernel"], *(f"{row[key]:.2f}" for key in ("driver_us", "c_us", "python_us"))) for row in data["rows"]]
    return markdown(("host time of a launch, us", "the driver alone", "in C", "bound, in Python"), rows)


def dynamic_ops(data: dict[str, Any]) -> str:
    """Operators whose sizes depend on numbers, by default configurations, beside PyTorch."""
    rows = [
        (row["label"], f"{row['us']:.1f}", f"{row['torch_us']:.1f}", f"{row['torch_us'] / row['us']:.2f}")
        for row in data["rows"]
    ]
    return markdown(("what, us", "ours", "PyTorch", "ratio"), rows)


def recurrences(data: dict[str, Any]) -> str:
    """Calls of one LSTM on a CPU beside ONNX Runtime."""
    rows = [
        (row["name"], *(f"{row[f'{who}_us']:,.1f}" for who in ("ours", "ort1", "ort2")), f"{row['ratio']:.2f}")
        for row in data["rows"]
    ]
    header = ("a call, us", "ours", "ONNX Runtime, 1 thread", "2 threads", "its better time over ours")
    return markdown(header, rows)


def dynamic_slice(data: dict[str, Any]) -> str:
    """A row for each slice of an array on the device."""
    shown = {
        "copy": "copy of as many bytes", "static": "static kernel", "bounded": "bounded default", "exact": "exact default",
        "PyTorch": "PyTorch, three tolist()",
    }  # fmt: skip
    times: dict[str, dict[str, float]] = {}
    for row in data["rows"]:
        times.setdefault(row["case"], {})[row["run"]] = row["time_us"]
    rows = [
        (
            case, *(f"{found[run]:.1f}" for run in shown.values()),
            f"{found[shown['bounded']] / found[shown['static']]:.2f}",
        )
        for case, found in times.items()
    ]  # fmt: skip
    return markdown(("slice, us", *shown, "bounded over static"), rows)


def data_movement(data: dict[str, Any]) -> str:
    """Operators that move data, beside a copy of as many bytes and PyTorch."""
    rows: list[Sequence[object]] = [
        (row["label"], f"{row['us']:.1f}", f"{row['copy_us']:.1f}", f"{row['copy_us'] / row['us']:.0%}",
         f"{row['torch_us']:.1f}", f"{row['torch_us'] / row['us']:.1f}")
        for row in data["rows"]
    ]  # fmt: skip
    shares = [row["copy_us"] / row["us"] for row in data["rows"]]
    faster = common.geometric_mean([row["torch_us"] / row["us"] for row in data["rows"]])
    rows.append((f"geometric mean of {len(shares)}", "", "", f"{common.geometric_mean(shares):.0%}", "", f"{faster:.1f}"))
    return markdown(("movement, us", "ours", "copy", "of a copy's speed", "PyTorch", "times PyTorch's speed"), rows)


def networks_graphs(data: dict[str, Any]) -> str:
    """Whole networks in one CUDA graph beside PyTorch; times are those of launches that follow one another."""
    rows: list[Sequence[object]] = []
    for row in (each for each in data["rows"] if "plans" in each):
        plan, peers = row["plans"]["plan"], [row.get(f"{peer} hot_us") for peer in ("torch", "torch.compile")]
        rows.append(
            (
                f"{row['network']}, batch {row['batch']}, {row['format']}",
                *(f"{us:.0f}" if us else "" for us in peers),
                f"{plan['hot_us']:.0f}",
                f"{peers[1] / plan['hot_us']:.2f}" if peers[1] else "",
                *(f"{plan['predicted_us']:.0f}", plan["calls"], plan["conversions"], f"{plan['error']:.1e}"),
                f"{row['tuned']} in {row['tuning_s']:.0f} s",
            )
        )
    header = ("PyTorch", "torch.compile", "ours", "ratio", "predicted", "kernel calls", "conversions", "error", "tuned")
    return markdown(("network, us", *header), rows)


def own_kernels(data: dict[str, Any]) -> str:
    """The examples of kernels of users: the author's choice, the tuned kernel, its share of the limit, peers."""
    rows = [
        (
            row["kernel"], f"{row['yours_us']:.1f}", f"{row['tuned_us']:.1f}", f"{row['speedup']:.2f}", row["rate"],
            f"{100 * row['share']:.0f} %", ", ".join(f"{name} {us:.1f}" for name, us in row["peers_us"].items()),
            row["trials"], f"{row['seconds']:.0f}",
        )
        for row in data["rows"]
    ]  # fmt: skip
    header = ("kernel, us", "yours", "tuned", "speed-up", "rate", "of the limit", "peers", "trials", "seconds")
    host = ", ".join(f"{name} {us:.1f}" for name, us in data["host_us"].items() if name != "first call")
    first_ms = data["host_us"]["first call"] / 1e3
    return f"{markdown(header, rows)}\n\nHost time in us: {host}; the first call after import takes {first_ms:.1f} ms."


def depthwise(data: dict[str, Any]) -> str:
    """Depthwise layers beside PyTorch's best way and a copy of the same bytes."""
    ratios = [row["torch_us"] / row["us"] for row in data["rows"]]
    rows: list[Sequence[object]] = [
        (
            row["label"].removeprefix("depthwise_conv2d "), f"{row['us']:.2f}", f"{row['torch_us']:.2f}", f"{ratio:.2f}",
            f"{100 * row['copy_us'] / row['us']:.0f} %",
        )
        for row, ratio in zip(data["rows"], ratios)
    ]  # fmt: skip
    rows.append((f"geometric mean of {len(rows)}", "", "", f"**{common.geometric_mean(ratios):.2f}**", ""))
    return markdown(("layer, us", "ours", "PyTorch", "ratio", "of a copy's speed"), rows)


def bandwidth_ops(data: dict[str, Any]) -> str:
    """Pools, element-wise expressions, softmax and resize by default configurations, beside PyTorch and a copy."""
    rows = [
        (
            row["label"], f"{row['us']:.2f}", f"{row['torch_us']:.2f}", f"{row['torch_us'] / row['us']:.2f}",
            f"{100 * row['copy_us'] / row['us']:.0f} %",
        )
        for row in data["rows"]
    ]  # fmt: skip
    return markdown(("what, us", "ours", "PyTorch", "ratio", "of a copy's speed"), rows)


def _short(value: float) -> str:
    """About three significant digits, never an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _goal(value: float | None) -> str:
    return "" if value is None else f"{value:,.10g}"


@dataclass(frozen=True)
class Table:
    """`data` names a file of benchmarks/results/; it is empty if `draw` reads its own. `command` makes the file.

    With `origin` the page states machine and command.
    """

    data: str
    command: str
    draw: Callable[[dict[str, Any]], str]
    origin: bool = True

    def render(self) -> str:
        if not self.data:
            return self.draw({})
        path = RESULTS / f"{self.data}.json"
        if not path.exists():
            made_by = self.command if self.command.startswith("make ") else f"python benchmarks/{self.command} --out "
            command = f"{made_by}benchmarks/results/{path.name}"
            return f"No data are kept yet. To make them: `{command}`"
        data = json.loads(path.read_text(encoding="utf-8"))
        return self.draw(data) + (f"\n\n{origin(data, self.data)}" if self.origin else "")


TABLES = {
    "summary_convolutions": Table("", "", summary_tables.convolutions, origin=False),
    "summary_networks": Table("", "", summary_tables.network_times, origin=False),
    "summary_models": Table("torch_models_h100", "", summary_tables.models, origin=False),
    "summary_memory_bound": Table("", "", summary_tables.memory_bound, origin=False),
    "summary_own_kernels": Table("own_kernels_h200", "", summary_tables.own_kernels, origin=False),
    "summary_cpu": Table("cpu_conv2d", "", summary_tables.cpu, origin=False),
    "summary_host_time": Table("", "", summary_tables.host_time, origin=False),
    "conv2d_fp16": Table("conv2d_fp16_h200", "conv2d_fp16.py", conv2d_fp16),
    "conv2d_fp16_short": Table("conv2d_fp16_h200", "conv2d_fp16.py", conv2d_fp16_short, origin=False),
    "conv2d_fp16_random": Table("conv2d_fp16_random_h200", "conv2d_fp16.py --suite random", conv2d_fp16),
    "conv2d_awkward": Table("conv2d_awkward_h200", "awkward.py", conv2d_awkward),
    "conv2d_bf16": Table("conv2d_bf16_h200", "conv2d_fp16.py --dtype bfloat16", conv2d_fp16),
    "conv2d_grouped": Table("conv2d_grouped_h200", "conv2d_fp16.py --suite grouped", conv2d_grouped),
    "conv2d_int8": Table(
        "conv2d_int8_networks_h100", "conv2d_types.py --kind int8 --suite networks --networks networks.json", int8_networks
    ),
    "conv2d_int8_cases": Table(
        "conv2d_int8_cases_h100", "conv2d_types.py --kind int8 --suite cases --cases operator_cases.json", int8_cases
    ),
    "conv2d_tf32": Table("conv2d_tf32_h100", "conv2d_types.py --kind tf32", conv2d_float32),
    "conv2d_fp32": Table("conv2d_fp32_h200", "conv2d_types.py --kind fp32", conv2d_float32),
    "conv2d_float8": Table("conv2d_float8_h200", "conv2d_types.py --kind float8_e4m3", conv2d_float8),
    "conv2d_blocks": Table("conv2d_blocks_h100", "conv2d_blocks.py --networks networks.json", blocks),
    "conv2d_int8_search": Table("conv2d_int8_search_h200", "conv2d_types.py --kind int8", conv2d_int8_search),
    "conv2d_fused": Table("conv2d_fused_h200", "conv2d_fp16.py --epilogue bias,relu", conv2d_fused),
    "resnet50_chain": Table("resnet50_chain_h200", "resnet50_chain.py", resnet50_chain),
    "networks": Table("networks_h200", "conv2d_fp16.py --suite networks --networks networks.json --trials 64", networks),
    "profile": Table("profile_h200", "", profile),
    "conv2d_fastest": Table("", "", conv2d_fastest, origin=False),
    "conv2d_ideas": Table("", "", conv2d_ideas_table, origin=False),
    "conv2d_predictions": Table("", "", conv2d_predictions_table, origin=False),
    "conv2d_halo_predictions": Table("", "", conv2d_halo_predictions, origin=False),
    "faults_cpu": Table("faults_cpu", "make faults OUT=", faults, origin=False),
    "faults_inputs": Table("faults_inputs", "make faults N=50 FAULTS='own.*' OUT=", faults, origin=False),
    "faults_fuzz": Table("faults_fuzz", "make faults FAULTS='fuzz.*' OUT=", faults, origin=False),
    "faults_cuda": Table("faults_cuda", "make faults TARGET=cuda N=20 OUT=", faults, origin=False),
    "fresh_machine": Table("fresh_machine_h200", "fresh_machine.py --db tuned.db", record_tables.fresh_machine),
    "two_tunings": Table("reproducibility_h200", "reproducibility.py", record_tables.two_tunings),
    "toolchains": Table("toolchains_h200", "toolchains.py race newest.json", record_tables.toolchains),
    "two_versions": Table("two_versions_h200", "two_versions.py --target cuda", two_versions, origin=False),
    "early_launch": Table("early_launch_h200", "early_launch.py", batch_one_tables.early_launch),
    "network_times": Table("network_times_h200", "early_launch.py", batch_one_tables.network_times),
    "branches": Table("branches_h200", "branches.py", batch_one_tables.branches),
    "squeeze_excite": Table("squeeze_excite_h200", "squeeze_excite.py", batch_one_tables.squeeze_excite),
    "squeeze_excite_space": Table(
        "squeeze_excite_space_h200", "squeeze_excite_space.py", batch_one_tables.squeeze_excite_space
    ),
    "early_joins": Table("early_joins_h200", "branches.py --joins", batch_one_tables.early_joins),
    "split_k": Table("split_k_resnet50_h200", "split_k.py --networks resnet50", batch_one_tables.parts),
    "split_k_grids": Table("split_k_7x7_h200", "split_k.py --only 1x7x7 --columns 16,32,64", batch_one_tables.grids),
    "persistent": Table("persistent_h200", "persistent.py", batch_one_tables.persistent),
    "persistent_cycles": Table("persistent_h200", "persistent.py", batch_one_tables.persistent_cycles, origin=False),
    "before_after": Table("before_after_h200", "compare_versions.py", before_after),
    "cpu_conv2d": Table("cpu_conv2d", "cpu_conv2d.py", cpu_conv2d),
    "real_models": Table("real_models_cpu", "real_models.py --folder FOLDER", real_tables.real_models),
    "real_models_gpu": Table(
        "real_models_h200",
        "real_models.py --folder FOLDER --target cuda --at-once 4 --cache CACHE",
        real_tables.real_models_gpu,
    ),
    "real_cpu": Table("real_cpu", "real_cpu.py --folder FOLDER --built BUILT", real_tables.real_cpu),
    "launch_overhead": Table("launch_overhead_h200", "launch_overhead.py --db FILE", launch_overhead),
    "torch_dispatch": Table("torch_dispatch_cpu", "torch_dispatch.py --without-gpu", torch_tables.torch_dispatch),
    "torch_dispatch_gpu": Table("torch_dispatch_h200", "torch_dispatch.py", torch_tables.torch_dispatch),
    "network_host": Table("network_host_h200", "network_host.py", torch_tables.network_host),
    "idle_host": Table("idle_host", "idle_host.py --before FOLDER --after FOLDER", torch_tables.idle_host),
    "c_call": Table("c_call_h200", "c_call.py --times", c_call),
    "dynamic_ops": Table("dynamic_ops_h200", "dynamic_ops.py", dynamic_ops),
    "sequences": Table("sequences_h200", "sequences.py", sequence_tables.forward, origin=False),
    "sequences_training": Table("sequences_h200", "sequences.py", sequence_tables.training, origin=False),
    "sequences_updates": Table("sequences_h200", "sequences.py", sequence_tables.updates),
    "recurrences": Table("recurrences_cpu", "recurrences.py", recurrences),
    "dynamic_slice": Table("dynamic_slice_h200", "dynamic_slice.py", dynamic_slice),
    "own_kernels": Table("own_kernels_h200", "own_kernels.py", own_kernels),
    "depthwise": Table("depthwise_tuned_h100", "depthwise.py", depthwise),
    "data_movement_random": Table("data_movement_random_h100", "data_movement.py --what random", data_movement),
    "bandwidth_ops": Table("bandwidth_ops_h200", "bandwidth_ops.py", bandwidth_ops),
    "networks_graphs": Table("networks_graphs_h200", "networks.py", networks_graphs),
    "networks_graphs_h100": Table("networks_graphs_h100", "networks.py", networks_graphs),
    "torch_models": Table("torch_models_h100", "torch_models.py", torch_tables.torch_models),
    "torch_models_plain": Table("torch_models_h100", "torch_models.py", torch_tables.torch_models_plain, origin=False),
    "torch_training": Table("torch_training_h100", "torch_training.py", torch_tables.torch_training),
    "torch_losses": Table("torch_training_h100", "torch_training.py", torch_tables.torch_losses, origin=False),
    "layout_plan": Table("layout_plan", "layout_plan.py", layout_plan, origin=False),
    "compilers": Table("compilers", "compilers.py", compiler_tables.code, origin=False),
    "compilers_counts": Table("compilers", "compilers.py", compiler_tables.counts, origin=False),
    "compilers_layers": Table(
        "compilers_layers_h200", "toolchains.py race mlir.json --against numba.json", compiler_tables.times
    ),
    "compile_times": Table(
        "compile_times", "build_speed.py --compiler NAME --add", compiler_tables.build_times, origin=False
    ),
    "conv2d_mma": Table("conv2d_mma_h200", "conv2d_fp16.py --templates conv2d_mma", conv2d_fp16),
    "compilers_times": Table("compilers_h200", "toolchains.py race mlir.json --against numba.json", compiler_tables.times),
    "targets": Table("targets", "targets.py", compiler_tables.cards, origin=False),
    "mma_loads": Table("mma_loads_h200", "mma_loads.py --copies FILE --limit 30", compiler_tables.loads),
    "lookup_latency": Table("lookup_latency", "lookup_latency.py", lookup_latency),
}


def render(text: str) -> str:
    """The page with every marked table rendered again."""
    return MARKED.sub(lambda match: f"{match[1]}{TABLES[match[2]].render()}\n{match[3]}", text)


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        path.write_text(render(text), encoding="utf-8")
        print(f"{page}: {len(MARKED.findall(text))} tables")


if __name__ == "__main__":
    main()
