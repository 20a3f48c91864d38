# SPDX-License-Identifier: Apache-2.0
"""What the user said last is found in prompts as the chat templates of many models write them."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mockengine.replies.asked import Asked
from mockengine.replies.chat_forms import FORMS, UserMessage, last_user_message
from mockengine.replies.tokenizer import Tokenizer
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import SamplingParams
from tests.support.docs import table

# Each is asked "One?", has answered, is asked "Two?\nOr three?", and is to answer.
CHATS = {
    "ChatML": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\nYes."
        "<|im_end|>\n<|im_start|>user\nTwo?\nOr three?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "Phi 4": (
        "<|im_start|>user<|im_sep|>One?<|im_end|><|im_start|>assistant<|im_sep|>Yes.<|im_end|>"
        "<|im_start|>user<|im_sep|>Two?\nOr three?<|im_end|><|im_start|>assistant<|im_sep|>"
    ),
    "Phi 3": "<|user|>\nOne?<|end|>\n<|assistant|>\nYes.<|end|>\n<|user|>\nTwo?\nOr three?<|end|>\n<|assistant|>\n",
    "GLM 4": "[gMASK]<sop><|user|>\nOne?<|assistant|>\nYes.<|user|>\nTwo?\nOr three?<|assistant|>\n",
    "Zephyr": "<|user|>\nOne?</s>\n<|assistant|>\nYes.</s>\n<|user|>\nTwo?\nOr three?</s>\n<|assistant|>\n",
    "Llama 3": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\nYes.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nTwo?\nOr three?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "Llama 4": (
        "<|begin_of_text|><|header_start|>user<|header_end|>\n\nOne?<|eot|><|header_start|>assistant<|header_end|>\n\n"
        "Yes.<|eot|><|header_start|>user<|header_end|>\n\nTwo?\nOr three?<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\n"
    ),
    "Llama 2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nOne? [/INST] Yes. </s><s>[INST] Two?\nOr three? [/INST]",
    "Mistral": "<s>[INST]One?[/INST]Yes.</s>[INST]Two?\nOr three?[/INST]",
    "Gemma": (
        "<bos><start_of_turn>user\nOne?<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n"
        "<start_of_turn>user\nTwo?\nOr three?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "gpt-oss": (
        "<|start|>system<|message|>Be brief.<|end|><|start|>user<|message|>One?<|end|><|start|>assistant"
        "<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>Two?\nOr three?<|end|><|start|>assistant"
    ),
    "DeepSeek": (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>One?<｜Assistant｜>Yes.<｜end▁of▁sentence｜>"  # noqa: RUF001
        "<｜User｜>Two?\nOr three?<｜Assistant｜>"  # noqa: RUF001  # such are its bars
    ),
    "Granite": (
        "<|start_of_role|>user<|end_of_role|>One?<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Yes."
        "<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Two?\nOr three?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    ),
    "Command R": (
        "<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>One?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
        "<|CHATBOT_TOKEN|>Yes.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Two?\nOr three?"
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    ),
    "Kimi": (
        "<|im_user|>user<|im_middle|>One?<|im_end|><|im_assistant|>assistant<|im_middle|>Yes.<|im_end|>"
        "<|im_user|>user<|im_middle|>Two?\nOr three?<|im_end|><|im_assistant|>assistant<|im_middle|>"
    ),
}
# Asked "Weather?", has called a tool, and has its result.
AFTER_A_TOOL = {
    "ChatML": (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{}\n</tool_call><|im_end|>\n"
        "<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n"
    ),
    "Qwen": (
        "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n18\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ),
    "Llama 3": (
        "<|start_header_id|>user<|end_header_id|>\n\nWeather?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "f"}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n18<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "Mistral": '<s>[INST]Weather?[/INST][TOOL_CALLS][{"name": "f"}]</s>[TOOL_RESULTS]{"content": 18}[/TOOL_RESULTS]',
    "gpt-oss": (
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>18<|end|><|start|>assistant"
    ),
}


@pytest.mark.parametrize("model", CHATS)
def test_the_last_message_is_found(model: str) -> None:
    assert last_user_message(CHATS[model]) == UserMessage("Two?\nOr three?")


@pytest.mark.parametrize("model", CHATS)
def test_the_first_message_is_found_where_it_is_the_last(model: str) -> None:
    begun = CHATS[model].partition("Yes.")[0]
    assert last_user_message(begun) == UserMessage("One?")


@pytest.mark.parametrize("model", AFTER_A_TOOL)
def test_results_of_tools_are_not_the_users(model: str) -> None:
    assert last_user_message(AFTER_A_TOOL[model]) == UserMessage("Weather?", tool_rounds=1)


def test_a_message_that_quotes_another_template_is_whole() -> None:
    said = "What is [INST] hello [/INST] about, and <|user|>?"
    assert last_user_message(CHATS["ChatML"].replace("Two?\nOr three?", said)) == UserMessage(said)


def test_what_is_no_chat_has_no_message() -> None:
    assert last_user_message("") is None
    assert last_user_message("Once upon a time, a user said: hello") is None


@given(st.lists(st.sampled_from([mark for form in FORMS for mark in (form.user, *form.ends, form.turn)]) | st.text()))
def test_any_prompt_is_read(parts: list[str]) -> None:
    prompt = "".join(parts)
    found = last_user_message(prompt)
    assert (found is None) == (not any(form.user in prompt for form in FORMS))
    if found is not None:
        assert found.text in prompt
        assert found.tool_rounds >= 0


def _asked(tokens: list[int], tokenizer: Tokenizer | None) -> Asked:
    params = SamplingParams()
    request = EngineCoreRequest(request_id="r", prompt_token_ids=array("I", tokens), sampling_params=params)
    return Asked(request, params, 1, tokenizer)


def test_a_prompt_that_is_no_chat_is_a_message_without_the_tokens_that_begin_every_prompt(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode("Once upon a time")
    for begun in ([], [0], [0, 0]):
        assert _asked([*begun, *text], tokenizer).last_message == UserMessage("Once upon a time")
    assert _asked([0], tokenizer).last_message == UserMessage("")
    assert _asked(text, None).last_message is None
    chat = tokenizer.encode(CHATS["ChatML"])
    assert _asked(chat, tokenizer).last_message == UserMessage("Two?\nOr three?")


def test_the_docs_have_every_form() -> None:
    rows = table("### What the user said last")
    assert rows == [[form.models, f"`{form.user}`"] for form in FORMS]
