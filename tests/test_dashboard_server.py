"""The dashboard over HTTP: what it refuses, its headers, live changes, and the processes around it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from child_environment import child_environment
from click.testing import CliRunner
from dashboard_support import HOSTILE, add_trials, hostile_database, sample_database

pytest.importorskip("starlette", reason="needs the extra `dashboard`")

import httpx

from schedsearch.cli.main import main
from schedsearch.dashboard import server as dashboard_server
from schedsearch.dashboard.answers import Answers
from schedsearch.dashboard.server import application, bind, is_loopback, server_of
from schedsearch.errors import UsageError
from schedsearch.records.store import Store

TOKEN = "a-secret-of-18-characters"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_database(tmp_path_factory.mktemp("sample") / "a.db", trials=20)


class Client:
    """A browser without a network: it calls the application itself, keeps cookies, and follows no redirect."""

    def __init__(self, runner: asyncio.Runner, session: httpx.AsyncClient) -> None:
        self._runner, self._session = runner, session

    def request(self, method: str, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self._runner.run(self._session.request(method, path, headers=headers))

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return self.request("GET", path, headers)


@contextlib.contextmanager
def client_of(
    *files: Path, host: str = "127.0.0.1", token: str = "", base: str = "http://127.0.0.1:8377"
) -> Iterator[Client]:
    answers = Answers([str(file) for file in files])
    transport = httpx.ASGITransport(application(answers, host=host, token=token))
    session = httpx.AsyncClient(transport=transport, base_url=base)
    with asyncio.Runner() as runner:
        yield Client(runner, session)
        runner.run(session.aclose())
    answers.close()


class TestRequests:
    def test_every_answer_of_the_api_is_there_and_is_json(self, sample: Path) -> None:
        with client_of(sample) as client:
            view = client.get("/api/overview").json()
            for path in ("records", "replay", f"task/{view['tasks'][0]['key']}", "trial/0.1", "records?outcome=failed"):
                answer = client.get(f"/api/{path}")
                assert answer.status_code == 200, path
                assert answer.headers["content-type"] == "application/json"

    def test_an_unknown_path_is_404_and_says_why(self, sample: Path) -> None:
        with client_of(sample) as client:
            for path in ("/api/task/0.nope", "/api/trial/0.99999", "/api/x", "/api/../../etc/passwd", "/api/"):
                answer = client.get(path)
                assert answer.status_code == 404, path
            assert "no task" in client.get("/api/task/0.nope").json()["error"]

    def test_the_same_answer_is_not_sent_twice(self, sample: Path) -> None:
        with client_of(sample) as client:
            first = client.get("/api/records")
            again = client.get("/api/records", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    def test_nothing_can_be_changed(self, sample: Path, method: str) -> None:
        with client_of(sample) as client:
            for path in ("/", "/api/overview", "/api/events"):
                assert client.request(method, path).status_code == 405

    def test_every_answer_has_the_headers_of_security(self, sample: Path) -> None:
        with client_of(sample) as client:
            for path in ("/", "/api/overview", "/api/nope", "/elsewhere"):
                headers = client.get(path).headers
                assert headers["x-content-type-options"] == "nosniff"
                assert headers["referrer-policy"] == "no-referrer"
                assert "default-src 'none'" in headers["content-security-policy"]
                assert "frame-ancestors 'none'" in headers["content-security-policy"]
                assert "unsafe" not in headers["content-security-policy"]

    def test_each_page_has_a_nonce_of_its_own_which_all_its_scripts_carry(self, sample: Path) -> None:
        nonces = set()
        with client_of(sample) as client:
            for _ in range(2):
                page = client.get("/")
                (nonce,) = set(re.findall(r"script-src 'nonce-([\w-]+)'", page.headers["content-security-policy"]))
                data = '<script type="application/json"', '<script type="text/plain"'
                scripts = [each for each in re.findall(r"<script\b[^>]*>", page.text) if not each.startswith(data)]
                assert scripts and all(f'nonce="{nonce}"' in script for script in scripts)
                assert page.headers["cache-control"] == "no-store"
                nonces.add(nonce)
        assert len(nonces) == 2

    def test_foreign_text_stays_json(self, tmp_path: Path) -> None:
        with client_of(hostile_database(tmp_path / "h.db")) as client:
            answer = client.get("/api/overview")
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["tasks"][0]["name"].startswith(HOSTILE[:20])


class TestHosts:
    @pytest.mark.parametrize("host", ["127.0.0.1:8377", "localhost:8377", "localhost", "LOCALHOST:1", "[::1]:8377"])
    def test_names_of_this_machine_are_served(self, sample: Path, host: str) -> None:
        with client_of(sample) as client:
            assert client.get("/api/overview", headers={"host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8377", "127.0.0.1.evil.example", "localhost.evil:8377", "", "10.0.0.1"]
    )
    def test_other_names_are_refused_because_they_may_be_rebound(self, sample: Path, host: str) -> None:
        with client_of(sample) as client:
            for path in ("/", "/api/overview", "/api/events"):
                assert client.get(path, headers={"host": host}).status_code == 421

    def test_other_sites_are_refused(self, sample: Path) -> None:
        with client_of(sample) as client:
            assert client.get("/api/overview", headers={"sec-fetch-site": "cross-site"}).status_code == 403
            assert client.get("/api/overview", headers={"sec-fetch-site": "same-origin"}).status_code == 200

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
    def test_a_loopback_address_needs_no_token(self, host: str) -> None:
        assert is_loopback(host)

    @pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.org", "::", "127.0.0.1.evil"])
    def test_any_other_address_does(self, host: str) -> None:
        assert not is_loopback(host)


class TestCommand:
    """What the terminal is told before the browser opens."""

    @pytest.fixture
    def serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("schedsearch.dashboard.server.serve", lambda *_, **__: None)

    @pytest.mark.usefixtures("serves")
    def test_a_database_that_cannot_be_read_yet_is_a_warning(self, sample: Path, tmp_path: Path) -> None:
        missing = str(tmp_path / "missing.db")
        done = CliRunner().invoke(main, ["dashboard", str(sample), missing, "--port", "0"])
        assert done.exit_code == 0
        address, warning = done.stderr.splitlines()
        assert address.startswith("dashboard: http://") and warning.startswith(f"warning: no database at {missing}")

    @pytest.mark.usefixtures("serves")
    def test_a_server_whose_package_is_missing_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [each for each in sys.modules if each.startswith(("psycopg", "schedsearch.records.postgresql"))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "psycopg", None)
        done = CliRunner().invoke(main, ["dashboard", "postgresql://db.example.org/records", "--port", "0"])
        assert done.exit_code == 2 and "pip install 'schedsearch[postgres]'" in done.output


class TestToken:
    def test_without_it_nothing_is_served(self, sample: Path) -> None:
        with client_of(sample, host="0.0.0.0", token=TOKEN, base="http://box.example:8377") as client:
            for path in ("/", "/api/overview", "/api/events", "/?token=wrong", "/?token=", "/api/overview?token=x%C3%A9"):
                assert client.get(path).status_code == 401, path

    def test_the_address_with_it_becomes_a_cookie_that_other_sites_cannot_use(self, sample: Path) -> None:
        with client_of(sample, host="0.0.0.0", token=TOKEN, base="http://box.example:8377") as client:
            answer = client.get(f"/?token={TOKEN}")
            assert (answer.status_code, answer.headers["location"]) == (303, "/")
            assert "HttpOnly" in answer.headers["set-cookie"] and "SameSite=strict" in answer.headers["set-cookie"]
            assert client.get("/").status_code == 200
            assert client.get("/api/overview").status_code == 200

    def test_programs_send_it_in_a_header(self, sample: Path) -> None:
        with client_of(sample, token=TOKEN) as client:
            assert client.get("/api/overview", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
            assert client.get("/api/overview", headers={"authorization": f"Basic {TOKEN}"}).status_code == 401


class TestStates:
    """Each state of a file over HTTP; `test_dashboard_answers` looks at what the answers say."""

    def test_a_missing_an_empty_and_a_newer_database_are_shown_beside_a_sound_one(
        self, sample: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "empty.db").touch()
        newer = sample_database(tmp_path / "newer.db", trials=2)
        import sqlite3

        with contextlib.closing(sqlite3.connect(newer)) as connection, connection:
            connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
        with client_of(sample, tmp_path / "missing.db", tmp_path / "empty.db", newer) as client:
            view = client.get("/api/overview").json()
            assert client.get("/").status_code == 200
            assert client.get("/api/trial/1.1").status_code == 404
        assert [bool(row["problem"]) for row in view["databases"]] == [False, True, True, True]
        assert len(view["tasks"]) == 3


@contextlib.contextmanager
def served(*files: Path) -> Iterator[int]:
    """A real server in a thread; gives its port."""
    answers = Answers([str(file) for file in files])
    listening = bind("127.0.0.1", 0)
    server = server_of(application(answers))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        answers.close()
        listening.close()


def events(port: int) -> Iterator[dict[str, Any]]:
    """The data of server-sent events, each with its name as `event`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("GET", "/api/events")
    response = connection.getresponse()
    assert response.headers["content-type"].startswith("text/event-stream")
    name = ""
    while line := response.readline().decode():
        if line.startswith("event: "):
            name = line[7:].strip()
        elif line.startswith("data: "):
            yield {"event": name, **json.loads(line[6:])}


