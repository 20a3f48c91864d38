# SPDX-License-Identifier: Apache-2.0
"""Conversations with a real engine, played to ours: clients hear the same, envelope by envelope.

`tests/fixtures/make_sequences.py` tells how the recordings look. Those of one engine are played to one engine, in their
order, since what is hit depends on what came before. A message is delivered after as many steps as in the recording,
while the next step is computed. An engine that was idle begins a step with the first request that arrives.

Compared is everything but token ids, moments, and the order of outputs within an envelope: ours come row by row from
the running set, then those that say more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, TypeAlias

import pytest

from mockengine.engine.config import BatchingConfig, EngineConfig, LoraConfig
from mockengine.engine.core import EngineCore
from mockengine.engine.ranks import Ranks
from mockengine.engine.timing import TimingConfig
from mockengine.replies.key import SeedScope
from mockengine.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from mockengine.wire.outputs import EngineCoreOutput, Envelope, StepOutputs, UtilityReply
from mockengine.wire.requests import EngineCoreRequest, LoraRequest
from mockengine.wire.sampling import SamplingParams
from mockengine.wire.stats import SchedulerStats
from mockengine.wire.utility import UtilityCall
from tests.support.rig import CONFIG, Rig, request
from tests.wire.forms import recorded

Conversation: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, str]
"""Source and title of a conversation."""

CONVERSATIONS: Final[list[Conversation]] = [*recorded("sequences"), *recorded("pauses")]
NOBODY: Final[frozenset[int]] = frozenset()
UNTOLD: Final = "?"
BLOCK_SIZE: Final = 16
WITHOUT_KV_EVENTS: Final = ("s1", "s2", "s4", "mf_clients", "0.33.0 pauses sync", "0.33.0 pauses async")

# What conversations are about, by how their titles begin, that are not compared here.
OTHER_SUBJECTS: Final[Mapping[str, str]] = {
    "structured": "grammars",
    "collective_rpc nonsense": "workers",
    "SIGTERM": "shutdown",
}

# By which number of steps a message was late, by its number: it was recorded when it left, and taken in after a step.
LATE: Final[Mapping[Key, Mapping[int, int]]] = {("s2", "abort: client hangs up mid-stream"): {1: 1}}

# Requests with which an engine that was idle began, where more than the first had come by then.
CAME_TOGETHER: Final[Mapping[Key, int]] = {("mf_clients", "C pause abort from client 1 with one request each"): 2}

# A real engine tells client 0 alone that nothing is left to do, so that others may believe in the load that they heard
# of last, for ever. Here they hear of it too.
HEARS_THAT_LOAD_IS_GONE: Final[Mapping[Key, int]] = {
    ("mf_clients", "D abort of client 1's request while client 0 idle"): 1,
    ("0.32.0 async", "client 1 first"): 1,
    ("0.32.0 sync", "client 1 first"): 1,
}


def key_of(conversation: Conversation) -> Key:
    return conversation["source"], conversation["title"]


def subject(conversation: Conversation) -> str | None:
    """Tell what a conversation is about, if that is not to be compared here."""
    title = conversation["title"]
    return next((what for begin, what in OTHER_SUBJECTS.items() if title.startswith(begin)), None)


COMPARED: Final = [each for each in CONVERSATIONS if subject(each) is None]
WITH_KV_EVENTS: Final = [each for each in COMPARED if each["source"] not in WITHOUT_KV_EVENTS]


def engine_config(recorded_with: Mapping[str, Any]) -> EngineConfig:
    return replace(
        CONFIG,
        max_model_len=recorded_with["model_len"],
        clients=recorded_with["clients"],
        # Equal prompts got different replies, and blocks are named after these too.
        replies=replace(CONFIG.replies, seed_scope=SeedScope.REQUEST_ID),
        batching=BatchingConfig(
            max_num_seqs=recorded_with["seqs"],
            max_num_batched_tokens=recorded_with["batched"],
            num_gpu_blocks=recorded_with["blocks"],
            async_scheduling=recorded_with["is_async"],
        ),
        timing=TimingConfig(timing="instant"),
        loras=LoraConfig(max_loras=recorded_with.get("max_loras", 4), max_cpu_loras=4),
    )


@dataclass
class Heard:
    """What came of a conversation.

    Attributes:
        envelopes: with the client that each went to.
        kv: batches of KV events.

    """

    envelopes: list[tuple[int, Envelope]]
    kv: list[Sequence[KVCacheEvent]]


class Player:
    """Plays conversations to one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.rig = Rig(config)
        self.kv: list[Sequence[KVCacheEvent]] = []
        engine = EngineCore(0, config, self.rig.dialect, self.rig.watcher, self.kv.append)
        self.rig.ranks = Ranks([engine])

    def play(self, conversation: Conversation) -> Heard:
        late = LATE.get(key_of(conversation), {})
        together = CAME_TOGETHER.get(key_of(conversation), 1)
        steps, number = 0, 0
        for message in conversation["messages"]:
            if "in" in message:
                while number >= together and self._steps_heard < steps + late.get(number, 0) and self._turn():
                    pass
                number += 1
                self._deliver(message, begins=number >= together)
            elif message.get("stats") is not None:
                steps += 1
        return self._finish()

    def play_requests(self, conversation: Conversation) -> Heard:
        """Let a conversation leave in the cache what it left there, whatever else it was about."""
        for message in conversation["messages"]:
            if "add" in message:
                self._deliver(message)
        return self._finish()

    @property
    def _steps_heard(self) -> int:
        """Every step sends its statistics to one client."""
        return sum(isinstance(each, StepOutputs) and each.scheduler_stats is not None for _, each in self.rig.heard)

    def _deliver(self, message: Mapping[str, Any], *, begins: bool = True) -> None:
        rig, client = self.rig, message["in"]
        is_idle = rig.ranks.next_deadline(rig.now, NOBODY) is None
        if "abort" in message:
            rig.abort(*message["abort"], client=client)
        elif "call" in message:
            call_id, method, args = message["call"]
            rig.receive(UtilityCall(client, call_id, method, tuple(args)), client=client)
        else:
            rig.add(_asked(message))
            if is_idle and begins:
                self._turn()

    def _turn(self) -> bool:
        """Do what is due next, if anything is."""
        due = self.rig.ranks.next_deadline(self.rig.now, NOBODY)
        if due is None:
            return False
        self.rig.now = max(self.rig.now, due)
        self.rig._hear(self.rig.ranks.step(self.rig.now, NOBODY))
        return True

    def _finish(self) -> Heard:
        while self._turn():
            pass
        heard = Heard(self.rig.heard.copy(), self.kv.copy())
        self.rig.heard.clear()
        self.kv.clear()
        return heard


