"""`records export --c`: which kernels are written, and what happens to files that are there already."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from c_export_support import (
    CONV,
    add,
    conv_artifact,
)

from schedsearch.c_export import export_c
from schedsearch.c_export.text import parameter_names
from schedsearch.errors import DatabaseError, NoRecordError, UnsupportedError, UsageError
from schedsearch.identity import sha256_hex
from schedsearch.records import output, trust
from schedsearch.records.store import Store


def test_only_verified_and_trusted_gpu_kernels_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [CONV.replace(n=n) for n in (3, 4, 5, 6)]
    with Store.open(tmp_path / "mixed.db") as store:
        add(store, CONV, conv_artifact())
        add(store, others[0], conv_artifact(), verified=False)
        add(store, others[1], None)
        add(store, others[2], conv_artifact(), target="cpu:512:2:a CPU")
        monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "another machine"))
        add(store, others[3], conv_artifact())
        monkeypatch.undo()
        exported = export_c(store, tmp_path / "kernels")
        assert [each.workload for each in exported.kernels] == [CONV]
        reasons = {each.workload_id: each.reason for each in exported.left_out}
        assert list(reasons) and all(
            words in reasons[workload.id]
            for workload, words in zip(others, ("never verified", "no machine code", "for a CPU", "did not sign"))
        )
        with pytest.raises(UnsupportedError, match=r"has no kernel that can be exported.*this machine did not sign"):
            export_c(store, tmp_path / "none", workloads=[others[3].id])
        with pytest.raises(NoRecordError, match="has no best record of 'conv3d'"):
            export_c(store, tmp_path / "none", workloads=["conv3d"])
        assert not (tmp_path / "none").exists()
        trust.trust(tmp_path / "mixed.db")
        (marked,) = export_c(store, tmp_path / "kernels", workloads=[others[3].label]).kernels
    manifest = json.loads((tmp_path / "kernels" / "MANIFEST.json").read_text())
    assert manifest["kernels"][0]["trust"].startswith("marked as trusted by the user of machine")
    assert {path.stem for path in (tmp_path / "kernels").glob("conv2d*")} == {marked.name}  # the first export's are gone


def test_files_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "Makefile").write_text("all:\n")
    with Store.open(tmp_path / "records.db") as store:
        add(store, CONV, conv_artifact())
        with pytest.raises(UsageError, match=r"Makefile exists and is not of an earlier export, so it is left alone"):
            export_c(store, folder)
        assert [path.name for path in folder.iterdir()] == ["Makefile"]
        (folder / "Makefile").rename(folder / "notes.txt")
        export_c(store, folder)
        export_c(store, folder)
        (folder / "MANIFEST.json").write_text('{"files": ["../records.db"]}')
        with pytest.raises(DatabaseError, match="is not the manifest of an export"):
            export_c(store, folder)
    assert (folder / "notes.txt").read_text() == "all:\n"


def test_an_export_that_was_interrupted_is_replaced_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []

    def new_file(path: Path) -> Any:
        if len(written) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        return output.new_file(path)

    with Store.open(tmp_path / "records.db") as store:
        add(store, CONV, conv_artifact())
        with monkeypatch.context() as patch:
            patch.setattr("schedsearch.c_export.folder.new_file", new_file)
            with pytest.raises(UsageError, match="No space left on device"):
                export_c(store, tmp_path / "kernels")
        assert len(list((tmp_path / "kernels").iterdir())) == 4
        export_c(store, tmp_path / "kernels")
    manifest = json.loads((tmp_path / "kernels" / "MANIFEST.json").read_text())
    for name, digest in manifest["files"].items():
        assert sha256_hex((tmp_path / "kernels" / name).read_bytes()) == digest


def test_a_file_of_an_earlier_export_that_was_changed_stays(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    with Store.open(tmp_path / "records.db") as store:
        add(store, CONV, conv_artifact())
        add(store, CONV.replace(n=3), conv_artifact())
        both = export_c(store, folder)
        first, second = (
            next(path for path in folder.glob(f"{each.name}.c"))
            for each in sorted(both.kernels, key=lambda k: k.workload != CONV)
        )
        second.write_text("work of the user")
        export_c(store, folder, workloads=[CONV.id])
    assert second.read_text() == "work of the user" and first.exists()
    assert not second.with_suffix(".h").exists()


def test_names_of_arguments_become_names_of_c() -> None:
    names = ["x", "int", "register", "été", "_private", "NULL", "stream", "x y", "x_y"]
    made = parameter_names(names, ("stream",))
    assert made == ["x", "int_", "register_", "a_t_", "a_private", "NULL_", "stream_", "x_y", "x_y_"]
    assert len(set(parameter_names(["a", "a", "a_"], ()))) == 3
