# SPDX-License-Identifier: Apache-2.0
"""Messages as plain msgpack sees them, without our readers: what two encodings are compared by."""

import gzip
import json
from array import array
from pathlib import Path
from typing import Any, Final

import msgpack
from hypothesis import HealthCheck, settings

FIXTURES: Final = Path(__file__).parent.parent / "fixtures"
ENVELOPE_DEFAULTS: Final[list[Any]] = [0, [], None, 0.0, None, None, None, None, None]
OUTPUT_DEFAULTS: Final[list[Any]] = ["", [], *[None] * 11, 0, *[None] * 5]
_LOGPROBS_POSITIONS: Final = (2, 3)
_LOGPROBS_ITEMS: Final = 5


SEARCH: Final = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
"""How hypothesis searches here: the same examples on every run, and no database of them beside the sources."""


def golden(name: str) -> bytes:
    """Return the bytes of one row of the protocol's table of golden bytes."""
    text = json.loads((FIXTURES / "golden.json").read_text())[name]
    return bytes.fromhex(text)


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the records of one file of captures."""
    text = gzip.decompress((FIXTURES / "captures" / f"{name}.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]


def plain(data: bytes) -> Any:
    """Decode with msgpack alone."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def padded_envelope(data: bytes) -> list[Any]:
    """Decode an EngineCoreOutputs of 0.33 with msgpack alone, and fill up what was cut off with its defaults."""
    envelope = plain(data)
    envelope += ENVELOPE_DEFAULTS[len(envelope) :]
    envelope[1] = [_padded_output(output) for output in envelope[1]]
    return list(envelope)


def _padded_output(output: list[Any]) -> list[Any]:
    padded = output + OUTPUT_DEFAULTS[len(output) :]
    for position in _LOGPROBS_POSITIONS:
        scores = padded[position]
        if scores is not None:
            padded[position] = scores + [None] * (_LOGPROBS_ITEMS - len(scores))
    return padded


def token_ids(*ids: int) -> "array[int]":
    """Make the value of a prompt."""
    return array("I", ids)
