"""What files of other formats may hold: commands that read them, and figures that cannot be believed."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import replay_support as support
from cli_support import schedsearch, start
from exchange_support import FORMATS, records

from schedsearch.config import Config
from schedsearch.errors import UsageError
from schedsearch.records.formats import autotvm, content, kernel_tuner, t4
from schedsearch.records.formats.content import Content
from schedsearch.records.formats.exchange import import_file
from schedsearch.records.formats.recording import Place, parse_json, read_json
from schedsearch.records.store import Store


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "records.db") as store:
        for one in records():
            store.append(one)
        yield store


class TestCommands:
    @pytest.mark.parametrize("form", ["jsonl", *FORMATS])
    def test_a_pipe_is_read_once(self, tmp_path: Path, store: Store, form: str) -> None:
        """As in `schedsearch records import <(ssh host cat records.jsonl.gz)`."""
        options = ("--db", tmp_path / "records.db", "--format", form)
        assert schedsearch("records", "export", tmp_path / "out.gz", *options).exit_code == 0
        packed = (tmp_path / "out.gz").read_bytes()
        assert gzip.decompress(packed).startswith(b"{")
        os.mkfifo(tmp_path / "pipe")
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(packed,))
        writer.start()
        with Store.open(tmp_path / "copy.db") as copy:
            t1 = tmp_path / "out_T1.json" if form == "t4" else None
            assert import_file(copy, tmp_path / "pipe", t1=t1).records_added == 10
        writer.join()

    def test_there_and_back(self, store: Store, tmp_path: Path) -> None:
        db, out = tmp_path / "records.db", tmp_path / "out.json.gz"
        result = schedsearch("records", "export", out, "--db", db, "--format", "t4", "--json")
        assert json.loads(result.stdout)["records"] == 10 and (tmp_path / "out_T1.json").exists()
        assert gzip.decompress(out.read_bytes()).startswith(b'{"results"')
        result = schedsearch("records", "import", out, "--db", tmp_path / "copy.db", "--json")
        assert json.loads(result.stdout)["records_added"] == 10
        listed = schedsearch("records", "list", "--db", tmp_path / "copy.db", "--failed")
        assert "wrong_answer" in listed.stdout

    def test_a_foreign_file_is_listed_and_replayed_from_the_database(self, tmp_path: Path, shared: Path) -> None:
        db = tmp_path / "foreign.db"
        path = shared / "replay" / "pnpoly_RTX_3090.json.gz"
        result = schedsearch("records", "import", path, "--db", db, "--format", "kernel-tuner", "--json")
        assert json.loads(result.stdout)["records_added"] == 4092
        assert "cn_pnpoly" in schedsearch("records", "list", "--db", db, "--limit", "3").stdout
        failed = schedsearch("records", "list", "--db", db, "--failed", "--limit", "9999", "--json")
        assert len(json.loads(failed.stdout)) == 318
        options = ("--tuner", "random", "--seeds", "1", "--evaluations", "50", "--json")
        result = schedsearch("replay", db, *options)
        space = json.loads(result.stdout)["spaces"][0]
        assert (space["configurations"], space["valid"]) == (4092, 3774)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--format", "t4", "--artifacts"), "has no place for machine code"),
            (("--format", "t4", "--deploy"), "not for --deploy"),
            (("--template", "x"), "need the format of another tuner"),
            (("--format", "csv"), "'csv' is not one of"),
        ],
    )
    def test_mistakes(self, store: Store, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
        result = schedsearch("records", "export", tmp_path / "out", "--db", tmp_path / "records.db", *options)
        assert result.exit_code == 2 and message in result.stderr

    def test_control_characters_of_a_foreign_file_do_not_reach_the_terminal(self, tmp_path: Path) -> None:
        data = {**support.cache(), "kernel_name": "line\nbreak \x1b[31mred"}
        with Store.open(tmp_path / "foreign.db") as store:
            import_file(store, support.write(tmp_path / "some.json", data))
        listed = schedsearch("records", "list", "--db", tmp_path / "foreign.db")
        assert len(listed.stdout.splitlines()) == 2 + 18 and "\x1b" not in listed.stdout
        assert r"line\nbreak \x1b[31mred" in listed.stdout

    @pytest.mark.parametrize("more", [(), ("--json",)])
    def test_records_in_standard_output_are_alone_there(self, store: Store, tmp_path: Path, more: tuple[str, ...]) -> None:
        process = start("records", "export", "/dev/stdout", "--db", "records.db", *more, cwd=tmp_path)
        out, err = process.communicate(timeout=60)
        kinds = [json.loads(line)["kind"] for line in out.splitlines()]
        assert process.returncode == 0 and kinds == ["header", *["record"] * 10] and "/dev/stdout" in err

    def test_t4_results_need_room_for_their_description(self, store: Store, tmp_path: Path) -> None:
        db = ("--db", tmp_path / "records.db", "--format", "t4")
        os.mkfifo(tmp_path / "pipe")
        result = schedsearch("records", "export", tmp_path / "pipe", *db)
        assert result.exit_code == 2 and "T4 results are two files" in result.stderr
        theirs = support.write(tmp_path / "some_T1.json", support.t1("bx > 0"))
        before = theirs.read_bytes()
        result = schedsearch("records", "export", tmp_path / "some_T4.json", *db)
        assert result.exit_code == 2 and "description with conditions" in result.stderr
        assert theirs.read_bytes() == before and not (tmp_path / "some_T4.json").exists()
        for _ in range(2):  # a description that an export made may be replaced
            assert schedsearch("records", "export", tmp_path / "other_T4.json", *db).exit_code == 0

    def test_a_description_for_a_format_that_needs_none_is_a_mistake(self, tmp_path: Path) -> None:
        """Nothing would check the conditions of the description."""
        t1 = support.write(tmp_path / "some_T1.json", support.t1("bx > 16"))
        path = support.write(tmp_path / "some.json", support.cache())
        result = schedsearch("records", "import", path, "--t1", t1, "--db", tmp_path / "new.db")
        assert result.exit_code == 2 and "kernel-tuner needs no T1 description" in result.stderr
        assert not (tmp_path / "new.db").exists()

    def test_a_wrong_file_makes_no_database(self, tmp_path: Path) -> None:
        result = schedsearch("records", "import", support.write(tmp_path / "x", "{"), "--db", tmp_path / "new.db")
        assert result.exit_code == 2 and not (tmp_path / "new.db").exists()


def test_descriptions_are_found_by_the_longest_name(tmp_path: Path) -> None:
    for name in ("conv_T1.json", "conv_A100_T1.json", "gemm_T1.json"):
        support.write(tmp_path / name, support.t1())
    assert t4.description_of(tmp_path / "conv_A100_T4.json.gz").name == "conv_A100_T1.json"
    assert t4.description_of(tmp_path / "conv_W6600_T4.json").name == "conv_T1.json"
    assert t4.description_of(tmp_path / "conv.json").name == "conv_T1.json"


class TestContent:
    """Files that are too large, damaged or made to exhaust memory are refused, after reading little of them."""

    def lines(self, path: Path) -> list[bytes]:
        with Content(path) as content:
            return list(content.lines())

    def refused(self, path: Path) -> str:
        with pytest.raises(UsageError) as caught:
            self.lines(path)
        assert str(path) in str(caught.value)
        return str(caught.value).removeprefix(f"{path}")

    @pytest.mark.parametrize(
        "text", [b"", b"a", b"a\n", b"\n\na\n\nb", b"a\r\nb", b"x" * 70_000 + b"\n" + b"y" * 140_000 + b"\nz"]
    )
    @pytest.mark.parametrize(
        "pack", [bytes, gzip.compress, lambda text: gzip.compress(text[:5]) + gzip.compress(text[5:]) + b"\0" * 99]
    )
    def test_lines_are_those_of_the_unpacked_text(self, tmp_path: Path, text: bytes, pack: Any) -> None:
        (tmp_path / "file").write_bytes(pack(text))
        assert self.lines(tmp_path / "file") == text.removesuffix(b"\n").split(b"\n") if text else [b""]
        with Content(tmp_path / "file") as content:
            assert content.first_line() == text.lstrip().partition(b"\n")[0]
            assert content.document() == text, "looking at the first line removes nothing"

    def test_a_line_without_an_end(self) -> None:
        assert self.refused(Path("/dev/zero")) == ":1: the line is longer than 16 MiB, the limit; split it"

    def test_a_document_without_an_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UsageError, match=r"/dev/zero: holds more than 64 MiB.*SCHEDSEARCH_MAX_DOCUMENT_MIB=N"):
            read_json("/dev/zero")
        monkeypatch.setenv("SCHEDSEARCH_MAX_DOCUMENT_MIB", "2")
        with pytest.raises(UsageError, match="/dev/zero: holds more than 2 MiB"):
            read_json("/dev/zero")
        monkeypatch.setenv("SCHEDSEARCH_MAX_DOCUMENT_MIB", "many")
        with pytest.raises(UsageError, match="SCHEDSEARCH_MAX_DOCUMENT_MIB is 'many'; give an integer"):
            read_json("/dev/zero")

    def test_a_gzip_of_nothing_but_blanks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(content, "_FREE_UNPACKED_BYTES", 1 << 20)
        (tmp_path / "blanks.gz").write_bytes(gzip.compress((b" " * 1023 + b"\n") * (2 << 10)))
        assert "unpacks to more than 1 MiB and 200 times its size" in self.refused(tmp_path / "blanks.gz")

    def test_a_gzip_of_many_empty_members(self, tmp_path: Path) -> None:
        (tmp_path / "members.gz").write_bytes(gzip.compress(b"") * 5000)
        assert "thousands of empty members" in self.refused(tmp_path / "members.gz")

    def test_damaged_gzips(self, tmp_path: Path) -> None:
        packed = gzip.compress(b"some text " * 50)
        for name, data, wanted in (
            ("truncated", packed[:-5], "is truncated"),
            ("header only", packed[:4], "is truncated"),
            ("checksum", packed[:-8] + bytes(8), "is damaged"),
            ("trailing", packed + b"garbage", "is damaged"),
        ):
            (tmp_path / name).write_bytes(data)
            assert wanted in self.refused(tmp_path / name)

    def test_a_pipe_to_which_nobody_writes(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UsageError, match=r"cannot read .*pipe: it is a pipe, and nobody wrote to it within 3 s"):
            read_json(tmp_path / "pipe")

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"[" + b"[]," * 70_000 + b"[]]", "more than 62,500 values"),
            (b"[" + b"{}," * 4_000 + b"{}]", "more than 62,500 values, where an object counts as 16"),
            (b"[" * 101 + b"]" * 101, "nested too deeply, more than 100 lists and objects"),
            (b'["[\\"", ' + b'{"a\\\\": [' * 60 + b"]}" * 60 + b"]", "nested too deeply"),
            (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs twice"),
            (b'["\\ud800"]', "half of a character"),
            (b'{"\\udfff": 1}', "half of a character"),
            (b"9" * 5000, "not the JSON of any known format"),
        ],
        ids=["lists", "objects", "deep", "deep between strings", "twice", "half", "half of a key", "digits"],
    )
    def test_json_that_would_take_much_memory_or_cannot_be_kept(
        self, data: bytes, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SCHEDSEARCH_MAX_DOCUMENT_MIB", "1")  # of 64, so that a 64th of the values is allowed
        with pytest.raises(UsageError, match=message):
            parse_json(data, Place("some.json"))

    def test_brackets_in_texts_are_not_nesting(self) -> None:
        value = {"text\\": ["[" * 500, '"[' * 500, "\\\\[" * 500, "]" * 500], "pair": "\U00010000"}
        assert parse_json(json.dumps(value).encode(), Place("some.json")) == value

    def test_blank_lines_of_a_log_are_limited(self) -> None:
        looked_at = 0

        def blank() -> Any:
            nonlocal looked_at
            while True:
                looked_at += 1
                yield b""

        with pytest.raises(UsageError, match="more than 4,000,000 values up to here"):
            autotvm.parse(blank(), "some.log")
        assert looked_at == 250_001


class TestTimesThatAreNotThoseOfTheirRepetitions:
    """Caches in public collections have a few; the objective of their search was `time`."""

    def cache(self, changes: dict[int, float]) -> dict[str, Any]:
        """A cache whose valid configurations number i have `time` multiplied by changes[i]."""
        data = support.cache()
        valid = [fields for fields in data["cache"].values() if not isinstance(fields["time"], str)]
        for number, factor in changes.items():
            valid[number]["time"] *= factor
        return data

    @pytest.mark.parametrize("form", ["kernel-tuner", "t4"])
    @pytest.mark.parametrize("factor", [3.0, 0.1, 1e3])
    def test_in_some_rows_the_recorded_time_is_taken(self, tmp_path: Path, form: str, factor: float) -> None:
        data = self.cache({2: factor, 5: factor})
        valid = [fields for fields in data["cache"].values() if not isinstance(fields["time"], str)]
        support.write(tmp_path / "some_T1.json", support.t1())
        path = support.write(tmp_path / "some_T4.json", data if form == "kernel-tuner" else support.t4(data))
        with Store.open(tmp_path / "foreign.db") as store:
            report = import_file(store, path)
            history = {one.config: one.measurement for one in store.history()}
        (warning,) = report.warnings
        third = list(data["cache"])[2] if form == "kernel-tuner" else "results[2]"
        assert third in warning and "so it is in 2 of 14 configurations" in warning
        for number, fields in enumerate(valid):
            measurement = history[Config({name: fields[name] for name in support.PARAMS})]
            assert measurement.time_ns == pytest.approx(fields["time"] * 1e6)
            assert len(measurement.times_ns) == (1 if number in (2, 5) else 3)

    @pytest.mark.parametrize("factor", [1e3, 1e6, 1e9, 1e-3, 1e-6, 1.2e3])
    def test_in_all_rows_by_the_factor_of_a_unit_the_file_is_refused(self, factor: float) -> None:
        with pytest.raises(UsageError, match=r"some\.json: cache.*in all 14 configurations: they are in different units"):
            kernel_tuner.parse(self.cache(dict.fromkeys(range(14), factor)), "some.json")

    def test_in_all_rows_by_another_factor_the_recorded_time_is_taken(self) -> None:
        recording = kernel_tuner.parse(self.cache(dict.fromkeys(range(14), 10.0)), "some.json")
        assert "in 14 of 14 configurations" in recording.warnings[0]

    def test_the_commands_warn_once(self, tmp_path: Path) -> None:
        path = support.write(tmp_path / "some.json", self.cache({2: 3.0, 5: 3.0}))
        result = schedsearch("records", "import", path, "--db", tmp_path / "new.db")
        assert result.exit_code == 0 and result.stderr.count("warning: ") == 1 and "warnings" not in result.stdout
        result = schedsearch("replay", path, "--seeds", "1", "--tuner", "random", "--evaluations", "3")
        assert result.exit_code == 0 and result.stderr.count("warning: ") == 1
