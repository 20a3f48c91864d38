# SPDX-License-Identifier: Apache-2.0
"""Replies that keep to what `structured_outputs` demands."""

from collections.abc import Mapping, Sequence

from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.choices import Limits
from mockengine.replies.structured.constraint import Constraint, ConstraintError, read_constraint
from mockengine.replies.structured.writer import StructuredWriter, Written
from mockengine.replies.tokenizer import Tokenizer


def constrained_tokens(
    asked: Asked,
    structured_outputs: Mapping[str, object],
    most: int,
    tokenizer: Tokenizer | None,
    writer: StructuredWriter | None,
    before: Sequence[int] = (),
    limits: Limits | None = None,
) -> list[int] | None:
    """Return a reply that keeps to a constraint, with EOS; None if there is no constraint.

    A reply whose EOS is ignored goes on with it, since nothing else may follow.

    Args:
        asked: what is asked.
        structured_outputs: what of it is the constraint.
        most: tokens of the reply at most.
        tokenizer: the model's, if there is one.
        writer: likewise.
        before: what is said before the constraint begins; it counts.
        limits: what of the vocabulary a client forbids.

    Raises:
        ReplyError: the constraint cannot be kept to, or nobody can.

    """
    params = asked.params
    constraint = _read(structured_outputs)
    if constraint is None:
        return None
    if tokenizer is None or writer is None:
        raise ReplyError(
            f"this engine has no tokenizer to write {constraint.kind} with (set tokenizer to the folder of the "
            "frontend's model)"
        )
    said = list(before[:most])
    # A constraint that nothing can be written to is refused, whether its turn comes or not.
    written = _written(writer, constraint, asked.key, max(1, most - len(said)), limits, params.min_tokens - len(said))
    said = [*said, *written.tokens][:most]
    if written.complete and len(said) < most and tokenizer.eos_ids:
        ignores_eos = params.eos_token_id is None
        said += [tokenizer.eos_ids[0]] * (most - len(said)) if ignores_eos else [params.eos_token_id or 0]
    return said


def _read(structured_outputs: Mapping[str, object]) -> Constraint | None:
    try:
        return read_constraint(structured_outputs)
    except ConstraintError as error:
        raise ReplyError(str(error)) from error


def _written(
    writer: StructuredWriter, constraint: Constraint, key: int, most: int, limits: Limits | None, least: int
) -> Written:
    try:
        return writer.write(constraint, key, most, limits, min(least, most))
    except ConstraintError as error:
        raise ReplyError(str(error)) from error
    except Exception as error:
        # Whatever a client's constraint does to what reads it, it costs that client's request and no other.
        raise ReplyError(f"structured_outputs cannot be read: {type(error).__name__}: {error}") from error
