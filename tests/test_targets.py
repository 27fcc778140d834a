"""Architectures by name, the cards of `PRESETS`, and that the spaces of templates respect what a card has."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedsearch import Workload, load_templates
from schedsearch.device.detect import detect
from schedsearch.errors import UsageError
from schedsearch.launch import MAX_BLOCK_THREADS
from schedsearch.space import ConfigSpace
from schedsearch.target import PRESETS, Architecture
from schedsearch.template import KernelSource, Template

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import targets as table

SINCE_HOPPER = re.compile(r"wgmma|tcgen05|mbarrier|cp\.async\.bulk|griddepcontrol|setmaxnreg|cluster|fence\.proxy|stmatrix")
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": shared KiB of a block, of a multiprocessor,
# threads of a multiprocessor.
LIMITS = {
    (8, 0): (163, 164, 2048),
    (8, 9): (99, 100, 1536),
    (9, 0): (227, 228, 2048),
    (10, 0): (227, 228, 2048),
    (10, 3): (227, 228, 2048),
    (12, 0): (99, 100, 1536),
}


@pytest.mark.parametrize(
    ("text", "runs", "runs_not"),
    [
        ("sm_80", [(8, 0), (8, 9)], [(9, 0), (7, 5)]),
        ("sm_90a", [(9, 0)], [(9, 1), (10, 0)]),
        ("sm_100", [(10, 0), (10, 3)], [(12, 0), (11, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(9, 0), (11, 0)]),
        ("sm_103f", [(10, 3)], [(10, 0)]),
        ("sm_103a", [(10, 3)], [(10, 0), (10, 4)]),
        ("sm_120f", [(12, 0), (12, 1)], [(10, 0)]),
    ],
)
def test_code_runs_on_later_cards_of_its_generation_unless_it_is_for_one_only(
    text: str, runs: list[tuple[int, int]], runs_not: list[tuple[int, int]]
) -> None:
    architecture = Architecture.parse(text)
    assert str(architecture) == text
    assert all(map(architecture.runs_on, runs)) and not any(map(architecture.runs_on, runs_not))


@pytest.mark.parametrize("text", ["", "90a", "sm_9", "sm_80a", "sm_90f", "sm_90b", "sm_120fa", "sm_٩٠", "native"])
def test_a_text_that_names_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"does not exist; allowed: sm_.*as sm_90a and sm_120f"):
        Architecture.parse(text)
    assert not PRESETS["h200"].runs(text)


def test_every_card_has_the_limits_of_its_compute_capability() -> None:
    assert set(PRESETS) == {"h100", "h200", "a100", "l4", "rtx4090", "rtx5090", "b200", "gb300"}
    for card in PRESETS.values():
        block, whole, threads = LIMITS[card.compute_capability]
        found = card.shared_bytes_per_block, card.shared_bytes_per_sm, card.threads_per_sm, card.registers_per_sm
        assert found == (block << 10, whole << 10, threads, 65536), card.name


def test_an_unknown_card_is_named_with_the_ones_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"'rtx5080' is not known \(did you mean 'rtx5090'\?\); allowed: .*h200.*gb300"):
        detect("rtx5080", presets=True)
    with pytest.raises(UsageError, match=r"'gpu' is not known \(did you mean 'cuda'\?\); allowed: auto, cpu, cuda, cuda:N$"):
        detect("gpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sm_120f", r"is an architecture, not a device \(cards that run its code: rtx5090\); allowed: .*"),
        ("sm_90a", r"is an architecture, not a device \(cards that run its code: h100, h200\); allowed: .*"),
        ("sm_75", r"is an architecture, not a device; allowed: .*"),
    ],
)
def test_an_architecture_is_no_device_but_its_cards_are(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"'{text}' {said}") as raised:
        detect(text, presets=True)
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match=r"is an architecture, not a device; allowed: auto, cpu, cuda, cuda:N$"):
        detect(text)


@functools.cache
def workloads() -> dict[str, list[Any]]:
    return table.workloads()


def registers_of_blocks(space: ConfigSpace, rows: Any) -> Any:
    """Registers of the threads of a block by the space's own estimate; zeros if it has none. A feature of a quantity is its
    log2(1 + value)."""
    names = list(space.feature_names)
    if not {"registers", "threads"} <= set(space.derived):
        return np.zeros(len(rows))
    of_thread, threads = (
        np.rint(2.0 ** space.encode(rows)[:, names.index(name)].astype(float) - 1) for name in ("registers", "threads")
    )
    return of_thread * threads


def some_source(template: Template, preset: str, seed: int) -> KernelSource | None:
    """The kernel of a configuration from the template's space on a card; None if it refuses the card. Of more configurations
    it checks the registers, and of the default that the space has it."""
    target = PRESETS[preset]
    workload = Workload.from_json(json.dumps(workloads()[template.name][0]))
    if template.validate(workload, target):
        return None
    space = template.space(workload, target)
    rows = space.sample_indices(8, np.random.default_rng(seed))
    assert registers_of_blocks(space, rows).max() <= target.registers_per_sm, template.name
    assert space.check(template.default(workload, target, space)) == [], template.name
    return template.kernel(workload, target, space.configs(rows[:1])[0])


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.mostly_long(8)
def test_spaces_hold_what_a_card_can_launch_only(preset: str) -> None:
    target, launched = PRESETS[preset], 0
    for name in workloads():
        template = load_templates([name])[name]
        source = some_source(template, preset, seed=1)
        if source is None:
            continue
        assert source.arch == "native" or target.runs(source.arch), name
        for step in source.steps:
            assert step.dynamic_shared_bytes <= target.shared_bytes_per_block, name
            assert 1 <= step.block_threads <= MAX_BLOCK_THREADS, name
            assert step.min_blocks_per_sm * step.block_threads <= target.threads_per_sm, name
            launched += 1
    assert launched > len(workloads()) // 2


@pytest.mark.parametrize(("name", "preset"), [("conv2d_mma", "a100")])
def test_kernels_for_cards_before_hopper_have_none_of_its_instructions(name: str, preset: str) -> None:
    pytest.importorskip("numba_cuda", reason="needs numba-cuda: install the extra cu12 or cu13")
    from schedsearch.backend.cuda import ptx_of

    source = some_source(load_templates([name])[name], preset, seed=0)
    assert source is not None
    text = "\n".join(ptx_of(source, PRESETS[preset]))
    assert "cp.async.c" in text and "ldmatrix" in text and not SINCE_HOPPER.search(text)
