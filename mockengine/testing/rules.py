# SPDX-License-Identifier: Apache-2.0
"""What the frontend double does not put up with: one name per rule, and why the rule is one.

A rule is here for one of two reasons: a real frontend of some release suffers from the mistake, or no correct engine
makes it. What real frontends pass over and a correct engine may do is no mistake: outputs that were on their way when
their request was aborted, an empty `finished_requests`, an array shorter than its layout.

`python -m mockengine.testing.rules` prints the table of docs/testing.md.
"""

import sys
from enum import Enum


class Rule(Enum):
    """One thing that an engine must not do.

    Attributes:
        mistake: what it did.
        consequence: what real frontends do about it.
        section: of the protocol; REPLIES is the protocol's companion about replies.

    """

    def __init__(self, mistake: str, consequence: str, section: str) -> None:
        self.mistake = mistake
        self.consequence = consequence
        self.section = section

    # Start-up.

    STRANGER = (
        "a rank outside 0 … ranks - 1, or an identity that is not a rank's two bytes",
        "Python exits; Rust takes it for one of the ranks it waits for",
        "1.1, 1.7",
    )
    LOCAL = (
        "`local` of HELLO or READY is not false",
        "Python exits",
        "1.3, 1.7",
    )
    NOT_HEADLESS = (
        "`headless` of HELLO or READY is not true",
        "Python exits",
        "1.3, 1.7",
    )
    STATUS_UNREADABLE = (
        "a message on the handshake socket that is neither HELLO nor READY, each one frame with a map",
        "Python exits",
        "1.3",
    )
    HELLO_REPEATED = (
        "a second HELLO of a rank",
        "Python and Rust exit",
        "1.7",
    )
    READY_BEFORE_INIT = (
        "READY of a rank that INIT was not sent to",
        "Python exits",
        "1.2",
    )
    READY_BEFORE_GO_AHEAD = (
        "READY before the coordinator's go-ahead",
        "Rust exits, if it serves a mixture of experts",
        "1.2",
    )
    READY_REPEATED = (
        "a second READY of a rank",
        "Python exits, if it still waits for other ranks",
        "1.2",
    )
    READY_LACKS_KEY = (
        "a READY without `num_gpu_blocks` and `dp_stats_address` for a frontend of 0.19",
        "Python 0.19 exits",
        "1.3",
    )
    SUBSCRIPTION_UNREADABLE = (
        "something else than the one byte 01 on the coordinator's socket",
        "READY comes for no rank, so the start-up hangs",
        "1.1, 7.5",
    )
    READY_RESPONSE_UNREADABLE = (
        "a ready response that is not one frame with a map",
        "Rust exits; Python exits or knows nothing of the engine",
        "1.5",
    )
    READY_RESPONSE_LACKS_KEY = (
        "a ready response without a key that frontends of the line require",
        "Python and Rust exit",
        "1.5, 13b",
    )
    READY_RESPONSE_WRONG_VALUE = (
        "a ready response with a value of the wrong type, a size of 0, an unknown `dtype`, or not INIT's stats address",
        "Rust exits; Python does for the address",
        "1.5",
    )
    READY_RESPONSE_LORA_CONTRADICTION = (
        "`supports_lora` without `max_loras`, or the reverse",
        "Rust exits",
        "1.5, REPLIES 9",
    )
    READY_RESPONSE_REPEATED = (
        "a second ready response of a rank on one input socket",
        "none is known to read it; no correct engine sends it",
        "1.2",
    )

    # Any envelope.

    UNMANAGED_RANK = (
        "an `engine_index` that is no rank of the frontend",
        "Python exits; a Python coordinator ends",
        "0.6",
    )
    WAVE_TO_CLIENT = (
        "a wave message on a client's socket",
        "Rust serves nothing any more",
        "0.3",
    )
    WRONG_FOR_COORDINATOR = (
        "something else than statistics or a wave on the coordinator's socket",
        "a Python coordinator ends",
        "7.1",
    )
    TIME_REVERSED = (
        "a step's timestamp before that of an earlier one of the same rank on the same socket",
        "latencies below zero in the metrics",
        "0.10, 5",
    )
    IMPOSSIBLE_STATS = (
        "more requests running and waiting than were asked for, a `kv_cache_usage` outside 0 … 1, or too many hits",
        "gauges stick at wrong values and requests go to the wrong ranks",
        "5, 7.4",
    )

    # Utility calls.

    ANSWER_REPEATED = (
        "a second answer to a utility call",
        "Python exits",
        "0.7",
    )
    ANSWER_UNKNOWN = (
        "an answer under an id that no call had, or under -1",
        "Python exits",
        "0.7, 6",
    )
    ANSWER_TO_ANOTHER_CLIENT = (
        "an answer on another socket than that of the client that called",
        "Python exits there, and who called waits for ever",
        "0.7, 6",
    )
    ANSWER_OF_ANOTHER_RANK = (
        "an answer in the name of another rank than the one that was called",
        "no difference is known; no correct engine does it",
        "4.1, 6",
    )

    # Requests.

    OUTPUT_UNKNOWN = (
        "an output for a request that was never made",
        "passed over; no correct engine sends it",
        "4.2",
    )
    OUTPUT_TO_ANOTHER_CLIENT = (
        "an output on another socket than that of the client that asked",
        "passed over there, and who asked waits for ever",
        "3.1, 8.8",
    )
    OUTPUT_OF_ANOTHER_RANK = (
        "an output in the name of another rank than the one that was asked",
        "counted for the wrong rank",
        "4.1",
    )
    SECOND_FINAL = (
        "a second output with a finish reason",
        "passed over; no correct engine sends it",
        "4.2, 8.1",
    )
    OUTPUT_AFTER_FINAL = (
        "an output after the one with the finish reason",
        "passed over, so its tokens are lost",
        "4.2, 8.1",
    )
    EVENTS_MISSING = (
        "the first tokens, or an end without any, before QUEUED and SCHEDULED were told",
        "nonsense for queue and prefill times in the metrics",
        "4.2, 5",
    )
    EVENTS_OUT_OF_ORDER = (
        "events that are not in the order of their times, or later than the envelope they come in",
        "times below zero in the metrics",
        "5",
    )
    PREFILL_STATS_MISSING = (
        "the first tokens without `prefill_stats`, on lines whose requests tell where those belong",
        "prompt tokens are not counted",
        "4.4",
    )
    PREFILL_STATS_WRONG = (
        "`prefill_stats` that do not add up, or of another prompt length than the request's",
        "prompt tokens are counted wrongly",
        "0.5, 4.4",
    )
    PREFILL_STATS_REPEATED = (
        "`prefill_stats` a second time",
        "prompt tokens are counted twice",
        "4.4, 8.5",
    )
    LOGPROBS_NOT_ASKED = (
        "scores that were not asked for, or scores of the prompt after the first tokens",
        "Python exits",
        "4.3, REPLIES 5",
    )
    LOGPROBS_MISSING = (
        "tokens without the scores that were asked for",
        "an HTTP 500",
        "4.3, REPLIES 5",
    )
    LOGPROBS_MALFORMED = (
        "scores in other than one row per token, arrays where tensors are due or the reverse, or `new_logprobs` of 5",
        "Python exits, or answers an HTTP 500",
        "4.3, REPLIES 0, 5",
    )
    POOLING_WITHOUT_TENSOR = (
        "an output of a pooling request without a tensor, whatever its end, or with an array in its place",
        "Python exits",
        "3.3, REPLIES 0, 6",
    )
    POOLING_NOT_ASKED = (
        "a pooling output for a request that was to generate",
        "not tried; no correct engine sends it",
        "3.3",
    )
    FINISHED_BEFORE_FINAL = (
        "an id in `finished_requests` before its final output, unless it was aborted",
        "Rust answers an HTTP 500",
        "0.11, 4.5",
    )
    FINISHED_REPEATED = (
        "an id in `finished_requests` for the second time",
        "passed over; no correct engine sends it",
        "4.5",
    )
    FINISHED_UNKNOWN = (
        "an id in `finished_requests` that was never requested",
        "passed over; no correct engine sends it",
        "4.5",
    )
    FINISHED_TO_ANOTHER_CLIENT = (
        "an id in `finished_requests` on another socket than that of the client that asked, or of another rank",
        "passed over there, so Python's count of what the rank has to do leaks",
        "4.5",
    )


class EngineMistakeError(AssertionError):
    """The engine broke a rule of the protocol; the text says how, and what a real frontend would do.

    Attributes:
        rule: the rule.

    """

    def __init__(self, rule: Rule, found: str) -> None:
        """Make the error of breaking `rule`; `found` says where it was broken."""
        super().__init__(f"{rule.name}: {found} ({rule.mistake}: {rule.consequence}; protocol section {rule.section})")
        self.rule = rule


def table() -> str:
    """Return all rules as a table in Markdown, for docs/testing.md."""
    rows = ["| rule | the engine's mistake | what real frontends do | protocol |", "|---|---|---|---|"]
    rows += [f"| `{rule.name}` | {rule.mistake} | {rule.consequence} | {rule.section} |" for rule in Rule]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
