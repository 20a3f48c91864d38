# SPDX-License-Identifier: Apache-2.0
"""What identifies a reply: the number from which all of its tokens follow."""

import re
from enum import StrEnum
from hashlib import blake2b
from typing import Final

from mockengine.wire.requests import EngineCoreRequest

KEY_BYTES: Final = 8
_UINT64: Final = 2**64
_CHILD_OF_N = re.compile(r"([0-9]{1,9})_")


class SeedScope(StrEnum):
    """What a reply depends on besides the engine's seed."""

    PROMPT = "prompt"
    REQUEST_ID = "request_id"


def reply_key(request: EngineCoreRequest, seed: int, scope: SeedScope) -> int:
    """Return the 64-bit key of the reply to `request`.

    In scope `prompt` it follows from the engine's seed, the prompt, the adapter's name, the request's own seed and its
    index among the n replies to one prompt, so the same prompt gets the same reply on every run, rank and frontend.
    Images and the like count by the hash that the frontend gives them. In scope `request_id` it follows from the
    engine's seed and the id, as in vLLM's own mock engine; frontends put random bits into ids, so no two runs agree. A
    request that asks to be reproducible (temperature 0 or a seed) is, in any scope.
    """
    digest = blake2b(seed.to_bytes(8, "little"), digest_size=KEY_BYTES)
    if scope is SeedScope.REQUEST_ID and not _wants_to_be_reproducible(request):
        digest.update(request.request_id.encode())
    else:
        digest.update(_own_seed(request))
        digest.update(_child_index(request.request_id).to_bytes(8, "little"))
        digest.update(_prompt_bytes(request))
        for feature in request.mm_features:
            digest.update((feature.mm_hash or feature.identifier).encode("utf-8", "surrogatepass"))
        if request.lora_request is not None:
            digest.update(request.lora_request.name.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")


def _wants_to_be_reproducible(request: EngineCoreRequest) -> bool:
    params = request.sampling_params
    return params is not None and (params.seed is not None or params.temperature == 0)


def _own_seed(request: EngineCoreRequest) -> bytes:
    params = request.sampling_params
    if params is None or params.seed is None:
        return b"-"
    return (params.seed % _UINT64).to_bytes(8, "little")


def _child_index(request_id: str) -> int:
    """Return i for the i-th of n replies to one prompt, which Python names `<i>_<id>`; other ids begin with a word."""
    match = _CHILD_OF_N.match(request_id)
    return int(match.group(1)) if match else 0


def _prompt_bytes(request: EngineCoreRequest) -> bytes:
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids.tobytes()
    return request.prompt_embeds.data if request.prompt_embeds is not None else b""
