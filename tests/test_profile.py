"""Hardware counters: derived figures, reading `ncu`'s output, the launches under it, and the command."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_ncu
import pytest
from child_environment import child_environment
from cli_support import isolate, schedsearch
from records_support import artifact, conv, profile, record

from schedsearch.backend import compile_source
from schedsearch.device.detect import detect
from schedsearch.errors import DeviceError
from schedsearch.measurement import COLD_GRAPH, HOT_GRAPH
from schedsearch.ops import operator
from schedsearch.profiling import ncu
from schedsearch.profiling import process as profile_target
from schedsearch.profiling.profile import METRICS, Launch, Profile
from schedsearch.records.store import Store
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
YAML = """\
tasks:
  - {name: one, op: conv2d, shape: {n: 1, h: 14, w: 14, c: 64, k: 64, r: 3, s: 3}, padding: 1, dtype: float16}
  - {name: two, op: conv2d, shape: {n: 2, h: 14, w: 14, c: 64, k: 64, r: 3, s: 3}, padding: 1, dtype: float16}
"""


class TestFigures:
    def test_percentages_of_several_launches_are_weighted_by_time_and_times_add_up(self) -> None:
        """80 % for three quarters of the time and 0 % for the rest."""
        read = profile(duration_ns=1000.0)
        assert read.figure("duration_ns") == 1000.0
        assert read.figure("tensor_active_pct") == pytest.approx(60.0)
        assert [read.figure("tensor_active_pct", launch) for launch in read.launches] == [80.0, 0.0]

    def test_sizes_add_up_over_launches_and_over_reads_and_writes(self) -> None:
        metrics = {"dram__bytes_read.sum": 30.0, "dram__bytes_write.sum": 12.0}
        read = replace(profile(), launches=(Launch("a", "", "", metrics), Launch("b", "", "", metrics)))
        assert read.figure("dram_bytes") == 84.0
        assert read.source("dram_bytes") == ("dram__bytes_read.sum", "dram__bytes_write.sum")

    def test_a_figure_comes_from_the_same_metric_in_every_launch(self) -> None:
        better, worse = (
            f"sm__pipe_tensor_{name}cycles_active.avg.pct_of_peak_sustained_active" for name in ("", "op_hmma_")
        )
        launches = (Launch("a", "", "", {better: 70.0, worse: 60.0}), Launch("b", "", "", {worse: 50.0}))
        assert replace(profile(), launches=launches).source("tensor_active_pct") == (worse,)
        assert replace(profile(), launches=launches[:1]).source("tensor_active_pct") == (better,)

    def test_a_metric_that_was_not_read_is_none(self) -> None:
        assert profile().figure("l2_bytes") is None and profile().source("l2_bytes") == ()

    def test_json_brings_it_back(self) -> None:
        assert Profile.from_json(profile().to_json()) == profile()

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_metric_that_is_not_a_number_is_refused(self, value: float) -> None:
        with pytest.raises(ValueError, match="finite"):
            replace(profile(), launches=(Launch("a", "", "", {"gpu__time_duration.sum": value}),))


def steps(count: int) -> Any:
    """The sample artifact with this number of steps."""
    one = artifact()
    return replace(one, plan=replace(one.plan, steps=one.plan.steps * count))


class TestNcu:
    def read(self, folder: Path, *, mode: str = COLD_GRAPH, count: int = 1, **fake: Any) -> Profile:
        program = fake_ncu.write(folder, **fake)
        return ncu.profile(conv(), steps(count), H200, mode=mode, ncu=str(program))

    def test_its_output_is_read(self, tmp_path: Path) -> None:
        read = self.read(tmp_path)
        assert read.figures() == {
            "duration_ns": 12345.0,
            "tensor_active_pct": 71.25,
            "tensor_elapsed_pct": 64.5,
            "occupancy_pct": 18.02,
            "l2_pct": 33.1,
            "l2_bytes": 98_765_432.0,
            "dram_pct": 40.75,
            "dram_bytes": 42_000_000.0,
        }
        (launch,) = read.launches
        assert (launch.kernel, launch.grid, launch.block) == ("conv", "(132, 1, 1)", "(384, 1, 1)")
        assert launch.metrics["sm__inst_executed_pipe_tensor_op_gmma.sum"] == 1_806_336
        assert (read.subject, read.tool, read.cache) == ("kernel", "ncu 2025.3.1.0", "flushed")

    def test_it_is_asked_for_one_watched_region_and_leaves_the_clocks_alone(self, tmp_path: Path) -> None:
        self.read(tmp_path)
        command = fake_ncu.calls(tmp_path)[0]
        options = dict(itertools.pairwise(command))
        assert {"--csv"} < set(command)
        assert options["--page"] == "raw" and options["--print-units"] == "base"
        assert options["--clock-control"] == "none" and options["--profile-from-start"] == "off"
        assert options["--metrics"].split(",") == list(METRICS)

    @pytest.mark.parametrize(("mode", "control", "cache"), [(COLD_GRAPH, "all", "flushed"), (HOT_GRAPH, "none", "kept")])
    def test_caches_are_as_the_record_was_timed(self, tmp_path: Path, mode: str, control: str, cache: str) -> None:
        assert self.read(tmp_path, mode=mode).cache == cache
        command = fake_ncu.calls(tmp_path)[0]
        assert command[command.index("--cache-control") + 1] == control

    @pytest.mark.parametrize("refuses", [True, False], ids=["an error", "n/a"])
    def test_metrics_that_a_card_lacks_are_left_out_and_named(self, tmp_path: Path, refuses: bool) -> None:
        """An A100 has neither wgmma nor the pipe's common name. Versions of ncu report this in different ways."""
        old = {name: text for name, text in fake_ncu.HOPPER.items() if "gmma" not in name and "tensor_cycles" not in name}
        read = self.read(tmp_path, values=old, refuses=refuses)
        assert read.figure("tensor_active_pct") == 71.2
        assert read.source("tensor_active_pct") == (
            "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        )
        assert sorted(read.missing) == sorted(set(METRICS) - set(old))
        assert read.launches[0].metrics.keys() == old.keys()

    def test_every_step_is_a_launch(self, tmp_path: Path) -> None:
        values = {
            "gpu__time_duration.sum": ["9,000", "1,000"],
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ["90", "0"],
        }
        read = self.read(tmp_path, count=2, launches=("conv", "reduce"), values=values)
        assert [launch.kernel for launch in read.launches] == ["conv", "reduce"]
        assert read.figure("tensor_active_pct") == pytest.approx(81.0)

    def test_launches_that_are_not_the_kernels_are_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(DeviceError, match="ncu saw 2 launches of a kernel of 1 steps"):
            self.read(tmp_path, launches=("fill", "conv"))

    def test_units_of_older_versions(self, tmp_path: Path) -> None:
        values = {"gpu__time_duration.sum": "12.345", "lts__t_bytes.sum": "98.5"}
        units = {"gpu__time_duration": "usecond", "lts__t_bytes": "Mbyte"}
        read = self.read(tmp_path, values=values, units=units)
        assert (read.figure("duration_ns"), read.figure("l2_bytes")) == (pytest.approx(12345.0), pytest.approx(98.5e6))

    @pytest.mark.parametrize(
        ("error", "wanted"),
        [
            (
                "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters "
                "on the target device 0. For instructions see https://developer.nvidia.com/ERR_NVGPUCTRPERM",
                "only administrators read performance counters .*NVreg_RestrictProfilingToAdminUsers=0",
            ),
            ("==WARNING== No kernels were profiled.", "ncu profiled no kernel; it said: .*No kernels were profiled"),
            ("no kernel image\n==ERROR== The application returned an error code (1).", "it said: .*no kernel image"),
        ],
        ids=["permission", "nothing", "failure"],
    )
    def test_failures_say_why(self, tmp_path: Path, error: str, wanted: str) -> None:
        with pytest.raises(DeviceError, match=wanted):
            self.read(tmp_path, error=error)

    def test_a_program_that_knows_no_metric(self, tmp_path: Path) -> None:
        with pytest.raises(DeviceError, match=r"ncu profiled no kernel; it said: .*Failed to find metric"):
            self.read(tmp_path, values={})

    def test_nothing_is_left_in_the_temporary_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        isolate(tmp_path, monkeypatch)
        self.read(tmp_path)
        assert list((tmp_path / "tmp").iterdir()) == []


def test_ncu_is_looked_for_on_path_and_in_the_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "_INSTALLED", (f"{tmp_path}/nsight/*/ncu",))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(DeviceError, match=r"no program ncu on PATH; it comes with the CUDA toolkit .* --ncu PATH"):
        ncu.find()
    for version in ("2024.10.0", "2025.1.0", "2024.9.1"):
        (tmp_path / "nsight" / version).mkdir(parents=True)
        fake_ncu.write(tmp_path / "nsight" / version)
    assert ncu.find() == str(tmp_path / "nsight" / "2025.1.0" / "ncu")
    (tmp_path / "toolkit" / "bin").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    in_toolkit = str(fake_ncu.write(tmp_path / "toolkit" / "bin"))
    assert ncu.find() == in_toolkit
    monkeypatch.setenv("PATH", str(tmp_path))
    on_path = str(fake_ncu.write(tmp_path))
    assert ncu.find() == on_path
    assert ncu.find(in_toolkit) == in_toolkit
    with pytest.raises(DeviceError, match="nowhere cannot be run"):
        ncu.find("nowhere")


