# SPDX-License-Identifier: Apache-2.0
"""What is logged has the keys that docs/logs.md promises."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.typing import FilteringBoundLogger

from mockengine.engine.observer import Served
from mockengine.journal import Journal
from mockengine.logs import Event
from mockengine.wire.messages import Unreadable

PAGE = Path(__file__).parent.parent / "docs" / "logs.md"
EXAMPLES = {
    example["event"]: example
    for example in (json.loads(line) for line in PAGE.read_text().splitlines() if line.startswith('{"timestamp"'))
}
SERVED = Served("cmpl-1", engine=0, client=1, prompt_tokens=3, max_tokens=4, output_tokens=4)

REPORTS: dict[Event, Callable[[Journal], None]] = {
    Event.ENGINE_JOINING: lambda journal: journal.joining("tcp://h:1", range(2), "the frontend's INIT", 1.0, "a hint"),
    Event.JOIN_INTERRUPTED: lambda journal: journal.join_interrupted("a reason", "a hint"),
    Event.ENGINE_READY: lambda journal: journal.ready(range(2), 1, 0.1, coordinator=False),
    Event.FRONTEND_STARTING: lambda journal: journal.frontend_starting(10.0, 2, []),
    Event.FRONTEND_LOST: lambda journal: journal.frontend_lost("a reason", 3, 60.0, "a hint"),
    Event.ABANDONED_FRONTEND_TOLD: lambda journal: journal.frontend_abandoned(["tcp://h:1"]),
    Event.ENGINE_RESUMED: lambda journal: journal.resumed(["tcp://h:1"], 2),
    Event.STATE_NOT_KEPT: lambda journal: journal.state_not_kept("a reason"),
    Event.ADMIN_REQUEST_FAILED: lambda journal: journal.admin_failed("a reason", RuntimeError("a defect")),
    Event.ENGINE_LEAVING: lambda journal: journal.leaving("SIGTERM", 2, 0.0),
    Event.ENGINE_LEFT: lambda journal: journal.left(0, "asked to stop"),
    Event.ENGINE_FAILED: lambda journal: journal.failed(RuntimeError("a defect")),
    Event.MESSAGE_DROPPED: lambda journal: journal.message_dropped(Unreadable("a reason", "ADD", (1, 2)), 0, 0),
    Event.REPLAY_REFUSED: lambda journal: journal.replay_refused(0, "whoever asked has gone"),
    Event.OUTPUT_REFUSED: lambda journal: journal.output_refused(0, "tcp://10.0.0.1:5555: it does not speak ZMTP"),
    Event.CLIENT_STALLED: lambda journal: journal.client_stalled(0, 70_000),
    Event.REQUEST_STARTED: lambda journal: journal.request_started(SERVED),
    Event.REQUEST_FINISHED: lambda journal: journal.request_finished(SERVED, "length", 0.5),
    Event.RELEASE_CONTRADICTED: lambda journal: journal.release_contradicted("0.24", 20),
    Event.PROFILE_DIFFERS: lambda journal: journal.profile_differs(
        "profile.yaml", ["max_num_seqs: 256 here, 64 there"]
    ),
    Event.SCRIPT_RELOADED: lambda journal: journal.script_reloaded("replies.yaml", 12),
    Event.SCRIPT_REFUSED: lambda journal: journal.script_refused("replies.yaml", ["replies.yaml:3: a reason"]),
    Event.SETTINGS_CHANGED: lambda journal: journal.settings_changed({"itl_ms": 20.0}),
    Event.FAULT_FIRED: lambda journal: journal.fault_fired("flaky", "error", 0, "cmpl-1"),
    Event.REQUEST_REFUSED: lambda journal: journal.request_refused("cmpl-1", 0, 1, "a reason"),
    Event.KV_TRANSFER_IGNORED: lambda journal: journal.transfer_ignored("r1", 0, 0, "kv_role is none"),
}


class _Log:
    """Remembers the one line that is logged."""

    def __init__(self) -> None:
        self.entry: dict[str, Any] = {}

    def _note(self, event: str, **keys: Any) -> None:
        self.entry = {"event": str(event), **keys}

    info = warning = error = _note


# Said by the log itself, of what it lost.
BY_THE_LOG = {Event.LOG_LINES_DROPPED}


@pytest.mark.parametrize("event", [event for event in Event if event not in BY_THE_LOG])
def test_entry_has_the_keys_of_the_documented_example_in_their_order(event: Event) -> None:
    log = _Log()
    REPORTS[event](Journal(cast("FilteringBoundLogger", log), log_requests=True, chunk_size=1))
    example = EXAMPLES[event]
    assert log.entry["event"] == event
    # An exception is rendered from exc_info.
    logged = ["exception" if key == "exc_info" else key for key in log.entry]
    assert [key for key in logged if key in example or key != "hint"] == [
        key for key in example if key not in ("timestamp", "level")
    ]
    assert all(
        type(log.entry[key]) is type(value) or isinstance(value, int | float)
        for key, value in example.items()
        if key in log.entry
    )


def test_requests_are_not_logged_when_switched_off() -> None:
    log = _Log()
    journal = Journal(cast("FilteringBoundLogger", log), log_requests=False, chunk_size=1)
    journal.request_started(SERVED)
    journal.request_finished(SERVED, "length", 0.5)
    assert log.entry == {}
    journal.request_refused("cmpl-1", 0, 1, "a reason")
    assert log.entry["event"] == Event.REQUEST_REFUSED
