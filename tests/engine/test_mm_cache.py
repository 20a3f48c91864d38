# SPDX-License-Identifier: Apache-2.0
"""Images and the like that a frontend believes to be remembered: which of them are, and what is said of the others."""

from dataclasses import replace

import pytest

from mockengine.engine.mm_cache import MmCache, MmCacheConfig
from mockengine.wire.lines import line_of_release
from mockengine.wire.outputs import FinishReason, RequestError
from mockengine.wire.requests import MultiModalFeature
from mockengine.wire.sampling import PoolingParams
from mockengine.wire.utility import UtilityCall
from tests.engine.test_batching import play
from tests.support.rig import CONFIG, Rig, request


def image(name: str, *, has_data: bool, mm_hash: str | None = "") -> MultiModalFeature:
    return MultiModalFeature("image", name, 0, 1, name if mm_hash == "" else mm_hash, has_data)


def new(*names: str) -> tuple[MultiModalFeature, ...]:
    return tuple(image(name, has_data=True) for name in names)


def known(*names: str) -> tuple[MultiModalFeature, ...]:
    return tuple(image(name, has_data=False) for name in names)


def test_by_default_frontends_are_taken_at_their_word() -> None:
    cache = MmCache(MmCacheConfig())
    assert cache.missing(known("a", "b")) == ()


def test_what_was_never_sent_is_missed_all_of_it_at_once() -> None:
    cache = MmCache(MmCacheConfig(items=3))
    assert cache.missing((*known("a"), *new("b"), *known("c", "a"))) == ("a", "c")
    assert cache.missing(known("b")) == ()
    assert cache.missing(new("a")) == ()
    assert cache.missing(known("a", "b")) == ()


def test_the_items_used_last_are_remembered() -> None:
    cache = MmCache(MmCacheConfig(items=2))
    cache.missing(new("a", "b"))
    cache.missing(known("a"))
    cache.missing(new("c"))
    assert cache.missing(known("b")) == ("b",)
    assert cache.missing(known("a", "c")) == ()


def test_what_a_request_names_does_not_make_room_for_others_of_it() -> None:
    cache = MmCache(MmCacheConfig(items=2))
    cache.missing(new("a", "b"))
    assert cache.missing((*new("c"), *known("a"))) == ()
    assert cache.missing(known("b")) == ("b",)


def test_an_item_without_a_hash_goes_by_its_identifier() -> None:
    cache = MmCache(MmCacheConfig(items=1))
    cache.missing((image("a", has_data=True, mm_hash=None),))
    assert cache.missing((image("a", has_data=False, mm_hash=None),)) == ()
    assert cache.missing((image("b", has_data=False, mm_hash="a"),)) == ()


def test_a_share_of_what_is_remembered_is_missed_and_the_same_on_every_run() -> None:
    def play_often(rate: float, seed: int = 0) -> list[bool]:
        cache = MmCache(MmCacheConfig(items=10, miss_rate=rate, seed=seed))
        rounds = [(cache.missing(new("a")), cache.missing(known("a"))) for _ in range(2_000)]
        assert not any(of_new for of_new, _ in rounds)
        return [bool(of_known) for _, of_known in rounds]

    some = play_often(0.3)
    assert sum(some) / len(some) == pytest.approx(0.3, abs=0.04)
    assert play_often(0.3) == some
    assert play_often(0.3, seed=1) != some
    assert set(play_often(1.0)) == {True}
    assert set(play_often(0.0)) == {False}


def test_what_was_missed_is_to_be_sent_again() -> None:
    cache = MmCache(MmCacheConfig(items=10, miss_rate=1.0))
    assert cache.missing(new("a")) == ()
    assert cache.missing(known("a")) == ("a",)
    assert cache.missing(new("a")) == ()


def test_memory_is_bounded_whatever_clients_name_their_images() -> None:
    cache = MmCache(MmCacheConfig(miss_rate=0.5))
    for number in range(70_000):
        cache.missing(known(str(number)))
    assert len(cache._times_named) == 2**16


@pytest.mark.parametrize(
    ("release", "hashes", "error"),
    [("0.33.0", ("x",), True), ("0.29.0", ("x",), False), ("0.26.0", (), False)],
)
def test_a_miss_tells_the_frontend_what_it_can_understand(
    release: str, hashes: tuple[str, ...], *, error: bool
) -> None:
    rig = Rig(replace(CONFIG, mm_cache=MmCacheConfig(items=8)), line=line_of_release(release))
    rig.add(request(mm_features=known("x")))
    rig.add(request("other", max_tokens=2, mm_features=new("y")))
    play(rig)
    (output,) = rig.outputs("r1")
    assert (output.finish_reason, tuple(output.mm_cache_miss_hashes)) == (FinishReason.ERROR, hashes)
    message = "cache miss: the engine does not hold the data of 1 of 1 multimodal items (send the request again)"
    assert output.error == (RequestError("multimodal_cache_miss", message, retryable=True) if error else None)
    assert rig.watcher.refused == [("r1", message)]
    assert rig.finish_reason("other") is FinishReason.LENGTH


def test_resetting_the_cache_forgets_what_was_sent() -> None:
    rig = Rig(replace(CONFIG, mm_cache=MmCacheConfig(items=8)))
    rig.add(request("r1", mm_features=new("x")), request("r2", mm_features=known("x")))
    play(rig)
    assert rig.finish_reason("r2") is FinishReason.LENGTH
    rig.receive(UtilityCall(0, 1, "reset_mm_cache", ()))
    rig.add(request("r3", mm_features=known("x")))
    play(rig)
    assert rig.finish_reason("r3") is FinishReason.ERROR


def test_a_pooling_request_that_misses_has_a_tensor_all_the_same() -> None:
    pooling = PoolingParams("embed", use_activation=True, dimensions=None)
    rig = Rig(replace(CONFIG, mm_cache=MmCacheConfig(items=8)))
    rig.add(request(sampling_params=None, pooling_params=pooling, mm_features=known("x")))
    (output,) = rig.outputs("r1")
    assert tuple(output.mm_cache_miss_hashes) == ("x",)
    assert output.pooling_output is not None


def test_a_turn_of_a_session_that_misses_ends_in_its_place() -> None:
    rig = Rig(replace(CONFIG, mm_cache=MmCacheConfig(items=8)))
    rig.add(request("s1", resumable=True, mm_features=new("x")))
    rig.add(request("s1", resumable=True, mm_features=known("y")), request("s1", resumable=True))
    play(rig)
    ends = [output.finish_reason for output in rig.outputs("s1") if output.finish_reason is not None]
    assert ends == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
