# SPDX-License-Identifier: Apache-2.0
"""Replies that keep to what `structured_outputs` demands."""

from collections.abc import Sequence

from mockengine.replies.asked import Asked, ReplyError
from mockengine.replies.structured.constraint import Constraint, ConstraintError, read_constraint
from mockengine.replies.structured.writer import StructuredWriter, Written
from mockengine.replies.tokenizer import Tokenizer
from mockengine.wire.sampling import SamplingParams


def constrained_tokens(
    asked: Asked, most: int, tokenizer: Tokenizer | None, writer: StructuredWriter | None, before: Sequence[int] = ()
) -> list[int] | None:
    """Return a reply that keeps to a constraint, of at most so many tokens, with EOS; None if there is no constraint.

    What is said before the constraint begins counts. A reply whose EOS is ignored goes on with it, since nothing else
    may follow.

    Raises:
        ReplyError: the constraint cannot be kept to, or nobody can.

    """
    params = asked.params
    constraint = _read(params)
    if constraint is None:
        return None
    if tokenizer is None or writer is None:
        raise ReplyError(
            f"this engine has no tokenizer to write {constraint.kind} with (set tokenizer to the folder of the "
            "frontend's model)"
        )
    said = list(before[: most - 1])
    written = _written(writer, constraint, asked.key, most - len(said))
    said += written.tokens
    if written.complete and len(said) < most and tokenizer.eos_ids:
        ignores_eos = params.eos_token_id is None
        said += [tokenizer.eos_ids[0]] * (most - len(said)) if ignores_eos else [params.eos_token_id or 0]
    return said


def _read(params: SamplingParams) -> Constraint | None:
    try:
        return read_constraint(params.structured_outputs)
    except ConstraintError as error:
        raise ReplyError(str(error)) from error


def _written(writer: StructuredWriter, constraint: Constraint, key: int, most: int) -> Written:
    try:
        return writer.write(constraint, key, most)
    except ConstraintError as error:
        raise ReplyError(str(error)) from error
    except Exception as error:
        # Whatever a client's constraint does to what reads it, it costs that client's request and no other.
        raise ReplyError(f"structured_outputs cannot be read: {type(error).__name__}: {error}") from error
