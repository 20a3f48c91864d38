# SPDX-License-Identifier: Apache-2.0
"""Every setting, once: its name, type, unit, default, bounds and one sentence.

The flag, the variable, the YAML key, `--help`, the table in the docs and the tests derive from the class `Settings`.
What a value must look like is in `settings_types`, which values cannot work together in `settings_rules`. None of them
knows where values come from (`settings_sources`), nor what the engine does with them.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, Self, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import Field, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from mockengine.settings_rules import combination_problems
from mockengine.settings_types import (
    MAX_INT32,
    MAX_RANKS,
    MOST_SPEC_TOKENS,
    USUAL_ACCEPTANCE_RATE,
    Address,
    Allowed,
    BlockSize,
    FormName,
    Host,
    Milliseconds,
    OptionalEndpoint,
    OptionalHash,
    OptionalModel,
    OptionalName,
    OptionalPath,
    OptionalRates,
    OptionalRules,
    OptionalToken,
    OptionalTopic,
    OutputLength,
    ReasoningLength,
    Seconds,
    SupportedTasks,
    Tokens,
    Unit,
    VllmVersion,
    either,
)

PREFIX: Final = "MOCKENGINE_"
LIVE: Final = frozenset(
    {
        *("time_scale", "timing_distribution", "ttft_ms", "ttft_stddev_ms", "prefill_ms_per_token"),
        *("prefill_stddev_ms_per_token", "itl_ms", "itl_stddev_ms", "time_factor_under_load"),
        *("step_base_ms", "step_ms_per_prefill_token", "step_ms_per_decode", "step_ms_per_context_token"),
        *("step_jitter", "max_num_seqs", "max_num_batched_tokens"),
        *("reply_source", "output_length", "default_output_tokens", "reasoning_length", "tool_call_probability"),
        *("steering", "log_requests", "log_level"),
    }
)
"""Settings that may change while the engine runs."""

_SECRETS: Final = frozenset({"admin_token"})
_MOST_AHEAD_BYTES: Final = 2**20
_MAX_SEED: Final = 2**64 - 1


class Settings(BaseSettings):
    """All settings of one process: immutable, and valid whenever it exists.

    `Settings(name=value)` takes what is not named from `MOCKENGINE_*` variables, then from the defaults, and raises
    pydantic's `ValidationError`. The command line reads flags and a file too and explains every problem to a person:
    `settings_sources.load`.
    """

    model_config = SettingsConfigDict(frozen=True, env_prefix=PREFIX, env_ignore_empty=True)

    # Joining the frontend, and leaving it
    handshake_address: Address = Field(
        default="tcp://127.0.0.1:29550",
        description="Address of the frontend's handshake socket.",
    )
    engine_count: Annotated[int, Unit("ranks")] = Field(
        default=1, ge=1, le=64, description="Number of data-parallel ranks that this process plays."
    )
    start_rank: int = Field(
        default=0, ge=0, le=MAX_RANKS - 1, description="First of the consecutive ranks that this process plays."
    )
    data_parallel_size: Annotated[int | None, Unit("ranks")] = Field(
        default=None,
        ge=1,
        le=MAX_RANKS,
        description="Number of ranks of the whole deployment; unset means start_rank + engine_count.",
    )
    join_timeout_s: Seconds = Field(
        default=0.0, description="How long to wait for a frontend before giving up; 0 waits without limit."
    )
    startup_ms: Milliseconds = Field(
        default=0.0,
        description=(
            "How long the engine starts, which is when a real one loads its model: from when a frontend has answered "
            "until it is told that the engine is ready."
        ),
    )
    parallel_config_hash: OptionalHash = Field(
        default=None,
        description=(
            "Hash that a Python frontend wants to see from the ranks of a mixture-of-experts model; its error message "
            "'Configuration mismatch' states the expected one."
        ),
    )
    vllm_version: VllmVersion = Field(
        default="auto",
        description="The vLLM release whose message layouts are spoken; auto tells it from what the frontend sends.",
    )
    rejoin: bool = Field(
        default=True, description="Wait for the next frontend when the frontend goes away, instead of exiting."
    )
    rejoin_grace_s: Seconds = Field(
        default=1.0,
        description="How long a lost frontend may come back on the same connection before its requests are dropped.",
    )
    leave_notice: Literal["dead", "none"] = Field(
        default="dead",
        description=(
            "What the frontend is told when the engine leaves: dead makes it unhealthy so that it is restarted, none "
            "leaves it waiting for an engine that is gone."
        ),
    )
    shutdown_timeout_s: Seconds = Field(
        default=0.0, description="How long running requests may go on after SIGTERM; 0 aborts them at once."
    )

    state_file: OptionalPath = Field(
        default=None,
        description=(
            "File of this engine alone that remembers the frontend, in a place that outlives the process, so that an "
            "engine that was killed and starts again can tell it that its requests are lost; unset remembers nothing."
        ),
    )

    resume: bool = Field(
        default=True,
        description=(
            "Go on serving the frontend of an engine that was killed, where state_file remembers it and it takes an "
            "engine that returns, as a Rust frontend does."
        ),
    )

    # Admin port
    admin_host: Host = Field(
        default="127.0.0.1", description="Address at which the admin port listens; the container image sets 0.0.0.0."
    )
    admin_port: int = Field(
        default=0,
        ge=0,
        le=2**16 - 1,
        description="Port for health, readiness and metrics over HTTP; 0 is off, the container image sets 29555.",
    )

    admin_token: OptionalToken = Field(
        default=None,
        description="Secret that whoever changes anything over HTTP has to send, as Authorization: Bearer SECRET.",
    )
    admin_insecure: bool = Field(
        default=False,
        description=(
            "Let anybody who reaches the admin port change things without admin_token, even where admin_host is not "
            "of this machine alone."
        ),
    )

    # The engine that is played
    max_model_len: Tokens = Field(default=32_768, description="Longest prompt and reply together.")
    block_size: BlockSize = Field(default=16, description="Size of one block of the KV cache.")
    num_gpu_blocks: Annotated[int, Unit("blocks")] = Field(
        default=16_384,
        ge=1,
        le=10_000_000,
        description="Number of blocks in the KV cache of each rank; a limit with load_model vllm, else only reported.",
    )
    max_num_seqs: Annotated[int, Unit("requests")] = Field(
        default=256,
        ge=1,
        le=65_536,
        description="Most requests that run at a time on each rank; a limit with load_model vllm, else only reported.",
    )
    max_num_batched_tokens: Tokens = Field(
        default=8_192,
        description="Most tokens in one step of a rank; a limit with load_model vllm, else only reported.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="Number format of the model, as reported to the frontend."
    )
    mm_cache_items: Annotated[int, Unit("items")] = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description=(
            "How many images, sounds and videos each rank remembers, those used last; one that a frontend believes to "
            "be remembered, and so names without its data, is else a cache miss; 0 takes its word for it."
        ),
    )
    mm_cache_miss_rate: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of items named without their data that are a cache miss although they are remembered.",
    )
    supported_tasks: SupportedTasks = Field(
        default="generate",
        description=(
            "What the model can do, as the Python frontend asks before it decides which routes it has; what is asked "
            "of it besides is refused."
        ),
    )

    world_size: Annotated[int, Unit("workers")] = Field(
        default=1,
        ge=1,
        le=1_024,
        description="Number of workers of each rank, as reported to the frontend; a collective_rpc answers for each.",
    )
    weight_transfer_backend: Literal["none", "nccl", "sparse_nccl", "nccl_m2n", "sharded_rdt", "ipc"] = Field(
        default="none",
        description="How a trainer may send other weights, under vLLM's names; none refuses them, as vLLM's default.",
    )
    sleep_ms: Milliseconds = Field(
        default=0.0, description="What it takes to fall asleep, at level 1 or 2, during which nothing else is done."
    )
    wake_up_ms: Milliseconds = Field(default=0.0, description="What it takes to wake up, all at once or each part.")

    # LoRA adapters
    max_loras: Annotated[int, Unit("adapters")] = Field(
        default=0,
        ge=0,
        le=1_024,
        description=(
            "Most different LoRA adapters of the requests that run at a time on each rank, others wait; 0 has no LoRA."
        ),
    )
    max_cpu_loras: Annotated[int | None, Unit("adapters")] = Field(
        default=None,
        ge=1,
        le=65_536,
        description=(
            "Most adapters that are loaded at a time; for one more the one goes that was unused for longest; unset is "
            "max_loras."
        ),
    )
    lora_load_ms: Milliseconds = Field(
        default=0.0, description="What it takes to load an adapter, during which nothing else is done."
    )
    check_lora_paths: bool = Field(
        default=False,
        description=(
            "Load adapters only from folders with an adapter_config.json that this process sees; otherwise any path "
            "will do."
        ),
    )

    # Load
    load_model: Literal["off", "vllm"] = Field(
        default="off",
        description=(
            "How requests share the engine: off runs whatever arrives at once; vllm queues, batches, caches and "
            "preempts as vLLM's scheduler does."
        ),
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="Which request goes first: the one that came first, or the one of least priority."
    )
    long_prefill_token_threshold: Annotated[int, Unit("tokens")] = Field(
        default=0,
        ge=0,
        le=MAX_INT32,
        description="Most tokens of one prompt in a step beside other requests; 0 is no limit of its own.",
    )
    enable_prefix_caching: bool = Field(
        default=True, description="Take the beginning of a prompt from the KV cache where it is there."
    )
    async_scheduling: bool = Field(
        default=True, description="Schedule a step while the one before it is computed, as on a GPU."
    )

    kv_events_endpoint: OptionalEndpoint = Field(
        default=None,
        description=(
            "Where rank 0 publishes what happens to the blocks of its KV cache, and rank r at the port r further on; "
            "unset publishes nothing."
        ),
    )
    kv_events_replay_endpoint: OptionalEndpoint = Field(
        default=None,
        description="Where rank 0 repeats what a subscriber has missed, and rank r likewise; unset is nowhere.",
    )
    kv_events_topic: OptionalTopic = Field(
        default=None, description="What subscribers to KV events choose by; unset is the empty topic."
    )
    kv_events_buffer_steps: Annotated[int, Unit("batches")] = Field(
        default=10_000, ge=1, le=1_000_000, description="How many batches of KV events can be repeated."
    )

    # Speculative decoding
    spec_tokens: Annotated[int, Unit("tokens")] = Field(
        default=0,
        ge=0,
        le=MOST_SPEC_TOKENS,
        description="Drafts of every output after the first: it has one token, and the accepted drafts; 0 is off.",
    )
    acceptance_rate: OptionalRates = Field(
        default=None,
        description=(
            "Accepted drafts, as a share of all; a list says for each position in which share of outputs the draft "
            f"there and all before it are accepted; unset is {USUAL_ACCEPTANCE_RATE}."
        ),
    )
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = Field(
        default="summary",
        description=(
            "What the last output of a request says of its drafts to frontends that know it: counts, with detailed "
            "those of each output too."
        ),
    )

    # Prefill/decode disaggregation
    kv_role: Literal["none", "producer", "consumer", "both"] = Field(
        default="none",
        description=(
            "The instance's part in prefill/decode disaggregation, with load_model vllm: producer computes prompts for "
            "others, consumer goes on with theirs; none takes no notice of kv_transfer_params."
        ),
    )
    kv_transfer_ms: Milliseconds = Field(
        default=0.0, description="What it takes to load the KV cache of a prompt from another instance."
    )
    kv_transfer_ms_per_token: Milliseconds = Field(
        default=0.0, description="What that takes besides for each token that is loaded."
    )
    kv_hold_ms: Milliseconds = Field(
        default=0.0,
        description=(
            "How long the blocks of a prompt that was computed for another instance wait until they are loaded, which "
            "takes as long as it would here; then they are free."
        ),
    )
    kv_engine_id: OptionalName = Field(
        default=None,
        description=(
            "Name under which other instances know this one, to which each of several ranks appends _dp and its "
            "number; unset is a new one at each start."
        ),
    )
    nixl_side_channel_host: Host = Field(
        default="localhost", description="Host at which other instances are told to find this one; nothing listens."
    )
    nixl_side_channel_port: int = Field(
        default=5_600, ge=1, le=2**16 - 1, description="Port likewise, of rank 0; rank r is r further on."
    )

    # Timing
    timing: Literal["instant", "per_request", "step", "fitted"] = Field(
        default="instant",
        description=(
            "How long everything takes: instant is no time, but for itl_ms; per_request gives every request moments of "
            "its own, by ttft_ms, prefill_ms_per_token and itl_ms; step gives the scheduler's steps durations, by the "
            "settings step_…, and fitted by timing_profile, both with load_model vllm."
        ),
    )
    timing_profile: OptionalPath = Field(
        default=None, description="Profile that mockengine fit made of a real deployment, for timing fitted."
    )
    itl_ms: Milliseconds = Field(
        default=0.0,
        description=(
            "Time from one token of a reply to the next, or from one chunk to the next; 0 is as fast as the frontend "
            "reads."
        ),
    )
    itl_stddev_ms: Milliseconds = Field(default=0.0, description="Standard deviation of itl_ms, with per_request.")
    ttft_ms: Milliseconds = Field(
        default=0.0,
        description="Time from when a request is scheduled to its first token, besides its prompt, with per_request.",
    )
    ttft_stddev_ms: Milliseconds = Field(default=0.0, description="Standard deviation of ttft_ms.")
    prefill_ms_per_token: Milliseconds = Field(
        default=0.0, description="What the first token takes longer for each token of an uncached prompt."
    )
    prefill_stddev_ms_per_token: Milliseconds = Field(
        default=0.0, description="Standard deviation of prefill_ms_per_token."
    )
    time_factor_under_load: float = Field(
        default=1.0,
        ge=0,
        le=1_000,
        description="By what the durations of a request are multiplied when max_num_seqs run, with per_request.",
    )
    step_base_ms: Milliseconds = Field(default=0.0, description="What every step takes.")
    step_ms_per_prefill_token: Milliseconds = Field(
        default=0.0, description="What a step takes besides for each token of a prompt that it computes."
    )
    step_ms_per_decode: Milliseconds = Field(
        default=0.0, description="What a step takes besides for each request that gets another token."
    )
    step_ms_per_context_token: Milliseconds = Field(
        default=0.0,
        description="What a step takes besides for each token of prompt and reply that those requests have so far.",
    )
    step_jitter: float = Field(
        default=0.0,
        ge=0,
        le=10,
        description="Standard deviation of a step's duration, as a fraction of it; the seed decides each.",
    )
    timing_distribution: Literal["normal", "lognormal", "gamma"] = Field(
        default="normal", description="How durations spread around their mean; none is ever below 0."
    )
    time_scale: float = Field(default=1.0, ge=0, le=1_000, description="By what all durations are multiplied.")
    max_buffered_bytes: Annotated[int, Unit("bytes")] = Field(
        default=64 * 2**20,
        ge=2**16,
        le=2**40,
        description=(
            "What may wait for each API server that does not read before its requests wait too; where replies take no "
            "time at most a mebibyte, since nothing is gained by running further ahead."
        ),
    )

    # Replies
    output_token_chunk_size: Tokens = Field(default=1, description="Tokens of a reply that go out in one message.")
    vocab_size: Tokens = Field(default=32_000, description="Token ids of replies lie below this number.")
    seed: int = Field(
        default=0, ge=0, le=_MAX_SEED, description="Chooses the replies: the same seed gives the same replies."
    )
    seed_scope: Literal["prompt", "request_id"] = Field(
        default="prompt",
        description=(
            "What a reply depends on besides the seed: prompt gives the same reply to the same prompt, request_id "
            "gives every request a reply of its own, as vLLM's mock does."
        ),
    )
    tokenizer: OptionalModel = Field(
        default=None,
        description=(
            "Folder of the model that the frontend serves, or its tokenizer.json; structured output and words need it, "
            "and no special token is then said by chance."
        ),
    )
    reply_source: Literal["random", "words", "echo"] = Field(
        default="random",
        description=(
            "What replies are made of: random tokens, random whole words, or the tokens of the prompt, which echo says "
            "again."
        ),
    )
    reply_script: OptionalPath = Field(
        default=None,
        description=(
            "File of rules, in YAML or JSON Lines, that say which requests get which replies; it is read again when it "
            "changes."
        ),
    )
    reply_dataset: OptionalPath = Field(
        default=None,
        description=(
            "File of conversations, or of prompts with completions, in JSON or JSON Lines, whose replies are said; it "
            "needs tokenizer."
        ),
    )
    reply_dataset_lookup: Literal["prompt", "in_order"] = Field(
        default="prompt",
        description=(
            "Which reply of reply_dataset a request gets: prompt is the one to its prompt, if there is any, in_order "
            "one after the other, from the beginning again after the last."
        ),
    )
    faults: OptionalRules = Field(
        default=None,
        description=(
            "What goes wrong on purpose: rules as JSON, or a file of them in YAML or JSON; docs/faults.md has all of "
            "them."
        ),
    )
    output_length: OutputLength = Field(
        default="max_tokens",
        description=(
            "How long replies get by themselves, the EOS that ends them included; max_tokens is as long as clients "
            "allow, who can have less anyway, and more by min_tokens or by ignoring EOS."
        ),
    )
    default_output_tokens: Annotated[int, Unit("tokens")] = Field(
        default=256,
        ge=0,
        le=MAX_INT32,
        description=(
            "Length of a reply whose client set no max_tokens, where output_length is max_tokens; 0 lets it fill the "
            "context."
        ),
    )

    reasoning_length: ReasoningLength = Field(
        default="none",
        description=(
            "How many words of reasoning come before an answer, with tokenizer; output_length does not count them, and "
            "thinking_token_budget of a client limits them."
        ),
    )
    reasoning_form: FormName = Field(
        default="qwen3",
        description=(
            "How reasoning is written: the name of the frontend's parser, or a file with a form of your own; a reply "
            "needs tokenizer for it."
        ),
    )
    tool_call_form: FormName = Field(
        default="hermes",
        description=(
            "How tool calls are written: the name of the frontend's parser, or a file with a form of your own; a reply "
            "needs tokenizer for it."
        ),
    )
    tool_call_probability: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description=(
            "How often a tool is called where the client leaves it to the model, tool_choice auto; tools are looked "
            "for in the prompt, with tokenizer."
        ),
    )
    steering: bool = Field(
        default=True,
        description=(
            "Let a client say what it wants of its reply, by keys of vllm_xargs that begin with mock; where it is off, "
            "requests that do are refused."
        ),
    )
    embedding_dim: Annotated[int, Unit("numbers")] = Field(
        default=256,
        ge=1,
        le=16_384,
        description="Length of an embedding; that of the model is its hidden_size.",
    )
    num_labels: Annotated[int, Unit("labels")] = Field(
        default=2,
        ge=1,
        le=1_024,
        description="Number of classes; with 1, classify says how relevant the two texts of a pair are to each other.",
    )

    # Logs
    log_requests: bool = Field(default=True, description="Log the start and the end of every request.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="How a log line looks: auto is console on a terminal and one JSON object a line elsewhere.",
    )

    @model_validator(mode="after")
    def _combinations_work(self) -> Self:
        problems = [f"{', '.join(names)}: {text}" for names, text in combination_problems(dict(self))]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def effective_data_parallel_size(self) -> int:
        """Number of ranks of the whole deployment, with the default filled in."""
        return self.data_parallel_size or self.start_rank + self.engine_count

    @property
    def pace_s(self) -> float:
        """Time between tokens where nothing else says how long anything takes."""
        return self.time_scale * self.itl_ms / 1_000

    @property
    def most_bytes_ahead(self) -> int:
        """What may wait for a client: less where the engine is not timed, and would only run ahead of the frontend."""
        is_timed = self.pace_s > 0 or self.timing != "instant"
        return self.max_buffered_bytes if is_timed else min(self.max_buffered_bytes, _MOST_AHEAD_BYTES)


# A group of `--help` and of the docs starts at the setting named here.
_GROUPS: Final = {
    "handshake_address": "Joining the frontend, and leaving it",
    "admin_host": "Admin port",
    "max_model_len": "The engine that is played",
    "max_loras": "LoRA adapters",
    "load_model": "Load",
    "spec_tokens": "Speculative decoding",
    "kv_role": "Prefill/decode disaggregation",
    "timing": "Timing",
    "output_token_chunk_size": "Replies",
    "log_requests": "Logs",
}


@dataclass(frozen=True, slots=True)
class Description:
    """All that a person needs to know about one setting, as text."""

    name: str
    group: str
    flag: str
    variable: str
    default: str
    allowed: str
    sentence: str
    is_switch: bool
    is_live: bool
    is_secret: bool


def describe() -> dict[str, Description]:
    """Describe every setting, by name, in the order of the class."""
    descriptions = {}
    group = ""
    for name, field in Settings.model_fields.items():
        group = _GROUPS.get(name, group)
        descriptions[name] = Description(
            name=name,
            group=group,
            flag="--" + name.replace("_", "-"),
            variable=PREFIX + name.upper(),
            default=as_text(field.default),
            allowed=_allowed(field),
            sentence=field.description or "",
            is_switch=field.annotation is bool,
            is_live=name in LIVE,
            is_secret=name in _SECRETS,
        )
    return descriptions


def as_text(value: object) -> str:
    """Return `value` as a person writes it in a flag, a variable or YAML; None is `unset`."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _allowed(field: FieldInfo) -> str:
    if field.annotation is bool:
        return "true or false"
    if get_origin(field.annotation) is Literal:
        return either(get_args(field.annotation))
    facts = {type(fact): fact for fact in field.metadata}
    if Allowed in facts:
        return str(facts[Allowed].text)
    kind = "a number" if field.annotation is float else "a whole number"
    unit = f" of {facts[Unit].name}" if Unit in facts else ""
    return f"{kind}{unit} from {facts[Ge].ge} to {facts[Le].le}"
