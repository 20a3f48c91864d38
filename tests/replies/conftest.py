# SPDX-License-Identifier: Apache-2.0
"""One tokenizer and one writer for all tests: both take a while to make, and keep no state that shows."""

from pathlib import Path

import pytest

from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer

MODEL = Path(__file__).parents[2] / "deploy" / "model"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


@pytest.fixture(scope="session")
def writer(tokenizer: Tokenizer) -> StructuredWriter:
    return StructuredWriter(tokenizer)
