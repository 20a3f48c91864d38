# SPDX-License-Identifier: Apache-2.0
"""Reads tool calls with the parsers of vLLM's Python frontend, which only its environment has: run by its Python.

On stdin is JSON of a model folder, of tools, and of texts by parser; on stdout comes JSON of what the parsers read in
each, as a whole and streamed token by token, or why that failed.
"""

import json
import sys
from typing import Any

from transformers import AutoTokenizer  # type: ignore[import-not-found]
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # type: ignore[import-not-found]
from vllm.tool_parsers import ToolParserManager  # type: ignore[import-not-found]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def main() -> None:
    """Read stdin, write stdout."""
    given = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    # Several parsers want their marks to be tokens.
    tokenizer.add_tokens(given["marks"])
    messages = [{"role": "user", "content": "Hello"}]
    request = ChatCompletionRequest(model="m", messages=messages, tools=given["tools"], tool_choice="auto")
    read: dict[str, Any] = {}
    for parser, text in given["texts"].items():
        make = ToolParserManager.get_tool_parser(parser)
        try:
            whole = make(tokenizer, request.tools).extract_tool_calls(text, request)
            calls = [[call.function.name, call.function.arguments] for call in whole.tool_calls]
            read[parser] = [calls, _streamed(make(tokenizer, request.tools), tokenizer, text, request)]
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is told
            read[parser] = repr(error)
    json.dump(read, sys.stdout)


def _streamed(parser: Any, tokenizer: Any, text: str, request: Any) -> list[list[str]]:
    calls: list[list[str]] = []
    before = ""
    ids_before: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        ids = [*ids_before, token]
        now = tokenizer.decode(ids)
        if now.endswith(_UNFINISHED):
            ids_before = ids
            continue
        delta = parser.extract_tool_calls_streaming(before, now, now[len(before) :], ids_before, ids, [token], request)
        before, ids_before = now, ids
        for part in (delta.tool_calls or []) if delta else []:
            if part.index == len(calls):
                calls.append(["", ""])
            calls[part.index][0] += part.function.name or ""
            calls[part.index][1] += part.function.arguments or ""
    return calls


if __name__ == "__main__":
    main()
