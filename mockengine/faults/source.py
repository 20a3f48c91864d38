# SPDX-License-Identifier: Apache-2.0
"""Where rules come from: a file, or the text of a setting."""

from pathlib import Path
from typing import Final

from mockengine.faults.rules import Rule, RulesError, rules_of
from mockengine.replies.located import Located, Problem, read_json_lines, text_of

MOST_BYTES: Final = 2**20


def read_rules(setting: str) -> list[Rule]:
    """Read the rules that a setting holds, as JSON, or names the file of, in YAML or JSON.

    Raises:
        RulesError: they cannot be had, or anything is wrong with them.

    """
    if is_text(setting):
        problems: list[Problem] = []
        located = read_json_lines(setting.replace("\n", " "), problems)
        if problems:
            raise RulesError([each.text for each in problems])
        values = located.value
        return rules_of(Located(values[0] if isinstance(values, list) and values else None))
    path = Path(setting)
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RulesError([f"{path}: {error.strerror}"]) from error
    if len(data) > MOST_BYTES:
        raise RulesError([f"{path}: it has more than {MOST_BYTES} bytes"])
    return _rules_of_file(path, data)


def is_text(setting: str) -> bool:
    """Tell whether a setting holds rules itself."""
    return setting.lstrip()[:1] in ("[", "{")


def _rules_of_file(path: Path, data: bytes) -> list[Rule]:
    from mockengine.replies.yaml_values import read_yaml  # noqa: PLC0415 - most processes read no YAML

    problems: list[Problem] = []
    text = text_of(data, problems)
    # JSON is YAML.
    located = None if text is None else read_yaml(text, problems)
    if located is None or problems:
        raise RulesError([f"{path}:{each.line}: {each.text}" for each in sorted(problems)])
    return rules_of(located, str(path))
