# SPDX-License-Identifier: Apache-2.0
"""How the list of tasks is written, and that every task that can be named is one that the engine knows."""

import pytest

from mockengine.engine import config
from mockengine.engine_setup import set_up
from mockengine.replies import pooling
from mockengine.settings import Settings
from mockengine.settings_types import GENERATION_TASKS, TASKS, ReasonError, task_names
from mockengine.wire.handshake import Init


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("generate", ("generate",)),
        ("embed,token_embed", ("embed", "token_embed")),
        ("embed, token_embed", ("embed", "token_embed")),
        ('["classify", "score"]', ("classify", "score")),
    ],
)
def test_tasks_are_a_list_with_commas_or_of_json(text: str, names: tuple[str, ...]) -> None:
    assert task_names(text) == names


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *(
            (text, "no task, or nothing")
            for text in ("", "[]", "plugin", "embed,", "embed;classify", "[1]", '[["embed"]]')
        ),
        *((text, "no list") for text in ("[embed]", '["embed"', "[" * 9_999)),
        ("embed,embed", "a task twice"),
    ],
)
def test_what_is_no_list_of_tasks_is_told(text: str, reason: str) -> None:
    with pytest.raises(ReasonError, match=reason):
        task_names(text)


def test_every_task_is_answered_with_tokens_or_with_numbers() -> None:
    assert set(TASKS) == {*GENERATION_TASKS, *pooling.TASKS}
    assert set(GENERATION_TASKS) == config.GENERATION_TASKS


def test_the_engine_is_told_of_tasks_and_shapes() -> None:
    setup = set_up(Settings(supported_tasks="embed,classify", embedding_dim=64, num_labels=3))
    init = Init(inputs=("tcp://a:1",), outputs=("tcp://a:2",))
    assert setup.config(init).supported_tasks == ("embed", "classify")
    assert (setup.replies.embedding_dim, setup.replies.num_labels) == (64, 3)
