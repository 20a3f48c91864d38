# SPDX-License-Identifier: Apache-2.0
"""A search that takes too long is ended, and nothing of it is left."""

import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mockengine.regex_limit import LIMIT_S, RegexLimit

# Each takes more than the age of the world.
SLOW = [
    (r"(a+)+$", "a" * 80 + "b"),
    (r"(?:a|a)*b", "a" * 80),
    (r"(x+x+)+y", "x" * 80),
    (r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)y", "x" * 1_000),
    (r"(?=(a+)+b)c", "a" * 80),
]


@pytest.mark.parametrize(("pattern", "text"), SLOW)
def test_a_search_ends_that_would_not(pattern: str, text: str) -> None:
    limit = RegexLimit()
    began = time.process_time()
    with pytest.raises(TimeoutError, match=r"^a regex takes longer than 0\.1 s to search this prompt \(mend the regex"):
        limit.search(re.compile(pattern), text)
    assert time.process_time() - began < 3 * LIMIT_S
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_other_searches_find_what_is_there() -> None:
    limit = RegexLimit()
    found = limit.search(re.compile("b+"), "abbc")
    assert found is not None
    assert found[0] == "bb"
    assert limit.search(re.compile("x"), "abbc") is None
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_an_alarm_that_comes_late_does_nothing() -> None:
    RegexLimit().search(re.compile("a"), "a")
    signal.raise_signal(signal.SIGVTALRM)


def test_another_thread_searches_without_a_limit() -> None:
    limit = RegexLimit()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(limit.search, re.compile("a"), "a").result()
        there = pool.submit(RegexLimit).result()
    assert found is not None
    assert there.search(re.compile("a"), "a") is not None
    assert threading.current_thread() is threading.main_thread()