class TestLive:
    def test_a_new_trial_is_announced_to_every_page_and_is_in_the_answers(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "live.db", trials=10, live=True)
        with served(path) as port:
            pages = [events(port) for _ in range(3)]
            assert {next(page)["event"] for page in pages} == {"hello"}
            (number,) = add_trials(path)
            for page in pages:
                change = next(page)
                assert change["event"] == "change"
                (task,) = [path for path in change["paths"] if path.startswith("task/")]
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("GET", f"/api/{task}")
            assert json.loads(connection.getresponse().read())["trials"]["id"][-1] == number

    def test_twenty_dashboards_never_keep_a_writer_waiting(self, tmp_path: Path) -> None:
        path = sample_database(tmp_path / "live.db", trials=10, live=True)
        all_answers = [Answers([str(path)]) for _ in range(20)]
        try:
            for answers in all_answers:
                answers.refresh()
                answers.get("overview")
            with Store.open(path, busy_timeout_s=0) as store:  # any lock would be an error
                store.finish_run(store.runs()[-1]["id"], {})
                with store.database.read() as connection:
                    busy, _, _ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
            assert not busy  # a reader with a snapshot would keep the log from being emptied
            assert all(answers.refresh() for answers in all_answers)
        finally:
            for answers in all_answers:
                answers.close()