def _asked(message: Mapping[str, Any]) -> EngineCoreRequest:
    request_id, prompt, max_tokens, salt, skips_cache = message["add"]
    return request(
        request_id,
        prompt=prompt,
        client=message["in"],
        sampling_params=SamplingParams(max_tokens=max_tokens, skip_reading_prefix_cache=skips_cache),
        cache_salt=salt,
        lora_request=LoraRequest(*message["lora"]) if "lora" in message else None,
    )


@cache
def played(source: str) -> Mapping[str, Heard]:
    """Play the conversations of a recording; return what came of each, by title."""
    conversations = [each for each in CONVERSATIONS if each["source"] == source and subject(each) != "shutdown"]
    player = Player(engine_config(conversations[0]["config"]))
    return {
        each["title"]: player.play(each) if subject(each) is None else player.play_requests(each)
        for each in conversations
    }


# Envelopes in the form of the recordings.


def output_form(output: EngineCoreOutput) -> list[Any]:
    prefill = output.prefill_stats
    return [
        output.request_id,
        len(output.new_token_ids),
        "".join(event.type.name[0] for event in output.events),
        output.finish_reason,
        list(prefill.to_wire().values()) if prefill else None,
    ]


def stats_form(stats: SchedulerStats) -> list[Any]:
    prefix = stats.prefix_cache_stats
    return [
        stats.num_running_reqs,
        stats.num_waiting_reqs,
        stats.num_skipped_waiting_reqs,
        stats.kv_cache_usage,
        [
            int(prefix.reset),
            prefix.requests,
            prefix.queries,
            prefix.hits,
            prefix.preempted_requests,
            prefix.preempted_queries,
            prefix.preempted_hits,
        ],
    ]


def envelope_form(envelope: Envelope) -> Conversation:
    if isinstance(envelope, UtilityReply):
        return {"reply": [envelope.call_id, envelope.failure, envelope.result]}
    assert isinstance(envelope, StepOutputs)
    stats = envelope.scheduler_stats
    return {
        "outputs": sorted(output_form(output) for output in envelope.outputs),
        "stats": stats_form(stats) if stats else None,
        "finished": sorted(envelope.finished_requests) or None,
    }


def recorded_form(message: Mapping[str, Any]) -> Conversation:
    if "reply" in message:
        return {"reply": message["reply"]}
    outputs = sorted([output[0], len(output[1]), *output[2:]] for output in message["outputs"])
    finished = message["finished"]
    return {"outputs": outputs, "stats": message["stats"], "finished": None if finished is None else sorted(finished)}


def as_told(ours: Any, told: Any) -> Any:
    """Leave out of ours what the recording does not tell, and write numbers as text where it does."""
    if told == UNTOLD:
        return UNTOLD
    if isinstance(told, dict) and isinstance(ours, dict) and told.keys() == ours.keys():
        return {name: as_told(ours[name], told[name]) for name in told}
    if isinstance(told, list) and isinstance(ours, list) and len(told) == len(ours):
        return [as_told(one, other) for one, other in zip(ours, told, strict=True)]
    return f"{ours:.4f}" if isinstance(told, str) and isinstance(ours, float) else ours


def names(conversations: Sequence[Conversation]) -> list[str]:
    return [": ".join(key_of(conversation)) for conversation in conversations]


