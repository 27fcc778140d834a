"""The last stage of `schedsearch.build`: a network is compared with its model, and written."""

from __future__ import annotations

import time
from typing import TypeVar

from schedsearch.executable.build_options import BuildOptions
from schedsearch.executable.net import Net
from schedsearch.executable.program import RECORDED
from schedsearch.executable.reading import ReadModel
from schedsearch.progress import stage
from schedsearch.text import counted, seconds

_Net = TypeVar("_Net", bound=Net)


def finish(net: _Net, read: ReadModel, options: BuildOptions) -> _Net:
    """The network, checked and saved as the options say. It is closed if one of these fails.

    Raises:
        WrongNetworkError, UsageError: as `network_check.check.check`.
        DatabaseError: the file cannot be written.
    """
    try:
        if read.source is not None:
            from schedsearch.network_check.check import check

            stage(f"comparing the network with {read.name}")
            net.mark_checked(check(net, read.source(), options.started, options.say))
        else:
            why = "a Network has no model that it could be compared with" if options.check else "as asked"
            options.say(f"the network is unchecked, {why}: its results were not compared with the model's")
        if options.out is not None:
            stage(f"writing {options.out}")
            net.save(options.out)
    except BaseException:
        net.close()
        raise
    return net


def result_text(net: Net, options: BuildOptions) -> str:
    """A network that was built, in one line."""
    untuned = sum(kernel.level not in RECORDED for kernel in net.kernels)
    tuned = (
        f"{untuned} of {counted(len(net.kernels), 'kernel')} without a record" if untuned else "every kernel has a record"
    )
    where = "" if options.out is None else f", written to {options.out}"
    return f"{net.summary}; {tuned}; built in {seconds(time.monotonic() - options.started)}{where}"
