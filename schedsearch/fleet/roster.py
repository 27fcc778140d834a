"""Which workers a fleet has, which of them a run can use, and what they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from schedsearch.errors import DeviceError, UsageError
from schedsearch.fleet import host
from schedsearch.fleet.connection import Connection
from schedsearch.target import PRESETS, Target
from schedsearch.typed import JsonMapping, JsonObject

CLOCK_S = 5.0
"""A worker's clock that differs by more is named: certificates and logs depend on it."""

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Member:
    """A worker that can be used.

    Attributes:
        builds: candidates that it builds at the same time.
        devices: its CPU, and its GPUs.
        clock_s: seconds by which its clock is ahead of the one here; 0 if they agree as well as can be told.
        facts: the answer of `host.describe`.
    """

    address: str
    builds: int
    devices: tuple[Target, ...]
    toolchains: Mapping[str, Mapping[str, str]]
    clock_s: float
    facts: JsonObject

    @property
    def name(self) -> str:
        return f"{self.facts['host']} ({self.address})"


class Roster:
    """The workers of a scheduler, as they describe themselves.

    Attributes:
        members: those that a run can use now, by their addresses. Never changed in place, so that any thread may read it.
        refused: address of a worker -> why it cannot be used.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.members: Mapping[str, Member] = {}
        self.refused: dict[str, str] = {}

    def keep(self, present: Mapping[str, object]) -> None:
        """Forgets the workers that are gone."""
        self.members = {address: member for address, member in self.members.items() if address in present}
        self.refused = {address: why for address, why in self.refused.items() if address in present}

    def take(self, address: str, facts: JsonObject, resources: JsonMapping, asked_s: float, answered_s: float) -> None:
        """A worker has described itself.

        Args:
            facts: of `host.describe`.
            resources: that it was started with.
            asked_s, answered_s: the time here when it was asked, and when it had answered.
        """
        if "CPU" not in resources:
            self.refused[address] = "it was started without resources; start it with `schedsearch worker`"
        elif facts["schedsearch"] != host.version():
            self.refused[address] = (
                f"it has schedsearch {facts['schedsearch']}, and this is {host.version()}; install the same version there"
            )
        else:
            ahead_s, behind_s = facts["time"] - answered_s, asked_s - facts["time"]
            clock_s = ahead_s if ahead_s > 0 else -behind_s if behind_s > 0 else 0.0
            devices = tuple(map(_target, facts["devices"]))
            member = Member(address, int(resources["CPU"]), devices, facts["toolchains"], clock_s, facts)
            self.members = {**self.members, address: member}

    def refuse(self, address: str, error: str) -> None:
        """A worker could not even describe itself."""
        self.refused[address] = f"schedsearch does not run there ({error}); install it, in the same version"

    @property
    def problems(self) -> list[str]:
        """What is wrong with workers, a line each with its remedy."""
        found = [f"{address} is not used: {why}" for address, why in self.refused.items()]
        for member in self.members.values():
            if abs(member.clock_s) > CLOCK_S:
                which = "ahead of" if member.clock_s > 0 else "behind"
                found.append(
                    f"the clock of {member.name} is {abs(member.clock_s):.0f} s {which} the one here; set it, e.g. by NTP"
                )
        return found

    def devices(self) -> dict[str, tuple[Target, list[str]]]:
        """Every device by its UUID, with the addresses of the workers that have it."""
        found: dict[str, tuple[Target, list[str]]] = {}
        for address, member in self.members.items():
            for device in member.devices:
                found.setdefault(device.uuid, (device, []))[1].append(address)
        return found

    def chosen(self, selector: str) -> list[Target]:
        """The devices that a selector names: auto (GPUs if there are any), cpu, cuda, cuda:all, or the name of a card.

        Raises:
            UsageError: the selector is none of these.
            DeviceError: no worker has such a device.
        """
        found = sorted((device for device, _ in self.devices().values()), key=lambda device: (device.host, device.ordinal))
        gpus = [device for device in found if device.kind == "cuda"]
        cpus = [device for device in found if device.kind == "cpu"]
        if selector in PRESETS:
            wanted = [device for device in gpus if device.key == PRESETS[selector].key]
        elif selector in ("auto", "cpu", "cuda", "cuda:all"):
            wanted = cpus if selector == "cpu" else gpus if selector != "auto" else gpus or cpus
        else:
            raise UsageError(
                f"target {selector!r} names no device of a fleet; allowed: auto, cpu, cuda, {', '.join(PRESETS)}"
            )
        if not wanted:
            raise DeviceError(self._none(selector, gpus))
        return wanted

    def _none(self, selector: str, gpus: list[Target]) -> str:
        there = Counter(device.name for device in gpus)
        cards = ", ".join(f"{count} {name}" for name, count in there.items()) or "no GPU"
        refused = "".join(f"; {address} is not used: {why}" for address, why in self.refused.items())
        if not self.members:
            start = self.connection.worker_command
            return f"{self.connection.address} has no worker that can be used{refused}; start one: {start}"
        remedy = f"start a worker on a host with {'one' if selector.startswith('cuda') else selector}"
        where = self.connection.address
        return f"no worker of {where} has what --target {selector} names: they have {cards}{refused}; {remedy}"

    def builders(self, kind: Kind, wanted: Mapping[str, str] | None = None) -> tuple[dict[str, str], list[str]]:
        """The compilers that build for a kind of device, and the addresses of the workers that have them.

        Args:
            wanted: the only ones that will do; by default those that most workers have.

        Raises:
            DeviceError: no worker has such compilers, or workers differ and the connection does not allow it.
        """
        able = {
            address: dict(member.toolchains[kind]) for address, member in self.members.items() if kind in member.toolchains
        }
        able = {address: versions for address, versions in able.items() if self.members[address].builds}
        if wanted is None:
            counts = Counter(tuple(sorted(versions.items())) for versions in able.values())
            wanted = dict(counts.most_common(1)[0][0]) if counts else {}
        same = [address for address, versions in able.items() if versions == wanted]
        if not able:
            raise DeviceError(
                f"no worker of {self.connection.address} builds for a {kind} target; start one with --builds 1 or more, "
                "where `schedsearch doctor` shows compilers for it"
            )
        if not same:
            raise DeviceError(
                f"no worker of {self.connection.address} builds for a {kind} target with these compilers; they have "
                f"{_differences(wanted, next(iter(able.values())))}; install the same versions there"
            )
        if len(same) < len(able) and not self.connection.allow_mixed:
            address = next(address for address in able if address not in same)
            raise DeviceError(
                f"the compilers of {self.members[address].name} differ from others: "
                f"{_differences(wanted, able[address])}; install the same versions, or give --allow-mixed: then such "
                "workers do not build"
            )
        return dict(wanted), same


def _target(facts: JsonObject) -> Target:
    return Target(**{**facts, "compute_capability": tuple(facts["compute_capability"])})


def _differences(wanted: Mapping[str, str], got: Mapping[str, str]) -> str:
    names = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
    return ", ".join(f"{name} {got.get(name, 'missing')} instead of {wanted.get(name, 'none')}" for name in names)
