# SPDX-License-Identifier: Apache-2.0
"""Durations as people write them."""

import pytest
from pydantic import ValidationError
from pydantic_settings import BaseSettings

from mockengine.durations import ALLOWED_DURATIONS, DurationError, duration_ms
from mockengine.settings_types import Milliseconds


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("20ms", 20.0),
        ("1.5s", 1_500.0),
        ("250us", 0.25),
        ("250µs", 0.25),
        ("250μs", 0.25),
        ("40ns", 4e-5),
        ("2m", 120_000.0),
        ("1h", 3_600_000.0),
        ("12.5", 12.5),
        ("0", 0.0),
        (".5s", 500.0),
        ("3.", 3.0),
        ("2.5e-05", 2.5e-5),
        ("1e3us", 1.0),
        (" 20 ms ", 20.0),
        (7, 7.0),
        (0.125, 0.125),
    ],
)
def test_duration_is_read(text: object, milliseconds: float) -> None:
    assert duration_ms(text) == pytest.approx(milliseconds, rel=1e-12)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "fast",
        "20 msec",
        "20MS",
        "1s500ms",
        "1:30",
        "-5ms",
        -1,
        "ms",
        "1,5s",
        "nan",
        "inf",
        "1e999",
        "٣ms",
        "61m",
        "3600001",
        float("nan"),
        True,
        None,
    ],
)
def test_nonsense_is_refused_with_the_value_and_what_is_allowed(value: object) -> None:
    with pytest.raises(DurationError) as refused:
        duration_ms(value)
    assert str(refused.value).startswith(repr(value))
    assert f"(use {ALLOWED_DURATIONS})" in str(refused.value)


def test_long_nonsense_is_shortened() -> None:
    with pytest.raises(DurationError, match="…"):
        duration_ms("x" * 1_000)


def test_settings_may_be_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings(BaseSettings):
        itl_ms: Milliseconds = 0.0

    monkeypatch.setenv("ITL_MS", "1.5s")
    assert Settings().itl_ms == 1_500.0
    monkeypatch.setenv("ITL_MS", "soon")
    with pytest.raises(ValidationError, match="'soon' is not a duration"):
        Settings()
