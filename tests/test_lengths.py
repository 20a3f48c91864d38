# SPDX-License-Identifier: Apache-2.0
"""Forms of lengths are read, and refused where they make no sense."""

from pathlib import Path

import pytest

from mockengine.lengths import LengthError, OutputLength, read_histogram, read_output_length


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("max_tokens", None),
        ("17", OutputLength("fixed", 17)),
        ("uniform:10:200", OutputLength("uniform", 10, 200)),
        ("normal:128:32.5", OutputLength("normal", 128, 32.5)),
        ("lognormal:128:0", OutputLength("lognormal", 128, 0)),
        ("histogram:/a/file:1", OutputLength("histogram", file="/a/file:1")),
    ],
)
def test_forms_are_read(text: str, form: OutputLength | None) -> None:
    assert read_output_length(text) == form


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is none of max_tokens, a number of tokens, uniform:LEAST:MOST"),
        ("none", "it is none of"),
        ("normal:5", "it is none of"),
        ("normal:5:x", "it is none of"),
        ("normal:-5:1", "it is none of"),
        ("histogram:", "it is none of"),
        ("0", "a length of 0 is not within 1 and 2147483647 tokens"),
        ("9999999999", "a length of 1e.10 is not within"),
        ("uniform:0:5", "a length of 0 is not within"),
        ("uniform:6:5", "the least length, 6, is above the most, 5"),
        ("normal:0:5", "a length of 0 is not within"),
        ("lognormal:0:5", "a length of 0 is not within"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(LengthError, match=words):
        read_output_length(text)


def test_a_histogram_has_a_length_and_perhaps_a_weight_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("# length, weight\n10, 1\n20 2.5  # often\n\n30\n40;0\n")
    assert read_histogram(path) == ([10, 20, 30, 40], [1, 2.5, 1, 0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file or directory .give a file"),
        (b"\xff\xfe", "it is not text .give a file"),
        (b"5 1\nfive\n", "line 2: 'five' is neither a length nor a length and a weight"),
        (b"5 -1\n", "line 1: '5 -1' is neither"),
        (b"0\n", "a length of 0"),
        (b"5 0\n", "has no length with a weight above 0"),
        (b"# nothing\n", "has no length with a weight above 0"),
    ],
)
def test_a_histogram_that_makes_no_sense_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "lengths.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LengthError, match=words):
        read_histogram(path)
