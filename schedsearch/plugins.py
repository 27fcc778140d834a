"""Objects that installed packages offer by entry points. They are found by name, and imported when they are first needed.

A package that cannot be imported does not disturb the others: `load` raises an error that names the package and the cause.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from schedsearch.errors import UsageError


@dataclass(frozen=True)
class Offer:
    """One entry point.

    Attributes:
        group: e.g. schedsearch.ops.
        name: of the operator or template.
        location: "module:object".
        package: name and version of the distribution.
    """

    group: str
    name: str
    location: str
    package: str

    def __str__(self) -> str:
        return f"{self.package} ({self.location})"


class PluginError(UsageError):
    """An object of an installed package cannot be used. The message names the package, the cause and the remedy."""


def offers(group: str) -> Mapping[str, tuple[Offer, ...]]:
    """The entry points of a group by name. If several packages claim a name, it has several offers.

    The search runs once for each `sys.path`.
    """
    return _offers(group, tuple(sys.path))


@functools.lru_cache(maxsize=32)
def _offers(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[Offer, ...]]:
    from importlib.metadata import entry_points

    found: dict[str, dict[str, Offer]] = {}
    for point in entry_points(group=group):
        package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "a package without metadata"
        # A package that is found twice on the path (an editable installation, for example) is one package.
        found.setdefault(point.name, {}).setdefault(
            f"{package} {point.value}", Offer(group, point.name, point.value, package)
        )
    return {name: tuple(each.values()) for name, each in found.items()}


def the_offer(what: str, claims: Iterable[Offer]) -> Offer:
    """The only offer of a name.

    Raises:
        PluginError: several packages claim the name; `what` is the kind of object, e.g. "operator".
    """
    first, *others = claims
    if others:
        packages = " and ".join(map(str, (first, *others)))
        raise PluginError(f"{len(others) + 1} packages offer {what} {first.name!r}: {packages}; uninstall all but one")
    return first


def _no_trial(load: Callable[[], object]) -> str:
    return ""


_try_first: Callable[[Callable[[], object]], str] = _no_trial


def try_first(trial: Callable[[Callable[[], object]], str]) -> None:
    """From now on packages are loaded only if a trial finds nothing wrong with that, in this process.

    Args:
        trial: returns what is wrong with a function, as the end of a sentence; "" for nothing.
    """
    global _try_first
    _try_first = trial


@functools.lru_cache(maxsize=1024)
def load(what: str, offer: Offer) -> Any:
    """Imports the object of an entry point.

    Raises:
        PluginError: the import failed, with any exception.
    """
    from importlib.metadata import EntryPoint

    point = EntryPoint(offer.name, offer.location, offer.group)
    if problem := _try_first(point.load):
        raise PluginError(f"{what} {offer.name!r} of {offer} {problem}; repair, update or uninstall the package")
    try:
        return point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `SystemExit` included
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise PluginError(
            f"{what} {offer.name!r} of {offer} cannot be imported: {cause}; repair, update or uninstall the package"
        ) from error
