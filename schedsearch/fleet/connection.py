"""Where a fleet's scheduler is, and whom to trust there."""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

from schedsearch.errors import DeviceError, UsageError

_CONNECT_S = 10.0
TLS_FILES = ("ca.pem", "cert.pem", "key.pem")
_ADDRESS = re.compile(r"(?P<protocol>tcp|tls)://(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Connection:
    """A fleet: the address of a Dask scheduler, and how to talk to it.

    Whoever can connect to a scheduler runs code on all of its workers. So an address on another machine must be tls://,
    unless `trust_network` says that only trusted people reach it.

    Attributes:
        address: tcp://HOST:PORT or tls://HOST:PORT.
        tls: a folder with `ca.pem`, `cert.pem` and `key.pem`, for tls://.
        trust_network: whether an address on another machine may be tcp://.
        allow_mixed: whether workers may have other compilers than the rest. Those only measure.
        patience_s: how long a run waits for a scheduler, or for the last worker of a kind, that went away.
        wait_for_device: whether to wait for a device that another run holds.

    Raises:
        UsageError: the address is none, TLS files are missing, or the network is not trusted.

    Examples:
        >>> Connection("tcp://127.0.0.1:8786").address
        'tcp://127.0.0.1:8786'
    """

    address: str
    tls: str | Path | None = None
    trust_network: bool = False
    allow_mixed: bool = False
    patience_s: float = 60.0
    wait_for_device: bool = True

    def __post_init__(self) -> None:
        match = _ADDRESS.fullmatch(self.address)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise UsageError(
                f"{self.address!r} is not the address of a scheduler; allowed: tls://HOST:PORT, or tcp://HOST:PORT, e.g. "
                "tcp://127.0.0.1:8786"
            )
        if not self.patience_s > 0:
            raise UsageError(f"patience_s {self.patience_s!r} is not possible; allowed: seconds, more than 0")
        if match["protocol"] == "tls":
            self._check_files()
        elif self.tls is not None:
            raise UsageError(f"{self.address} is not encrypted, so --tls has no use; write tls://, or leave out --tls")
        elif not self.trust_network and not is_loopback(match["host"].strip("[]")):
            raise UsageError(
                f"{self.address} is on another machine and not encrypted: whoever reaches it can run code on all workers. "
                "Use tls:// with --tls FOLDER; or give --trust-network if only trusted people reach that network"
            )

    def _check_files(self) -> None:
        if self.tls is None:
            raise UsageError(f"{self.address} needs certificates; give --tls FOLDER, a folder with {', '.join(TLS_FILES)}")
        missing = [name for name in TLS_FILES if not (Path(self.tls) / name).is_file()]
        if missing:
            raise UsageError(f"{self.tls} has no {' and no '.join(missing)}; docs/fleet.md shows how to make certificates")

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port."""
        where, _, port = self.address.partition("://")[2].rpartition(":")
        return where.strip("[]"), int(port)

    def require_scheduler(self) -> None:
        """Raises DeviceError if nothing listens where the scheduler should be."""
        try:
            socket.create_connection(self.endpoint, _CONNECT_S).close()
        except OSError as error:
            host, port = self.endpoint
            start = f"dask scheduler --host {host} --port {port}"
            if self.tls is not None:
                start = f"dask scheduler --protocol tls --port {port} with its certificates, as docs/fleet.md shows"
            raise DeviceError(f"the scheduler {self.address} cannot be reached: {error}; start one: {start}") from error

    @property
    def worker_command(self) -> str:
        """How to start a worker of this scheduler."""
        tls = "" if self.tls is None else f" --tls {shlex.quote(str(self.tls))}"
        return f"schedsearch worker {self.address}{tls}{' --trust-network' if self.trust_network else ''}"

    @property
    def certificates(self) -> tuple[str, str, str] | None:
        """Paths of the authority's certificate, the own certificate and its key; None without TLS."""
        if self.tls is None:
            return None
        authority, own, key = (str(Path(self.tls) / name) for name in TLS_FILES)
        return authority, own, key


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its address. A name counts if all of its addresses do."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)
