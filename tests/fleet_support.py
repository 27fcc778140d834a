"""A fleet of real Dask processes on this machine, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_STARTS_S = 300.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have started."""
    started: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            started.setdefault(parent, []).append(int(path.parent.name))
    found = list(started.get(pid, ()))
    for each in found:
        found += started.get(each, ())
    return found


class Cluster:
    """A scheduler and its workers. Logs lie in `folder`."""

    def __init__(self, folder: Path, tls: Path | None = None) -> None:
        self.folder, self.tls = folder, tls
        self.port = free_port()
        self.address = f"{'tls' if tls else 'tcp'}://127.0.0.1:{self.port}"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.start_scheduler()

    def _start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip

    def start_scheduler(self) -> None:
        command = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(self.port), "--no-dashboard"]
        if self.tls:
            names = {"--tls-ca-file": "ca", "--tls-cert": "cert", "--tls-key": "key"}
            command += [word for option, name in names.items() for word in (option, str(self.tls / f"{name}.pem"))]
        self.scheduler = self._start("scheduler", [*command, "--protocol", self.address.partition(":")[0]])
        ends_s = time.monotonic() + _STARTS_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.scheduler.poll() is None and time.monotonic() < ends_s, (self.folder / "scheduler.log").read_text()
            time.sleep(0.05)

    def start_worker(self, *options: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        tls = ["--tls", str(self.tls)] if self.tls else []
        command = ["-m", "schedsearch", "worker", self.address, *tls, *options]
        self.workers.append(self._start(f"worker{len(self.workers)}", command, environment))
        return self.workers[-1]

    def start_stranger(self) -> subprocess.Popen[bytes]:
        """A Dask worker that is not one of schedsearch."""
        command = ["-m", "distributed.cli.dask_worker", self.address, "--no-dashboard", "--nworkers", "1"]
        self.workers.append(self._start(f"worker{len(self.workers)}", command))
        return self.workers[-1]

    def end_workers(self, first: int) -> None:
        """Ends all workers but the first ones."""
        for process in self.workers[first:]:
            _end(process)
        del self.workers[first:]

    def kill_a_worker(self, number: int) -> bool:
        """Kills the process that does a worker's work. Its nanny starts another one. False if there is none now."""
        found = False
        for pid in descendants(self.workers[number].pid):
            with contextlib.suppress(OSError):
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    found = True
        return found

    def stop_scheduler(self) -> None:
        _end(self.scheduler)

    def close(self) -> None:
        for process in [*self.workers, self.scheduler]:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def cluster(folder: Path, *workers: Sequence[str], tls: Path | None = None) -> Iterator[Cluster]:
    """A scheduler with workers that were started with these options each."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Cluster(folder, tls)
    try:
        for options in workers:
            made.start_worker(*options)
        yield made
    finally:
        made.close()


def make_certificates(folder: Path) -> None:
    """As docs/fleet.md says: an authority, and a certificate that all members of a fleet have."""
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "365", "-subj", "/CN=fleet authority",
        "-keyout", "ca-key.pem", "-out", "ca.pem",
    )  # fmt: skip
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=fleet", "-keyout", "key.pem", "-out", "request.pem")
    openssl(
        "x509", "-req", "-in", "request.pem", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-days", "365",
        "-out", "cert.pem",
    )  # fmt: skip