def test_it_is_known_what_is_not_compared() -> None:
    others = [what for each in CONVERSATIONS if (what := subject(each))]
    counts = {what: others.count(what) for what in sorted(set(others))}
    assert counts == {"grammars": 2, "shutdown": 3, "workers": 1}
    assert (len(COMPARED), len(CONVERSATIONS)) == (127, 133)


@pytest.mark.parametrize("conversation", COMPARED, ids=names(COMPARED))
def test_clients_hear_what_they_hear_of_a_real_engine(conversation: Conversation) -> None:
    heard = played(conversation["source"])[conversation["title"]]
    for client in range(conversation["config"]["clients"]):
        told = [recorded_form(message) for message in conversation["messages"] if message.get("out") == client]
        ours = [envelope_form(envelope) for destination, envelope in heard.envelopes if destination == client]
        if HEARS_THAT_LOAD_IS_GONE.get(key_of(conversation)) == client:
            assert ours.pop() == {"outputs": [], "stats": [0, 0, 0, 0.0, [0] * 7], "finished": None}
        assert as_told(ours, told) == told


# KV events: names of blocks are hashes that differ, so a block is told by the first request whose tokens are in it.


@dataclass
class Blocks:
    """The blocks that events of one engine are about.

    Attributes:
        texts: prompt and outputs of each request, by id.
        names: request, index among its blocks, and extra keys, by hash.

    """

    texts: dict[str, list[int]] = field(default_factory=dict)
    names: dict[int, tuple[str, int, Any]] = field(default_factory=dict)

    def form(self, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an event with names instead of hashes and tokens."""
        told = dict(event)
        if told["type"] == "BlockStored":
            parent = told.pop("parent_block_hash")
            told["parent"] = None if parent is None else self.names[parent]
            first = 0 if parent is None else told["parent"][1] + 1
            self._name(told["block_hashes"], first, told.pop("token_ids"), told["extra_keys"])
        if "block_hashes" in told:
            told["blocks"] = [self.names[block_hash] for block_hash in told.pop("block_hashes")]
        return told

    def _name(self, hashes: Sequence[int], first: int, tokens: Sequence[int], extra_keys: Sequence[Any]) -> None:
        start = first * BLOCK_SIZE
        assert len(tokens) == len(hashes) * BLOCK_SIZE
        owner = next(name for name, text in self.texts.items() if text[start : start + len(tokens)] == list(tokens))
        for index, (block_hash, keys) in enumerate(zip(hashes, extra_keys, strict=True), first):
            self.names[block_hash] = owner, index, keys


def event_map(event: KVCacheEvent) -> dict[str, Any]:
    """Return what is on the wire, where None is left out but for the keys that are always there."""
    match event:
        case BlockStored():
            fields = {name: getattr(event, name) for name in BlockStored.__slots__}
            fields["extra_keys"] = [list(keys) if keys else None for keys in event.extra_keys or ()]
        case BlockRemoved():
            fields = {name: getattr(event, name) for name in BlockRemoved.__slots__}
        case AllBlocksCleared():
            fields = {}
    always = {"parent_block_hash", "lora_id", "lora_name", "medium"}
    kept = {name: value for name, value in fields.items() if value is not None or name in always}
    return {"type": type(event).__name__, **kept}


def texts_said(conversation: Conversation) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    for message in conversation["messages"]:
        if "add" in message:
            texts[message["add"][0]] = list(message["add"][1])
        for request_id, tokens, *_ in message.get("outputs", ()):
            texts[request_id] = texts.get(request_id, []) + tokens
    return texts


def texts_heard(conversation: Conversation, heard: Heard) -> dict[str, list[int]]:
    texts = {message["add"][0]: list(message["add"][1]) for message in conversation["messages"] if "add" in message}
    for _, envelope in heard.envelopes:
        for output in envelope.outputs if isinstance(envelope, StepOutputs) else ():
            texts[output.request_id] += output.new_token_ids
    return texts


@cache
def batches_of(source: str) -> Mapping[str, tuple[Any, Any]]:
    """Return our and the recorded batches of KV events of every conversation, in the same form."""
    our_blocks, recorded_blocks = Blocks(), Blocks()
    forms: dict[str, tuple[Any, Any]] = {}
    for conversation in CONVERSATIONS:
        heard = played(source).get(conversation["title"]) if conversation["source"] == source else None
        if heard is None:
            continue
        our_blocks.texts |= texts_heard(conversation, heard)
        recorded_blocks.texts |= texts_said(conversation)
        forms[conversation["title"]] = (
            [[our_blocks.form(event_map(event)) for event in batch] for batch in heard.kv],
            [[recorded_blocks.form(event) for event in batch] for batch in conversation["kv"]],
        )
    return forms


@pytest.mark.parametrize("conversation", WITH_KV_EVENTS, ids=names(WITH_KV_EVENTS))
def test_routers_hear_what_they_hear_of_a_real_engine(conversation: Conversation) -> None:
    ours, told = batches_of(conversation["source"])[conversation["title"]]
    assert ours == told
