"""What kernels of `schedsearch.tunable` are compared with: their reference, or their default configuration."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import schedsearch as command
from numba import cuda
from own_kernels_support import declared

import schedsearch
from schedsearch.backend import compile_source
from schedsearch.dashboard.answers import Answers
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import OperatorError, UsageError
from schedsearch.measure import Built, Runner
from schedsearch.ops.own_kernel import OWN_KERNEL
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.verification.reference import CheckedReference
from schedsearch.verification.verify import verify_once


def test_integers_are_drawn_from_the_range_of_the_given_arrays() -> None:
    def take(x, at, y, *, per):  # type: ignore[no-untyped-def]
        i = cuda.grid(1) * per
        if i < at.size:
            y[i] = x[at[i]]

    kernel = declared(take, grid=lambda at, k: -(-at.size // k.threads), reference=lambda x, at: x[at])
    x, at = np.zeros(50, np.float32), np.array([3, 49, 7], np.int32)
    with pytest.raises(UsageError, match="target"):
        kernel.tune(x, at, np.zeros(3, np.float32), target="a toaster", trials=1)
    workload = kernel.workload(x, at, np.zeros(3, np.float32))
    assert workload.definition.check_inputs(workload.params)["at"].values == range(3, 50)
    assert workload.signature[1].below == 50  # the timing's numbers lie in [0, 50)


def test_an_undeclared_write_is_found_without_the_source(tmp_path: Path) -> None:
    scope = {"cuda": cuda}
    exec("def spoil(x, y):\n    i = cuda.grid(1)\n    if i < x.size:\n        y[i] = 2 * x[i]\n        x[i] = 0", scope)
    kernel = declared(
        scope["spoil"], knobs={"threads": (64,)}, grid=lambda x, k: -(-x.size // k.threads), reference=lambda x: 2 * x,
        db=tmp_path / "a.db",
    )  # fmt: skip
    x = np.ones(100, np.float32)
    with pytest.raises(schedsearch.errors.WrongResultError, match="changed, the first in argument 'x'"):
        kernel(x, np.empty_like(x))
    np.testing.assert_array_equal(x, 1)


@pytest.mark.long
def test_records_of_an_unknown_source_are_passed_over_when_records_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.dashboard.answers import Answers
    from schedsearch.measure.recheck import recheck
    from schedsearch.records.store import Store
    from schedsearch.templates.own_kernel.definition import DEFINITIONS

    kernel = declared(db=tmp_path / "own.db")
    kernel.tune("64:float32", "64:float32", target="cpu", trials=1)
    with contextlib.closing(Answers([str(tmp_path / "own.db")])) as answers:  # a workload file cannot name the kernel
        answers.refresh()
        assert not [each for each in answers.get("trial/0.1")["commands"] if "schedsearch tune" in each["command"]]
    code = kernel.definition.code
    monkeypatch.delitem(DEFINITIONS, code)
    monkeypatch.delitem(OWN_KERNEL.sources, code)
    notes: list[str] = []
    with Store.open(tmp_path / "own.db", create=False) as store:
        assert list(recheck(store, schedsearch.detect("cpu"), on_skip=notes.append)) == []
    assert len(notes) == 1
    assert "is not verified" in notes[0] and "import the module that defines it" in notes[0]


@pytest.mark.parametrize(
    ("reference", "said"), [("given", False), (None, True)], ids=["with a reference", "without a reference"]
)
@pytest.mark.mostly_long(2)
def test_what_shows_records_says_that_a_kernel_was_compared_with_itself(
    tmp_path: Path, reference: str | None, said: bool
) -> None:
    db, x = tmp_path / "own.db", np.ones(64, np.float32)
    changes: dict[str, Any] = {} if reference else {"reference": None}
    kernel = declared(db=db, **changes)
    summary = kernel.tune(x, np.zeros_like(x), trials=1, workers=1)
    words = "compared with its own first run, no reference was given"
    shown = [command("records", *arguments, "--db", db).stdout for arguments in (("list",), ("show", "1"))]
    shown.append(summary._repr_html_())
    with contextlib.closing(Answers([str(db)])) as answers:
        answers.refresh()
        (task,) = answers.get("overview")["tasks"]
        shown += [json.dumps(answers.get(path)) for path in (f"task/{task['key']}", f"trial/{task['database']}.1")]
    assert [words in text for text in shown] == [said] * len(shown)


def test_without_a_reference_the_default_configuration_is_the_truth() -> None:
    def wrong_for_four(x, y, *, per):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] + (1 if per == 4 else 0)

    knobs = {"threads": (64,), "per": (1, 2, 4)}
    kernel = declared(wrong_for_four, knobs=knobs, grid=lambda x, k: -(-x.size // k.threads), reference=None)
    workload, template = kernel.workload("1000:float32", "1000:float32"), load_template("own_kernel_cpu")
    assert workload.verified_by == "default"
    with contextlib.closing(open_device(detect("cpu"))) as device:
        for per, right in ((1, True), (2, True), (4, False)):
            source = template.kernel(workload, device.target, schedsearch.Config(threads=64, per=per))
            with contextlib.closing(device.load(compile_source(source, device.target).artifact)) as loaded:
                assert (verify_once(device, workload, loaded) is None) == right


@pytest.mark.parametrize(
    ("reference", "word"),
    [
        (lambda x: x[:-1], r"shape \(63,\) for y; allowed: \(64,\)"),
        (lambda x: (x, x), "2 arrays; allowed: 1"),
        (lambda x: x * 1j, "complex128 for y"),
        (lambda x: x / {}, "TypeError"),
    ],
)
def test_a_wrong_reference_is_reported_as_such(reference: Any, word: str) -> None:
    workload = declared(reference=reference).workload("64:float32", "64:float32")
    arrays = {"x": np.zeros(64, np.float32)}
    with pytest.raises(OperatorError, match=f"{word}.*correct `reference=` of the decorator"):
        CheckedReference(workload).whole(arrays, {}, lambda source: {}, PRESETS["h200"])


def test_a_right_candidate_does_not_cost_its_process() -> None:
    """Worker threads count as a change of the process if a candidate is the first to need them."""
    workload, template, target = (
        declared().workload("64:float32", "64:float32"),
        load_template("own_kernel_cpu"),
        detect("cpu"),
    )
    result = compile_source(template.kernel(workload, target, schedsearch.Config(threads=64, per=1)), target)
    with Runner(target) as runner:
        built = Built(result.artifact, result.resources, result.canonical_hash, result.compile_s)
        assert runner.measure(workload, built).ok
        assert runner.restarts == 0
