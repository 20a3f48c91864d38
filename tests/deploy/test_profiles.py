# SPDX-License-Identifier: Apache-2.0
"""The profiles that come along can be used, say where they are from, and are in the docs."""

from pathlib import Path

import pytest

from mockengine.fit.profile import load
from mockengine.settings import Settings
from tests.support.stack import ROOT

FILES = sorted((ROOT / "deploy" / "profiles").glob("*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_profile_says_what_it_is_of_and_where_it_is_from(path: Path) -> None:
    profile = load(path)

    assert all([profile.model, profile.gpu, profile.engine, profile.notes])
    assert profile.source.startswith("https://")
    assert profile.coefficients.step_base_ms > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_profile_is_in_the_docs_as_it_is(path: Path) -> None:
    profile = load(path)
    cost = profile.coefficients
    figures = (
        *(cost.step_base_ms, cost.step_ms_per_prefill_token),
        *(cost.step_ms_per_decode, cost.step_ms_per_context_token),
    )
    link = f"[`{path.name}`](../deploy/profiles/{path.name})"
    row = " | ".join([link, profile.model, profile.gpu, *(f"{figure:g}" for figure in figures)])

    assert f"| {row} |" in (ROOT / "docs" / "load-model.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_profile_can_be_set(path: Path) -> None:
    settings = Settings(load_model="vllm", timing="fitted", timing_profile=str(path))

    assert settings.timing_profile == str(path)
