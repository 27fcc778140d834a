"""Standard streams, signals, hostile text, and a system that lacks something: what the commands then do."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_support import ONE_THREAD, isolate, schedsearch
from records_support import artifact, record

from schedsearch import errors, text
from schedsearch.cli import process, render
from schedsearch.measurement import Measurement, Outcome
from schedsearch.records.store import Store
from schedsearch.session.pace import StopSignal

PATIENCE_S = 240.0
CONSOLE = "from schedsearch.cli import console; console.run()"
HOSTILE = "evil\x1b[2J\u202egnp.exe\r\nschedsearch: all is well"
SHOWN = r"evil\x1b[2J\u202egnp.exe\r\nschedsearch: all is well"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    (tmp_path / "tiny.yaml").write_text(ONE_THREAD)
    return tmp_path


def command(*arguments: str | bytes, code: str = CONSOLE, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", code, *arguments], **{"text": True, "check": False, "timeout": PATIENCE_S, **options}
    )


@pytest.fixture
def unread() -> int:
    """The writing end of a pipe whose reader is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


class TestStandardStreams:
    def test_a_closed_descriptor_is_given_to_no_file(self, folder: Path) -> None:
        """Else a message would be written into whatever file is opened first, e.g. a database."""
        code = (
            "import os, sys; from schedsearch.cli.process import StandardStreams; streams = StandardStreams();"
            "file = open('precious', 'w'); print('a message'); print('an error', file=sys.stderr); sys.stdin.read();"
            "file.write(str(file.fileno())); file.close(); sys.exit(streams.exit_code(0))"
        )
        done = command(code=code, preexec_fn=lambda: os.closerange(0, 3))
        assert done.returncode == 0
        assert int((folder / "precious").read_text()) > 2

    def test_an_output_that_cannot_be_written_has_an_exit_code_of_its_own(self, folder: Path) -> None:
        with Path("/dev/full").open("w") as full:
            done = command("--version", stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 74
        assert done.stderr == "schedsearch: cannot write to standard output: No space left on device\n"

    def test_a_reader_that_went_away_is_reported_as_a_shell_would(self, folder: Path, unread: int) -> None:
        done = command("--version", stdout=unread, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (141, "")

    def test_a_failure_keeps_its_exit_code_when_nobody_reads_the_message(self, folder: Path, unread: int) -> None:
        done = command("tune", "missing.yaml", stdout=unread, stderr=unread)
        assert done.returncode == 2

    @pytest.mark.long
    def test_a_run_goes_on_without_readers(self, folder: Path) -> None:
        running = subprocess.Popen(
            [sys.executable, "-c", CONSOLE, "tune", "tiny.yaml", "--db", "t.db", "--json", "--trials", "3"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert running.stdout and running.stderr
        assert json.loads(running.stdout.readline())["event"] == "start"
        running.stdout.close()
        running.stderr.close()
        assert running.wait(PATIENCE_S) == 141
        with Store.open("t.db", readonly=True) as store:
            assert len({each.config for each in store.history() if not each.final_race}) == 3
            assert len(list(store.bests())) == 1, "the final race was held"
            assert store.runs()[0]["finished_at"] is not None

    def test_an_export_into_a_pipe_that_nobody_reads_ends(self, folder: Path, unread: int) -> None:
        Store.open("r.db").close()
        result = schedsearch("records", "export", f"/dev/fd/{unread}", "--db", "r.db")
        assert (result.exit_code, result.output) == (141, "")

    def test_characters_that_the_encoding_lacks_are_escaped(self, folder: Path) -> None:
        code = (
            "from schedsearch.cli.process import StandardStreams; import sys; streams = StandardStreams();"
            "print('\\u00b1 1 \\udc80'); sys.exit(streams.exit_code(0))"
        )
        for encoding, shown in (("ascii", r"\xb1 1 \udc80"), ("utf-8", "\u00b1 1 \\udc80")):
            done = command(code=code, env={**os.environ, "PYTHONIOENCODING": encoding}, stdout=subprocess.PIPE)
            assert (done.returncode, done.stdout) == (0, f"{shown}\n")

    def test_a_bug_shows_its_traceback_and_has_an_exit_code_of_its_own(self, folder: Path) -> None:
        code = "from schedsearch.cli import console; console._command = lambda: 1 // 0; console.run()"
        done = command(code=code, stderr=subprocess.PIPE)
        assert done.returncode == 70 and "ZeroDivisionError" in done.stderr


class TestSignals:
    @pytest.fixture(autouse=True)
    def handlers(self) -> object:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.getsignal(number) for number in numbers]
        yield
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_asks_a_run_to_stop(self, number: int) -> None:
        with StopSignal() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested

    def test_a_terminal_that_closes_sends_hangup_twice(self) -> None:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.requested
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a second Ctrl-C ends the process"

    def test_ignored_signals_stay_ignored(self) -> None:
        """`nohup` ignores SIGHUP, and a shell script ignores SIGINT for commands in the background."""
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        process.interrupt_on_signals()
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        process.die_on_signals()
        os.kill(os.getpid(), signal.SIGHUP)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_before_and_after_a_run_a_signal_interrupts(self, number: int) -> None:
        process.interrupt_on_signals()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)

    def test_an_interrupted_import_leaves_nothing(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with Store.open("r.db") as store:
            store.append(record())
        assert schedsearch("records", "export", "in.jsonl", "--db", "r.db").exit_code == 0
        from schedsearch.records import exchange

        monkeypatch.setattr(exchange._Importer, "finish", lambda importer: os.kill(os.getpid(), signal.SIGINT))
        before = sorted(folder.iterdir())
        result = schedsearch("records", "import", "in.jsonl", "--db", "new.db")
        assert (result.exit_code, result.stderr) == (130, "schedsearch: interrupted; nothing that was saved is lost\n")
        assert sorted(folder.iterdir()) == before


class TestHostileText:
    def test_every_command_prints_through_one_function(self) -> None:
        """Apart from JSON, which is ASCII, the sequence that clears a line, and reports, which are escaped when made."""
        sources = Path(render.__file__).parent.glob("*.py")
        printing = {path.name: path.read_text().count("click.echo(") for path in sources}
        assert {name: count for name, count in printing.items() if count} == {
            "render.py": 2,
            "replay.py": 2,
            "dashboard.py": 1,
        }

    def test_records_with_escape_sequences(self, folder: Path) -> None:
        with Store.open("r.db") as store:
            failed = Measurement(Outcome.COMPILE_ERROR, message=HOSTILE)
            store.append(record(template=HOSTILE, measurement=failed))
            best = store.append(record(template=HOSTILE))
            store.promote(best, artifact())
        for arguments in (["list"], ["show", "1"], ["best"]):
            result = schedsearch("records", *arguments, "--db", "r.db")
            assert result.exit_code == 0, result.output
            assert r"evil\x1b[2J\u202egnp.exe\r" in result.stdout
            assert not set(result.stdout) & set("\x1b\r\u202e")
            assert not any(line.startswith("schedsearch: all") for line in result.stdout.splitlines())
        whole = schedsearch("records", "list", "--db", "r.db", "--json").stdout
        assert whole.isascii() and json.loads(whole)[0]["template"] == HOSTILE

    def test_reports_with_escape_sequences(self, folder: Path) -> None:
        with Store.open("r.db") as store:
            store.promote(store.append(record(template=HOSTILE)), artifact())
        for kind in ("markdown", "csv", "json"):
            result = schedsearch("report", "r.db", "--format", kind)
            assert result.exit_code == 0, result.output
            assert "evil" in result.stdout and not set(result.stdout) & set("\x1b\r\u202e")

    def test_a_file_name_with_escape_sequences(self, folder: Path) -> None:
        for arguments in (["records", "list", "--db", HOSTILE], ["tune", HOSTILE], ["records", "import", HOSTILE]):
            result = schedsearch(*arguments)
            assert result.exit_code in (2, 6)
            assert not set(result.stderr) & set("\x1b\r\u202e") and r"\x1b[2J" in result.stderr

    def test_printable_keeps_what_shows_as_itself(self) -> None:
        assert text.printable("±1 % × … é 漢 🚀") == "±1 % × … é 漢 🚀"
        assert text.printable(HOSTILE) == SHOWN
        assert text.printable("a\tb\nc\u2028\ud800\x9b", lines=True) == "a\tb\nc" + r"\u2028\ud800\x9b"

    @pytest.mark.parametrize("limit", [0, 5, 60, 1000])
    def test_shortened_keeps_both_ends(self, limit: int) -> None:
        cut = text.shortened("begin" + "x" * 2_000_000 + "end", limit)
        assert limit - 3 <= len(cut) <= limit
        assert limit < 60 or (cut.startswith("begin") and cut.endswith("end") and "characters left out" in cut)
        assert text.shortened("short", 5) == "short"

    @pytest.mark.parametrize(
        "value", ["x" * 10**7, 10**10_000, ["y" * 1000] * 1000, {"a": "\x1b"}], ids=["text", "int", "list", "dict"]
    )
    def test_a_quoted_value_is_short_and_printable(self, value: object) -> None:
        assert len(text.quoted(value)) <= 122 and text.quoted(value).isprintable()


class TestLongMessages:
    LONG = "z" * 1_500_000

    def test_the_text_of_an_error_has_a_limit_and_keeps_its_remedy(self) -> None:
        error = errors.UsageError(f"template {self.LONG!r} is unknown; allowed: a, b")
        assert len(str(error)) <= text.MESSAGE_LIMIT and str(error).endswith("allowed: a, b")
        problems = errors.WorkloadError([errors.Problem("shape", self.LONG)] * 50)
        assert len(str(problems)) <= text.MESSAGE_LIMIT and len(problems.problems) == 50

    def test_very_long_names_are_not_compared(self) -> None:
        assert errors.did_you_mean(self.LONG, [self.LONG + "z"]) == ""
        assert errors.did_you_mean("bm", [self.LONG, "bmm"]) == " (did you mean 'bmm'?)"

    def test_a_name_in_another_case_is_recognised(self) -> None:
        assert errors.did_you_mean("crd", ["DCR", "CRD"]) == " (did you mean 'CRD'?)"
        assert errors.did_you_mean("nhwc", ["NHWC", "NCHW"]) == " (did you mean 'NHWC'?)"

    @pytest.mark.parametrize(
        "arguments",
        [
            ["tnue" + LONG],
            ["tune", LONG],
            ["tune", "long.yaml"],
            ["space", "tiny.yaml", "--target", "cpu", "--config", LONG],
        ],
    )
    def test_no_command_prints_a_long_value_whole(self, folder: Path, arguments: list[str]) -> None:
        Path("long.yaml").write_text(ONE_THREAD.replace("op: conv2d", f"op: {self.LONG}"))
        result = schedsearch(*arguments)
        assert result.exit_code == 2
        assert 0 < len(result.stderr) <= text.MESSAGE_LIMIT + 100


class TestSystem:
    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise the limit (ulimit -n)"),
            (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; free some space"),
            (PermissionError(errno.EACCES, "Permission denied", "/some/file"), "/some/file: Permission denied"),
            (MemoryError(), "not enough memory"),
            (RuntimeError("can't start new thread"), "not enough memory; free some, or raise the limit (ulimit -v)"),
            (OSError("liblvm.so: failed to map segment from shared object"), "not enough memory"),
        ],
    )
    def test_what_the_system_refuses_is_one_line(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str
    ) -> None:
        def refuse(*arguments: object) -> None:
            raise error

        monkeypatch.setattr("schedsearch.workload_file.load", refuse)
        result = schedsearch("space", "tiny.yaml")
        assert result.exit_code == 74 and words in result.stderr and len(result.stderr.splitlines()) == 1

    def test_an_error_that_only_a_bug_explains_is_not_hidden(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object) -> None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "schedsearch/missing.json")

        monkeypatch.setattr("schedsearch.workload_file.load", fail)
        assert isinstance(schedsearch("space", "tiny.yaml").exception, FileNotFoundError)

    def test_a_current_folder_that_was_deleted(self, folder: Path) -> None:
        (folder / "gone").mkdir()
        os.chdir(folder / "gone")
        (folder / "gone").rmdir()
        result = schedsearch("records", "list")
        assert result.exit_code == 2 and "the current folder is gone" in result.stderr

    @pytest.mark.parametrize("state", ["nowhere/deeper", "tiny.yaml"])
    def test_a_state_folder_that_cannot_be_used(self, folder: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
        (folder / "nowhere").touch()
        monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(folder / state))
        result = schedsearch("tune", "tiny.yaml", "--db", "t.db")
        assert result.exit_code == 6 and "set SCHEDSEARCH_STATE_DIR to a folder" in result.stderr
        assert not Path("t.db").exists()

    def test_a_full_disk_keeps_the_earlier_export(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from schedsearch.records import output

        Store.open("r.db").close()
        Path("out.jsonl").write_text("earlier")

        def full(number: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(output.os, "fsync", full)
        before = sorted(folder.iterdir())
        result = schedsearch("records", "export", "out.jsonl", "--db", "r.db")
        assert result.exit_code == 74 and "out.jsonl: No space left on device; free some space" in result.stderr
        assert Path("out.jsonl").read_text() == "earlier" and sorted(folder.iterdir()) == before
