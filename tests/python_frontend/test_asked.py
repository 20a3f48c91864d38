# SPDX-License-Identifier: Apache-2.0
"""What clients of a real Python frontend may ask of a reply: the same as of a Rust one, and n of them."""

from collections.abc import Iterator

import pytest

from mockengine.testing.frontends import PythonFrontend
from tests.support import asked
from tests.support.python_frontend import python_frontend
from tests.support.stack import MODEL, Stack, serving

pytestmark = [pytest.mark.python_frontend, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    frontend = PythonFrontend(python_frontend(report=print), MODEL)
    with frontend, serving(frontend, *asked.FLAGS) as stack:
        yield stack


@pytest.mark.parametrize("each", asked.ASKED, ids=lambda each: each.name)
def test_what_is_asked_is_answered(stack: Stack, each: asked.Asked) -> None:
    asked.is_answered(stack, each)


def test_the_lower_priority_goes_first(stack: Stack) -> None:
    asked.the_lower_priority_goes_first(stack)


def test_n_replies_are_requests_of_their_own_and_counted_together(stack: Stack) -> None:
    reply = asked.reply_to(stack, {"n": 3}, headers={"X-Request-Id": "three"})
    replies = [choice["token_ids"] for choice in reply["choices"]]
    assert replies[0] == list(asked.ASKED[0].tokens)
    assert len({tuple(tokens) for tokens in replies}) == 3
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (5, 27)
    started = [entry["request_id"] for entry in stack.engine.logged("request started")]
    assert [name.split("_")[0] for name in started if "three" in name] == ["0", "1", "2"]


def test_n_replies_with_a_seed_have_seeds_of_their_own(stack: Stack) -> None:
    reply = asked.reply_to(stack, {"n": 2, "seed": 7})
    (seven,) = [each for each in asked.ASKED if each.name == "seed"]
    first, second = (choice["token_ids"] for choice in reply["choices"])
    assert first == list(seven.tokens) != second
