"""Racing what others measured: what a refusal leaves behind. The races themselves are in test_shared_records.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from records_support import record

from schedsearch.device.detect import detect
from schedsearch.measure import admission
from schedsearch.measurement import COLD_GRAPH, Anchor, Measurement, Outcome
from schedsearch.records.entries import imported
from schedsearch.records.store import Store
from schedsearch.template import load_template
from schedsearch.workload import Workload

CPU = detect("cpu")
TINY = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3, dtype="float32")


class Nothing:
    """A runner that never gets a kernel, and a builder that builds none."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, candidate: object) -> None:
        pass

    def drain(self) -> list[tuple[int, Measurement]]:
        return [(0, Measurement(Outcome.COMPILE_ERROR, message="no such instruction\nline 7"))]


def test_what_does_not_build_here_is_refused_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "Runner", Nothing)
    monkeypatch.setattr(admission, "Builder", Nothing)
    template = load_template("conv2d_cpu")
    default = template.default(TINY, CPU, template.space(TINY, CPU))
    made = record(
        workload=TINY, target=CPU.key, template=template.name, template_version=template.version, config=default,
        anchor=Anchor("c0de", 4000.0), final_race=True,
    )  # fmt: skip
    with Store.open(tmp_path / "own.db") as store:
        store.append(replace(made, source="file of Mallory"))
        (verdict,) = admission.admit(store, CPU)
        assert (verdict.verdict, verdict.reason) == ("refused", "compile_error: no such instruction")
        assert [row.measurement.outcome for row in store.rows() if not row.source] == [Outcome.COMPILE_ERROR]
        assert list(imported(store, CPU.key, COLD_GRAPH)) == []  # so that another file's entry has its turn
        assert list(admission.admit(store, CPU)) == [] and list(store.bests()) == []
