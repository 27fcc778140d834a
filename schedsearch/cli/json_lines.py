"""The events of a run as JSON, for programs: `tune --json`."""

from __future__ import annotations

from schedsearch.cli.render import echo_json
from schedsearch.session.observer import Best, DeviceNotice, Observer, Phase, RunStart, TaskEnd, Trial, event_json
from schedsearch.session.summary import RunSummary, TaskSummary


class JsonLines(Observer):
    """Prints every event as one JSON object per line on standard output; the last is the summary."""

    def on_start(self, event: RunStart) -> None:
        echo_json(event_json(event))

    def on_phase(self, event: Phase) -> None:
        echo_json(event_json(event))

    def on_trial(self, event: Trial) -> None:
        echo_json(event_json(event))

    def on_best(self, event: Best) -> None:
        echo_json(event_json(event))

    def on_device(self, event: DeviceNotice) -> None:
        echo_json(event_json(event))

    def on_task_end(self, index: int, summary: TaskSummary) -> None:
        echo_json(event_json(TaskEnd(index, summary)))

    def on_end(self, summary: RunSummary) -> None:
        echo_json(event_json(summary))
