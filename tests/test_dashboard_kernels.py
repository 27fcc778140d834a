"""The kernels of trials, described again from records: occupancy, PTX, and why there is none."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dashboard_support import A100, H200, SMALL, a_trial

from schedsearch.cli.main import main
from schedsearch.config import Config
from schedsearch.dashboard import kernels
from schedsearch.dashboard.answers import Answers
from schedsearch.dashboard.kernels import Kernels, NoKernelError, occupancy, target_of
from schedsearch.errors import UsageError
from schedsearch.launch import Grid, Int32
from schedsearch.measurement import Resources
from schedsearch.records.rows import RecordRow
from schedsearch.records.store import Store
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.workload import Workload

CPU = Target("cpu", "some CPU", sms=8, simd_bits=512)


class Tiny(Template):
    """A kernel that does nothing, by a choice of threads."""

    name = "tiny"
    version = 1
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        return None if target.compute_capability >= (9, 0) else "it needs Hopper"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        threads = Knob("threads", (64, 128, 512), "threads of a block")
        return ConfigSpace((threads,), (Constraint("threads are at most 128", lambda c: c["threads"] <= 128),))

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(threads=64)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        def nothing(n: int) -> None:
            pass

        return KernelSource("cuda", "native", (KernelStep(nothing, (Int32(1),), Grid(1), config["threads"]),))


class Broken(Tiny):
    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        raise ZeroDivisionError("oops")


class Newer(Tiny):
    version = 2


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Template], None]:
    return lambda template: monkeypatch.setattr(kernels, "load_template", lambda name: template)


def stored(path: Path, target: str = H200, threads: int = 128, **changes: Any) -> RecordRow:
    """A record of `Tiny` in a database of its own."""
    record = a_trial(SMALL, target, "tiny", Config(tile=64, stages=2, vector=False, order="row"), random.Random(0), 1.0)
    with Store.open(path) as store:
        return store.row(store.append(replace(record, config=Config(threads=threads), **changes)))


class TestOccupancy:
    @pytest.mark.parametrize(
        ("threads", "registers", "shared_bytes", "blocks", "share"),
        [
            (256, 32, 0, 8, 1.0),  # 2,048 threads
            (256, 128, 0, 2, 0.25),  # 65,536 registers / (128 * 256)
            (384, 168, 0, 1, 0.1875),
            (256, 33, 0, 6, 0.75),  # a warp gets 5 * 256 registers for its 33 * 32
            (128, 32, 100 << 10, 2, 0.125),  # 228 KiB hold two blocks of 100 + 1 KiB
            (128, 32, 227 << 10, 1, 0.0625),
            (33, 16, 0, 32, 1.0),  # 33 threads take two warps, and 32 blocks are the most
            (1024, 64, 0, 1, 0.5),
        ],
    )
    def test_of_an_h200(self, threads: int, registers: int, shared_bytes: int, blocks: int, share: float) -> None:
        found = occupancy(threads, Resources(registers, shared_bytes), PRESETS["h200"])
        assert (found.blocks_per_sm, found.share, found.block_threads) == (blocks, share, threads)

    @pytest.mark.parametrize(
        ("threads", "registers", "target", "why"),
        [
            (128, 0, PRESETS["h200"], "was not built"),
            (0, 32, PRESETS["h200"], "was not built"),
            (128, 32, CPU, "a CPU has no multiprocessors"),
            (128, 32, replace(PRESETS["h200"], threads_per_sm=0), "limits of the device are not known"),
        ],
    )
    def test_why_it_is_not_known(self, threads: int, registers: int, target: Target, why: str) -> None:
        with pytest.raises(NoKernelError, match=why):
            occupancy(threads, Resources(registers), target)


class TestTarget:
    def test_the_run_describes_the_device(self, tmp_path: Path) -> None:
        record = stored(tmp_path / "a.db", "cuda:sm_90:7:Some GPU", run="r2")
        device = replace(PRESETS["h200"], name="Some GPU", sms=7)
        other = {"id": "r1", "info": {"device": replace(device, threads_per_sm=1).facts()}}
        own = {"id": "r2", "info": {"device": {**device.facts(), "compute_capability": [9, 0]}}}
        assert target_of(record, [other, own]) == device

    def test_a_run_of_an_older_version_names_no_host(self, tmp_path: Path) -> None:
        record = stored(tmp_path / "a.db", "cuda:sm_90:7:Some GPU", run="r")
        device = replace(PRESETS["h200"], name="Some GPU", sms=7)
        facts = {name: value for name, value in device.facts().items() if name != "host"}
        info = {"device": {**facts, "compute_capability": [9, 0]}}
        assert target_of(record, [{"id": "r", "info": info}]) == device

    def test_without_a_run_the_data_sheets_do(self, tmp_path: Path) -> None:
        assert target_of(stored(tmp_path / "a.db", A100), []) == PRESETS["a100"]

    @pytest.mark.parametrize(
        "info",
        [None, {}, {"device": []}, {"device": {"name": "Some GPU"}},
         {"device": {**PRESETS["h200"].facts(), "name": "Some GPU", "sms": "7"}},
         {"device": {**PRESETS["h200"].facts(), "compute_capability": ["9", None]}},
         {"device": PRESETS["h200"].facts()}],
    )  # fmt: skip
    def test_an_unknown_device(self, tmp_path: Path, info: Any) -> None:
        record = stored(tmp_path / "a.db", "cuda:sm_90:7:Some GPU", run="r")
        with pytest.raises(NoKernelError, match="does not say what the device can hold"):
            target_of(record, [{"id": "r", "info": info}])


class TestSource:
    def test_the_template_describes_it(self, tmp_path: Path, install: Callable[[Template], None]) -> None:
        install(Tiny())
        source = Kernels().source(stored(tmp_path / "a.db"), PRESETS["h200"])
        assert [step.block_threads for step in source.steps] == [128]

    @pytest.mark.parametrize(
        ("template", "target", "threads", "why"),
        [
            (Newer(), "h200", 128, "version 1 of tiny made the kernel, and version 2 is installed"),
            (Tiny(), "h200", 512, "the configuration is not legal here: .*threads are at most 128"),
            (Tiny(), "h200", 96, "the configuration is not legal here"),
            (Tiny(), "a100", 128, "tiny does not run the workload here: it needs Hopper"),
            (Broken(), "h200", 128, "tiny cannot describe the kernel: ZeroDivisionError: oops"),
        ],
    )
    def test_why_it_cannot(
        self, tmp_path: Path, install: Callable[[Template], None], template: Template, target: str, threads: int, why: str
    ) -> None:
        install(template)
        known = Kernels()
        record = stored(tmp_path / "a.db", threads=threads)
        for _ in range(2):  # the second answer is a kept one
            with pytest.raises(NoKernelError, match=why):
                known.source(record, PRESETS[target])

    def test_a_template_that_is_not_installed(self, tmp_path: Path) -> None:
        with pytest.raises(NoKernelError, match="no template 'tiny'"):
            Kernels().source(stored(tmp_path / "a.db"), PRESETS["h200"])


def test_the_page_of_a_trial_has_the_occupancy_though_no_code_is_stored(
    tmp_path: Path, install: Callable[[Template], None]
) -> None:
    install(Tiny())
    row = stored(tmp_path / "a.db")  # 96 + 64 / 4 = 112 registers, 32 KiB
    answers = Answers([str(tmp_path / "a.db")])
    answers.refresh()
    trial = answers.get(f"trial/0.{row.id}")
    answers.close()
    assert (trial["plan"], trial["block_threads"]) == (None, 128)
    assert (trial["blocks_per_sm"], trial["occupancy"]) == (4, 0.25)  # 65,536 registers / (112 * 128)
    assert any(each["command"] == f"schedsearch records ptx {row.id} --db {tmp_path / 'a.db'}" for each in trial["commands"])


def test_the_page_of_a_trial_says_why_its_occupancy_is_not_known(tmp_path: Path) -> None:
    row = stored(tmp_path / "a.db")
    answers = Answers([str(tmp_path / "a.db")])
    answers.refresh()
    trial = answers.get(f"trial/0.{row.id}")
    answers.close()
    assert (trial["occupancy"], trial["blocks_per_sm"], trial["block_threads"]) == (None, None, None)
    assert trial["occupancy_note"].startswith("no template 'tiny'")
    assert not any("ptx" in each["command"] for each in trial["commands"])


class TestPtx:
    def test_the_command_compiles_it(self, tmp_path: Path, install: Callable[[Template], None]) -> None:
        install(Tiny())
        row = stored(tmp_path / "a.db", toolchain={"numba-cuda": "0.1"})
        result = CliRunner().invoke(main, ["records", "ptx", str(row.id), "--db", str(tmp_path / "a.db")])
        assert result.exit_code == 0, result.output
        assert ".target sm_90" in result.stdout and ".visible .entry kernel_0" in result.stdout
        assert ".maxntid 128" in result.stdout
        assert "made by other versions" in result.stderr and "numba-cuda 0.1 (now " in result.stderr

    def test_a_record_that_cannot_be_built_here(self, tmp_path: Path) -> None:
        row = stored(tmp_path / "a.db")
        result = CliRunner().invoke(main, ["records", "ptx", str(row.id), "--db", str(tmp_path / "a.db")])
        assert result.exit_code == 1 and "no template 'tiny'" in result.output

    def test_a_kernel_of_a_cpu_has_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        source = KernelSource("cpu", "native", ())
        monkeypatch.setattr(Kernels, "source", lambda self, record, target: source)
        with pytest.raises(NoKernelError, match="a kernel of kind cpu has no PTX"):
            kernels.ptx(stored(tmp_path / "a.db"), CPU)


def test_an_installed_template_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Template:
        raise UsageError("the package that offers it cannot be imported")

    monkeypatch.setattr(kernels, "load_template", fails)
    with pytest.raises(NoKernelError, match="cannot be imported"):
        Kernels().source(stored(tmp_path / "a.db"), PRESETS["h200"])
