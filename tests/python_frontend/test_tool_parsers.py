# SPDX-License-Identifier: Apache-2.0
"""All forms of tool calls are read by the parsers of the Python frontend, as a whole and streamed."""

import json
import re
import subprocess
from typing import Any

import pytest

from mockengine.replies.forms import load_form, tool_call_forms
from mockengine.replies.wish import ToolCall
from tests.support.python_frontend import python_frontend
from tests.support.stack import MODEL, ROOT
from tests.support.tool_checks import CALLS, WEATHER

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]

# Only the Rust frontend has the one; the other reads one call at most.
NOT_HERE = "qwen3_json"
READS_ONE_CALL = "internlm"
MARK = re.compile(r"<[^<>\s]*>|\[TOOL_CALLS\]")


def test_every_form_is_read() -> None:
    wanted = {parser: CALLS[:1] if parser == READS_ONE_CALL else CALLS for parser in tool_call_forms()}
    del wanted[NOT_HERE]
    texts = {
        parser: load_form(parser).said("", [ToolCall(call["name"], call["arguments"]) for call in calls])
        for parser, calls in wanted.items()
    }
    marks = {mark for parser in texts for mark in MARK.findall(load_form(parser).said("", [ToolCall("f", {})]))}
    given = {"model": str(MODEL), "tools": [WEATHER], "texts": texts, "marks": sorted({*marks, "<|python_tag|>"})}

    done = subprocess.run(
        [str(python_frontend(report=print)), str(ROOT / "tests" / "support" / "vllm_parsers.py")],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
        env={"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )

    assert done.returncode == 0, done.stderr[-2_000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert {parser: _arguments(calls) for parser, calls in read.items()} == {
        parser: [list(calls)] * 2 for parser, calls in wanted.items()
    }


def _arguments(read: Any) -> Any:
    """Return what was read with the arguments as they are; why nothing was, as it is."""
    if isinstance(read, str):
        return read
    return [[{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls] for calls in read]