def asking(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=120)
    connection.sendall(sent)
    return connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    with contextlib.suppress(ConnectionResetError):
        return b"".join(iter(lambda: connection.recv(1000), b""))
    return b""


def status(port: int, path: str = "/api/overview") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


class TestSlowClients:
    @pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nx-y: "])
    def test_half_a_request_is_ended_in_time(self, sample: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
        monkeypatch.setattr(dashboard_server, "REQUEST_S", 0.2)
        with served(sample) as port, asking(port, sent) as connection:
            assert rest(connection).startswith(b"HTTP/1.1 408 ")
            assert status(port) == 200

    def test_sending_slowly_gains_no_time(self, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dashboard_server, "REQUEST_S", 0.3)
        with (
            served(sample) as port,
            asking(port, b"GET / HTTP/1.1\r\n") as connection,
            pytest.raises((BrokenPipeError, ConnectionResetError)),
        ):
            for _ in range(1000):
                connection.sendall(b"a: b\r\n")
                time.sleep(0.01)

    def test_a_body_that_does_not_arrive_ends_the_connection(self, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dashboard_server, "REQUEST_S", 0.2)
        text = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\nx"
        with served(sample) as port, asking(port, text) as connection:
            assert rest(connection).startswith(b"HTTP/1.1 405 ")

    def test_a_stream_with_a_whole_request_is_not_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dashboard_server, "REQUEST_S", 0.2)
        path = sample_database(tmp_path / "live.db", trials=10, live=True)
        with served(path) as port:
            page = events(port)
            assert next(page)["event"] == "hello"
            time.sleep(0.6)
            add_trials(path)
            assert next(page)["event"] == "change"

    def test_connections_that_wait_make_room_for_others(self, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dashboard_server, "_WAITING", 5)
        with served(sample) as port:
            held = [asking(port, b"GET / HT") for _ in range(300)]
            assert status(port) == 200
            rest(held[0])  # it has ended
            for connection in held:
                connection.close()

    def test_one_connection_takes_several_requests(self, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dashboard_server, "REQUEST_S", 0.3)
        with served(sample) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            for _ in range(3):
                connection.request("GET", "/api/overview")
                assert connection.getresponse().read()
                time.sleep(0.4)

    def test_streams_are_limited_before_they_begin_and_counted_until_they_end(
        self, sample: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dashboard_server, "_LISTENERS", 3)
        request = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with served(sample) as port:
            streams = [asking(port, request) for _ in range(10)]
            answers = sorted(stream.recv(12) for stream in streams)
            assert answers == [b"HTTP/1.1 200"] * 3 + [b"HTTP/1.1 503"] * 7
            for stream in streams:
                stream.close()
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                with asking(port, request) as stream:
                    if stream.recv(12) == b"HTTP/1.1 200":
                        return
            pytest.fail("streams that ended are still counted")


