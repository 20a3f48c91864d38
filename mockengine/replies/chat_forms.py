# SPDX-License-Identifier: Apache-2.0
"""What the user said last, found in a prompt: frontends send what a chat template has made of a conversation.

How templates mark who speaks is a table here. A prompt belongs to the first form of which it has a mark of the user,
since its template writes before any user does; and the last message begins at the last such mark, since that is where
the model too would see it begin, whoever wrote it.
"""

from dataclasses import dataclass
from typing import Final

# Some templates put the results of tools into the mouth of the user.
_OF_TOOLS: Final = "<tool_response>"
# Llama 2's puts the system's message into the user's first one.
_SYSTEM_END: Final = "<</SYS>>"


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How chat templates of some models mark who speaks.

    Attributes:
        models: that have it, for the docs.
        user: begins what a user says.
        ends: any of these ends it.
        turn: occurs once for everything that the model said since.
        begins_reply: whether it stands before the reply, too, that is asked for.

    """

    models: str
    user: str
    ends: tuple[str, ...]
    turn: str
    begins_reply: bool = True


FORMS: Final = (
    ChatForm("ChatML: Qwen, Hermes, SmolLM", "<|im_start|>user", ("<|im_end|>",), "<|im_start|>assistant"),
    ChatForm("Phi 4", "<|im_start|>user<|im_sep|>", ("<|im_end|>",), "<|im_start|>assistant"),
    ChatForm("Phi 3, GLM 4, Zephyr", "<|user|>", ("<|end|>", "<|assistant|>", "</s>"), "<|assistant|>"),
    ChatForm(
        "Llama 3",
        "<|start_header_id|>user<|end_header_id|>",
        ("<|eot_id|>",),
        "<|start_header_id|>assistant<|end_header_id|>",
    ),
    ChatForm("Llama 4", "<|header_start|>user<|header_end|>", ("<|eot|>",), "<|header_start|>assistant<|header_end|>"),
    ChatForm("Llama 2, Mistral", "[INST]", ("[/INST]",), "</s>", begins_reply=False),
    ChatForm("Gemma", "<start_of_turn>user", ("<end_of_turn>",), "<start_of_turn>model"),
    ChatForm("gpt-oss", "<|start|>user<|message|>", ("<|end|>",), "<|call|>", begins_reply=False),
    ChatForm("DeepSeek", "<｜User｜>", ("<｜Assistant｜>",), "<｜end▁of▁sentence｜>", begins_reply=False),  # noqa: RUF001  # such are its bars
    ChatForm(
        "Granite",
        "<|start_of_role|>user<|end_of_role|>",
        ("<|end_of_text|>",),
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    ChatForm(
        "Command R",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>",
        ("<|END_OF_TURN_TOKEN|>",),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    ChatForm("Kimi", "<|im_user|>user<|im_middle|>", ("<|im_end|>",), "<|im_assistant|>assistant<|im_middle|>"),
)


@dataclass(frozen=True, slots=True)
class UserMessage:
    """What a user said last.

    Attributes:
        text: without the white space around it.
        tool_rounds: how often the model has spoken since, as it does to call tools, whose results it then hears.

    """

    text: str
    tool_rounds: int = 0


def last_user_message(prompt: str) -> UserMessage | None:
    """Return what the user said last in the text of a prompt, or None where nobody is marked as the user."""
    found = [(place, -len(form.user), form) for form in FORMS if (place := prompt.find(form.user)) >= 0]
    if not found:
        return None
    first, _, form = min(found, key=lambda each: each[:2])
    begin = prompt.rfind(form.user)
    while True:
        start = begin + len(form.user)
        end = min((place for mark in form.ends if (place := prompt.find(mark, start)) >= 0), default=len(prompt))
        text = prompt[start:end].strip()
        if begin == first or not text.startswith(_OF_TOOLS):
            break
        begin = prompt.rfind(form.user, 0, begin)
    turns = prompt.count(form.turn, end) - form.begins_reply
    return UserMessage(text.partition(_SYSTEM_END)[2].strip() or text, max(0, turns))
