# SPDX-License-Identifier: Apache-2.0
"""Prompts of which somebody wishes that part be said to have come out of the cache."""

import pytest

from mockengine.engine.timing import TimingConfig
from mockengine.replies.wish import Wish
from mockengine.wire.stats import PrefillStats
from tests.engine.test_batching import play, steps
from tests.engine.test_own_timing import ENGINES, SCHEDULED, rig_of, said_at
from tests.support.rig import request


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("wished", "said"), [(0, 0), (30, 30), (39, 39), (4_000, 39)])
def test_so_many_tokens_are_said_to_have_been_cached(engine: str, wished: int, said: int) -> None:
    rig = rig_of(engine, {"own": Wish(cached_tokens=wished)})
    for name in ("before", "own"):
        rig.add(request(name, prompt=list(range(40)), max_tokens=2))
        play(rig)
    created = max(0, 32 - said) if engine in SCHEDULED else 0
    stats = PrefillStats(40, 40 - said, said, said, 0, num_cache_creation_tokens=created)
    assert [output.prefill_stats for output in rig.outputs("own")] == [stats] + [None] * (len(rig.outputs("own")) - 1)
    if engine in SCHEDULED:
        hits = [each.scheduler_stats.prefix_cache_stats.hits for each in steps(rig) if each.scheduler_stats]
        assert sum(hits) == 32, "the cache knows nothing of it"


def test_what_another_instance_has_computed_stays_within() -> None:
    stats = PrefillStats(100, 4, 96, 32, 64, 0)
    assert stats.with_cached_tokens(80) == PrefillStats(100, 20, 80, 16, 64, 16)
    assert stats.with_cached_tokens(20) == PrefillStats(100, 80, 20, 0, 20, 76)


def test_the_prompt_takes_what_is_left_of_it() -> None:
    timing = TimingConfig(timing="per_request", prefill_ms_per_token=1.0)
    rig = rig_of("moments, limited", {"own": Wish(cached_tokens=30)}, timing=timing)
    began = rig.now
    rig.add(request("own", prompt=list(range(100)), max_tokens=1))
    play(rig)
    assert said_at(rig, "own") == pytest.approx([began + 0.070], abs=1e-9)