class TestPorts:
    def test_a_port_in_use_gives_the_next_free_one(self) -> None:
        with bind("127.0.0.1", 0) as first:
            port = first.getsockname()[1]
            with bind("127.0.0.1", port) as second:
                assert port < second.getsockname()[1] <= port + 100

    def test_an_address_of_another_machine_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1"):
            bind("192.0.2.1", 0)


def command(*arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    whole = [sys.executable, "-m", "schedsearch.cli.dashboard_process", *map(str, arguments)]
    return subprocess.Popen(whole, stderr=subprocess.PIPE, text=True, env=child_environment(), **options)


def address_of(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """The address that a dashboard prints, and the lines before it."""
    before = []
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"dashboard: (http://\S+)", line):
            return found[1], before
        before.append(line)
    raise AssertionError(before)


class TestProcesses:
    def test_it_says_its_address_and_ends_with_ctrl_c(self, sample: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            process = command("--port", str(port), sample)
            address, before = address_of(process)
        assert before == [f"port {port} is in use; taking {address.split(':')[-1].strip('/')}\n"]
        host, _, number = address.removeprefix("http://").strip("/").partition(":")
        for _ in range(100):
            with contextlib.suppress(ConnectionRefusedError):
                connection = http.client.HTTPConnection(host, int(number), timeout=120)
                connection.request("GET", "/api/overview")
                assert json.loads(connection.getresponse().read())["tasks"]
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=120)[1]
        assert (process.returncode, said.splitlines()[-1]) == (130, "the dashboard has ended")

    def test_it_ends_when_the_process_that_it_belongs_to_is_killed(self, sample: Path, tmp_path: Path) -> None:
        code = (
            "import os, subprocess, sys, time\n"
            "child = subprocess.Popen([sys.executable, '-m', 'schedsearch.cli.dashboard_process', '--port', '0',"
            " '--parent', str(os.getpid()), sys.argv[1]], start_new_session=True)\n"
            "print(child.pid, flush=True)\ntime.sleep(100)"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", code, str(sample)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment(),
        )  # fmt: skip
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        address_of(parent)
        parent.kill()
        parent.wait()
        for _ in range(200):
            if not Path(f"/proc/{child}").exists():
                break
            time.sleep(0.1)
        else:
            os.kill(child, signal.SIGKILL)
            raise AssertionError("the dashboard outlived its parent")
        assert parent.stderr is not None
        parent.stderr.close()
        parent.stdout.close()

    def test_killing_the_dashboard_of_a_run_does_nothing_to_the_run(self, tmp_path: Path) -> None:
        from schedsearch.cli.dashboard import beside

        with Store.open(tmp_path / "a.db") as store, beside(str(tmp_path / "a.db")) as child:
            assert child is not None
            child.kill()
            child.wait()
            assert store.start_run({})

    def test_the_dashboard_of_a_run_ends_with_it(self, tmp_path: Path) -> None:
        from schedsearch.cli.dashboard import beside

        with beside(str(tmp_path / "a.db")) as child:
            assert child is not None and child.poll() is None
        assert child.poll() is not None


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--host", "0.0.0.0"], "which needs a secret: --token new"),
        (["--token", "short"], "has fewer than 8 characters"),
        (["--port", "70000"], "70000 is not a port"),
    ],
)
def test_options_that_would_be_unsafe_are_refused(options: list[str], wanted: str) -> None:
    from click.testing import CliRunner

    from schedsearch.cli.main import main

    result = CliRunner().invoke(main, ["dashboard", *options])
    assert result.exit_code == 2
    assert wanted in result.output
