# SPDX-License-Identifier: Apache-2.0
"""Parts of grammars in llguidance's dialect of Lark: literals, choices, regexes, whole grammars of a client."""

import json
import re
from collections.abc import Iterable
from typing import Final

from mockengine.replies.structured.constraint import ConstraintError
from mockengine.replies.tokenizer import Tokenizer, load_llguidance

# The compiler calls itself for every rule that a rule begins with, and has some 2000 of them on its stack at most.
_MOST_RULES: Final = 500
# What a regex unfolds to; each further token of a reply costs 1 ms for every 2500 characters of it.
_MOST_UNFOLDED: Final = 5_000
_COUNTED: Final = re.compile(r"\{ *([0-9]*) *(?:, *([0-9]*) *)?\}")


def literal(text: str, tokenizer: Tokenizer) -> str:
    """Return an expression for exactly this text; what is an added token's text must come as that token."""
    pieces = [
        f"<[{tokenizer.added_ids[piece]}]>" if piece in tokenizer.added_ids else json.dumps(piece, ensure_ascii=False)
        for piece in _split(text, tokenizer.added_ids)
        if piece
    ]
    return " ".join(pieces) or '""'


def _split(text: str, added: Iterable[str]) -> list[str]:
    # Longer ones first, as a tokenizer takes them.
    names = sorted((name for name in added if name in text and name), key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]


def either(texts: Iterable[str], tokenizer: Tokenizer) -> str:
    """Return an expression for one of these texts."""
    return "(" + " | ".join(literal(text, tokenizer) for text in texts) + ")"


def regex(pattern: str) -> str:
    r"""Return an expression for text that matches all of `pattern`; `\d`, `\w` and `\s` are of ASCII, as in vLLM.

    Raises:
        ConstraintError: it unfolds to too much.

    """
    check_unfolded(pattern, "regex")
    text = load_llguidance().regex_to_lark(pattern, use_ascii="dws")
    return f"/{text}/".replace("\n", "\\n").replace("\r", "\\r") if pattern else '""'


def grammar(text: str) -> str:
    """Return a client's grammar, in Lark or GBNF, as Lark.

    Raises:
        ConstraintError: one that cannot be converted, or that is too large.

    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > _MOST_RULES:
        raise ConstraintError(f"grammar is too large: {len(lines)} lines; at most {_MOST_RULES} are compiled")
    check_unfolded(text, "grammar")
    load_llguidance()
    from llguidance.gbnf_to_lark import any_to_lark  # noqa: PLC0415  # of the extra `text`

    try:
        return any_to_lark(text)
    except Exception as error:  # it raises bare ones, and whatever goes wrong goes wrong because of the text
        raise ConstraintError(f"grammar is neither Lark nor GBNF: {str(error) or type(error).__name__}") from error


def check_unfolded(pattern: str, place: str) -> None:
    """Refuse a regex whose counted repetitions unfold to so much that every token would take long.

    Raises:
        ConstraintError: more than some thousand characters or classes.

    """
    if (size := _unfolded(pattern)) > _MOST_UNFOLDED:
        raise ConstraintError(
            f"{place} is too large: it unfolds to {size} parts; at most {_MOST_UNFOLDED} are compiled"
        )


def _unfolded(pattern: str) -> int:
    """Return how many characters or classes a regex has once `{…}` is written out; roughly, for any text."""
    groups, last, place = [0], 0, 0
    while place < len(pattern):
        character = pattern[place]
        counted = _COUNTED.match(pattern, place) if character == "{" else None
        if counted is not None:
            times = max(int(count or 0) for count in counted.groups(default="0"))
            groups[-1] += last * (times - 1) if times > 1 else 0
            last *= max(times, 1)
            place = counted.end()
            continue
        if character == "(":
            groups.append(0)
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        else:
            last = 1
            groups[-1] += 1
            place += character == "\\"
            if character == "[":
                place = max(pattern.find("]", place + 2), place)
        place += 1
    return sum(groups)