def test_only_one_warm_launch_is_watched() -> None:
    """On the CPU, whose device has the same methods: the profiled range has one launch, no fill and no copy."""
    target = detect("cpu")
    workload = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3, dtype="float32")
    template = load_template("conv2d_cpu")
    code = compile_source(
        template.kernel(workload, target, template.default(workload, target, template.space(workload, target))), target
    ).artifact
    events: list[str] = []

    class Device:
        """The CPU, with a log of its calls."""

        def __init__(self) -> None:
            from schedsearch.device.cpu import CpuDevice

            self._device = CpuDevice(target)

        def __getattr__(self, name: str) -> Any:
            if name in ("copy_in", "fill", "allocate", "synchronize"):
                events.append(name)
            return getattr(self._device, name)

        def load(self, artifact: Any) -> Any:
            loaded = self._device.load(artifact)
            bind = loaded.bind

            def noted(buffers: Any, scalars: Any) -> Any:
                bound = bind(buffers, scalars)

                class Bound:
                    def launch(self, stream: int = 0) -> None:
                        events.append("launch")
                        bound.launch(stream)

                return Bound()

            return type("Loaded", (), {"bind": staticmethod(noted)})()

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        events.append("on")
        yield
        events.append("off")

    profile_target.launch_kernel(Device(), workload, code, watched)
    on, off = events.index("on"), events.index("off")
    assert events[on : off + 1] == ["on", "launch", "synchronize", "off"]
    assert events[:on].count("launch") >= 1 and events[on - 1] == "synchronize"
    assert events[off:] == ["off"]


def test_the_profiled_process_reads_its_request_and_says_in_a_line_why_it_cannot_run_it(tmp_path: Path) -> None:
    (tmp_path / "request").write_bytes(pickle.dumps(profile_target.Request(H200, conv(), artifact())))
    command = [sys.executable, "-P", "-m", "schedsearch.profiling.process", str(tmp_path / "request")]
    environment = child_environment(CUDA_VISIBLE_DEVICES="")  # no device, whether or not this machine has one
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


class TestCommand:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A workload file, records of its first task on an H200 that this machine pretends to have, and an ncu on PATH."""
        monkeypatch.chdir(tmp_path)
        isolate(tmp_path, monkeypatch)
        (tmp_path / "bin").mkdir()
        fake_ncu.write(tmp_path / "bin")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        found = {"cpu": detect("cpu")}
        monkeypatch.setattr("schedsearch.device.detect.detect", lambda selector: found.get(selector, H200))
        (tmp_path / "work.yaml").write_text(YAML)
        with Store.open(tmp_path / "records.db") as store:
            store.append(record(900.0, number=7))
            store.promote(store.append(record(number=8)), artifact())
        return tmp_path

    def test_figures_are_shown_kept_with_the_record_and_shown_again(self, folder: Path) -> None:
        result = schedsearch("profile", "work.yaml", "--task", 1)
        assert result.exit_code == 0, result.output
        for text in ("12.35 us", "71.2 %", "64.5 %", "18.0 %", "8,000", "3,402", "sm__warps_active", "caches flushed"):
            assert text in result.stdout, text
        with Store.open("records.db", readonly=True) as store:
            assert store.profiles(1) == []
            (kept,) = store.profiles(2)
        assert kept.figure("tensor_active_pct") == 71.25
        shown = schedsearch("records", "show", 2)
        assert "71.2 %" in shown.stdout and "ncu 2025.3.1.0" in shown.stdout

    def test_json_has_every_figure_and_where_it_comes_from(self, folder: Path) -> None:
        (one,) = json.loads(schedsearch("profile", "work.yaml", "--task", 1, "--json").stdout)
        assert (one["name"], one["record_id"], one["template"]) == ("one", 2, "conv2d_wgmma")
        (read,) = one["profiles"]
        assert read["all"]["dram_bytes"] == 42e6 and read["launches"][0]["occupancy_pct"] == 18.02
        assert read["sources"]["dram_bytes"] == ["dram__bytes_read.sum", "dram__bytes_write.sum"]
        assert json.loads(schedsearch("records", "show", 2, "--json").stdout)["profiles"] == [read]

    def test_a_peer_is_profiled_by_the_same_profiler(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch = ModuleType("torch")
        torch.__spec__ = ModuleSpec("torch", None)
        monkeypatch.setitem(sys.modules, "torch", torch)
        result = schedsearch("profile", "work.yaml", "--task", 1, "--peer", "torch")
        assert result.exit_code == 0, result.output
        assert "cudnn::nhwc_wgmma<half, (int)128>(float*)" in result.stdout
        with Store.open("records.db", readonly=True) as store:
            assert [kept.subject for kept in store.profiles(2)] == ["kernel", "torch"]

    def test_what_is_asked_of_the_profiled_process(self, folder: Path) -> None:
        schedsearch("profile", "work.yaml", "--task", 1)
        (command,) = fake_ncu.calls(folder / "bin")[-1:]
        assert command[-3:-1] == ["-m", "schedsearch.profiling.process"]
        assert not Path(command[-1]).exists(), "the request is removed"

    @pytest.mark.parametrize(
        ("arguments", "exit_code", "wanted"),
        [
            (["--target", "cpu"], 2, "profiling needs a CUDA device"),
            (["--task", "3"], 2, "there is no --task 3; the file has 2 tasks"),
            (["--peer", "tvm"], 2, "'tvm' is not 'torch'"),
            (["--ncu", "nowhere"], 3, "--ncu nowhere cannot be run"),
            (["--task", "2"], 4, "no record on NVIDIA H200 for two; make one: schedsearch tune work.yaml"),
            (["--task", "1", "--db", "nope.db"], 6, "no database at"),
        ],
        ids=["cpu", "task", "peer", "ncu", "record", "database"],
    )
    def test_mistakes_end_with_their_exit_code(self, arguments: list[str], exit_code: int, wanted: str) -> None:
        result = schedsearch("profile", "work.yaml", *arguments)
        assert (result.exit_code, len(result.stderr.splitlines())) == (exit_code, 1), result.output
        assert wanted in result.stderr

    def test_without_ncu_it_says_where_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("bin/ncu").unlink()
        monkeypatch.setattr(ncu, "_INSTALLED", ())
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.delenv("CUDA_PATH", raising=False)
        result = schedsearch("profile", "work.yaml", "--task", 1)
        assert result.exit_code == 3 and "no program ncu on PATH" in result.stderr

    def test_without_permission_nothing_is_kept(self, folder: Path) -> None:
        fake_ncu.write(folder / "bin", error="==ERROR== ERR_NVGPUCTRPERM - The user does not have permission")
        result = schedsearch("profile", "work.yaml", "--task", 1)
        assert result.exit_code == 3 and "ERR_NVGPUCTRPERM" in result.stderr
        with Store.open("records.db", readonly=True) as store:
            assert store.profiles(2) == []

    def test_an_operator_that_the_peer_does_not_compute_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(operator("conv2d")), "peers", {})
        result = schedsearch("profile", "work.yaml", "--task", 1, "--peer", "torch")
        assert result.exit_code == 2 and "'conv2d' cannot be run by 'torch'; allowed: none" in result.stderr

    def test_without_torch_a_peer_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        result = schedsearch("profile", "work.yaml", "--task", 1, "--peer", "torch")
        assert result.exit_code == 2 and "pip install 'schedsearch[torch]'" in result.stderr


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
@pytest.mark.skipif(shutil.which("ncu") is None, reason="needs Nsight Compute (ncu on PATH), which is not installed here")
def test_the_real_profiler_reads_a_tuned_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    (tmp_path / "work.yaml").write_text(
        "target: cuda\nbudget: {trials: 2}\ntuner: {name: random}\ntasks:\n"
        "  - {name: one, op: conv2d, shape: {n: 32, h: 56, w: 56, c: 64, k: 64, r: 3, s: 3}, padding: 1, dtype: float16}\n"
    )
    assert schedsearch("tune", "work.yaml").exit_code == 0
    result = schedsearch("profile", "work.yaml", "--json")
    if "ERR_NVGPUCTRPERM" in result.stderr:
        pytest.skip("this user may not read performance counters")
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)
    (read,) = one["profiles"]
    assert 0.2 < read["all"]["duration_ns"] / one["time_ns"] < 5
    assert 5 < read["all"]["tensor_active_pct"] <= 100 and 0 < read["all"]["occupancy_pct"] <= 100
    # at least, x is read once and y is written once, because the caches were flushed
    assert read["all"]["l2_bytes"] > 2 * 32 * 56 * 56 * 64 and read["all"]["dram_bytes"] > 32 * 56 * 56 * 64
