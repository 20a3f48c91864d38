# SPDX-License-Identifier: Apache-2.0
"""Which values of settings cannot work together, each being allowed by itself."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from mockengine.settings_types import MAX_RANKS, acceptance_rates, task_names

_MAX_PORT: Final = 2**16 - 1


def _ranks_have_an_identity(start_rank: int, engine_count: int) -> str | None:
    if start_rank + engine_count <= MAX_RANKS:
        return None
    return (
        f"the last rank would be {start_rank + engine_count - 1}, the highest there is is {MAX_RANKS - 1} "
        f"(use a start_rank of at most {MAX_RANKS - engine_count})"
    )


def _ranks_fit(start_rank: int, engine_count: int, data_parallel_size: int | None) -> str | None:
    needed = start_rank + engine_count
    if data_parallel_size is None or needed <= data_parallel_size:
        return None
    return (
        f"the last rank would be {needed - 1}, the highest of {data_parallel_size} is {data_parallel_size - 1} "
        f"(use a data_parallel_size of at least {needed}, or a smaller start_rank or engine_count)"
    )


def _a_step_serves_every_request(max_num_batched_tokens: int, max_num_seqs: int) -> str | None:
    if max_num_batched_tokens >= max_num_seqs:
        return None
    return (
        "a step could not give every running request one token, so vLLM refuses this too "
        f"(use a max_num_batched_tokens of at least {max_num_seqs}, or a smaller max_num_seqs)"
    )


def _the_longest_request_fits(max_model_len: int, block_size: int, num_gpu_blocks: int) -> str | None:
    capacity = num_gpu_blocks * block_size
    if capacity >= max_model_len:
        return None
    needed = -(-max_model_len // block_size)
    return (
        f"the KV cache holds {capacity} tokens, fewer than the longest request, so vLLM refuses this too "
        f"(use a num_gpu_blocks of at least {needed}, or a max_model_len of at most {capacity})"
    )


def _the_cache_keeps_a_block_to_itself(
    load_model: str, max_model_len: int, block_size: int, num_gpu_blocks: int
) -> str | None:
    usable = (num_gpu_blocks - 1) * block_size
    if load_model == "off" or usable >= max_model_len:
        return None
    needed = 1 - (-max_model_len // block_size)
    return (
        f"one block is never used, as in vLLM, and the others hold {usable} tokens, fewer than the longest request "
        f"(use a num_gpu_blocks of at least {needed}, or a max_model_len of at most {usable})"
    )


def _steps_have_a_scheduler(load_model: str, timing: str) -> str | None:
    if timing in ("instant", "per_request") or load_model != "off":
        return None
    return f"without a scheduler there are no steps that could take time (use load_model=vllm with timing={timing})"


def _a_profile_is_fitted(timing: str, timing_profile: str | None) -> str | None:
    if (timing == "fitted") == (timing_profile is not None):
        return None
    if timing_profile is None:
        return "a profile says how long steps take (set timing_profile to a file that mockengine fit has made)"
    return f"timing {timing} uses no profile (use timing=fitted, or unset timing_profile)"


def _events_come_from_a_cache(load_model: str, kv_events_endpoint: str | None) -> str | None:
    if load_model != "off" or kv_events_endpoint is None:
        return None
    return "without a load_model there is no KV cache that something could happen to (use load_model=vllm)"


def _needs_a_scheduler(default: object, load_model: str, value: object) -> str | None:
    """Explain that a value would be without effect where nobody waits and nothing is full."""
    if load_model != "off" or value == default:
        return None
    return "without a load_model it changes nothing (use load_model=vllm, or leave it out)"


def _is_about_events(default: object, kv_events_endpoint: str | None, value: object) -> str | None:
    if kv_events_endpoint is not None or value == default:
        return None
    return "nothing is published (set kv_events_endpoint too)"


def _replays_are_of_something(kv_events_endpoint: str | None, kv_events_replay_endpoint: str | None) -> str | None:
    if kv_events_replay_endpoint is None or kv_events_endpoint is not None:
        return None
    return "nothing is published that could be repeated (set kv_events_endpoint too)"


def _blocks_come_from_a_cache(load_model: str, kv_role: str) -> str | None:
    if load_model != "off" or kv_role == "none":
        return None
    return "without a load_model there are no blocks that could be exchanged (use load_model=vllm)"


def _is_about_transfers(default: object, kv_role: str, value: object) -> str | None:
    if kv_role != "none" or value == default:
        return None
    return "nothing is exchanged with other instances (use kv_role=producer, consumer or both, or leave it out)"


def _drafts_or_transfers(kv_role: str, spec_tokens: int) -> str | None:
    if kv_role == "none" or not spec_tokens:
        return None
    return "drafts are not played in disaggregation (leave out spec_tokens, or kv_role)"


def _every_rank_has_a_side_channel(
    start_rank: int, engine_count: int, kv_role: str, nixl_side_channel_port: int
) -> str | None:
    last = start_rank + engine_count - 1
    if kv_role == "none" or nixl_side_channel_port + last <= _MAX_PORT:
        return None
    return (
        f"rank {last} would be at port {nixl_side_channel_port + last}, the highest there is is {_MAX_PORT} "
        f"(use a smaller nixl_side_channel_port, start_rank or engine_count)"
    )


def _words_are_of_a_tokenizer(tokenizer: str | None, reply_source: str) -> str | None:
    if tokenizer is not None or reply_source != "words":
        return None
    return "without a tokenizer no words are known (set tokenizer to the folder of the frontend's model)"


def _tools_are_found_with_a_tokenizer(tokenizer: str | None, tool_call_probability: float) -> str | None:
    if tokenizer is not None or not tool_call_probability:
        return None
    return "without a tokenizer no prompt can be read (set tokenizer to the folder of the frontend's model)"


def _reasoning_is_of_a_tokenizer(tokenizer: str | None, reasoning_length: str) -> str | None:
    if tokenizer is not None or reasoning_length in ("none", "0"):
        return None
    return "without a tokenizer its marks are not known (set tokenizer to the folder of the frontend's model)"


def _is_about_tasks(tasks: tuple[str, ...], default: object, supported_tasks: str, value: object) -> str | None:
    """Explain that a value is about tasks that the model has not."""
    if value == default or not set(tasks).isdisjoint(task_names(supported_tasks)):
        return None
    return f"supported_tasks names none of {', '.join(tasks)}, which it is about (add one, or leave it out)"


def _records_are_of_text(tokenizer: str | None, reply_dataset: str | None) -> str | None:
    if tokenizer is not None or reply_dataset is None:
        return None
    return "without a tokenizer no text can be said (set tokenizer to the folder of the frontend's model)"


def _there_are_records(reply_dataset: str | None, reply_dataset_lookup: str) -> str | None:
    if reply_dataset is not None or reply_dataset_lookup == "prompt":
        return None
    return "there is nothing to look up (set reply_dataset, or leave it out)"


def _steps_have_no_pace(load_model: str, timing: str, itl_ms: float) -> str | None:
    if load_model == "off" or timing == "per_request" or not itl_ms:
        return None
    return "steps of the scheduler have no pace of their own (use timing=per_request, or step_base_ms with timing=step)"


def _is_used_by(needed: str, default: float, timing: str, value: float) -> str | None:
    """Explain that a value belongs to another model of time, which would leave it without effect."""
    if timing == needed or value == default:
        return None
    return f"timing {timing} does not use it (use timing={needed}, or leave it out)"


def _a_spread_has_a_mean(mean: float, stddev: float) -> str | None:
    return "what takes no time cannot be spread (set the duration itself too)" if stddev and not mean else None


def _there_are_drafts(default: object, spec_tokens: int, value: object) -> str | None:
    if spec_tokens or value == default:
        return None
    return "there are no drafts (set spec_tokens to how many an output has, or leave it out)"


def _every_draft_has_a_rate(spec_tokens: int, acceptance_rate: str | None) -> str | None:
    rates = acceptance_rates(acceptance_rate) if spec_tokens and acceptance_rate is not None else 0.0
    if isinstance(rates, float) or len(rates) == spec_tokens:
        return None
    return f"the list is {len(rates)} long (use {spec_tokens} rates, or one number, or spec_tokens={len(rates)})"


def _one_decides_on_lengths(output_token_chunk_size: int, spec_tokens: int) -> str | None:
    if output_token_chunk_size == 1 or not spec_tokens:
        return None
    return "both say how many tokens an output has (use output_token_chunk_size=1, or spec_tokens=0)"


def _a_step_has_room_for_drafts(load_model: str, max_num_batched_tokens: int, spec_tokens: int) -> str | None:
    if load_model == "off" or spec_tokens < max_num_batched_tokens:
        return None
    return (
        "a step could not verify the drafts of one request, so vLLM refuses this too "
        f"(use a max_num_batched_tokens of at least {spec_tokens + 1}, or fewer spec_tokens)"
    )


def _there_are_adapters(default: object, max_loras: int, value: object) -> str | None:
    if max_loras or value == default:
        return None
    return "there are no adapters (set max_loras to how many run at once, or leave it out)"


def _slots_are_of_loaded_adapters(max_loras: int, max_cpu_loras: int | None) -> str | None:
    if max_cpu_loras is None or max_cpu_loras >= max_loras:
        return None
    return (
        "an adapter that runs is loaded, so vLLM refuses this too "
        f"(use a max_cpu_loras of at least {max_loras}, or a smaller max_loras)"
    )


def _two_listen_at_two_ports(handshake_address: str, admin_port: int) -> str | None:
    host, _, port = handshake_address.removeprefix("tcp://").rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]") or int(port) != admin_port:
        return None
    return f"the frontend's handshake socket listens at port {port} of this machine (use another admin_port)"


# Settings of one model of time, with what they are when they are left out.
_OF_REQUESTS: Final = {
    "itl_stddev_ms": 0.0,
    "ttft_ms": 0.0,
    "ttft_stddev_ms": 0.0,
    "prefill_ms_per_token": 0.0,
    "prefill_stddev_ms_per_token": 0.0,
    "time_factor_under_load": 1.0,
}
_OF_STEPS: Final = (
    "step_base_ms",
    "step_ms_per_prefill_token",
    "step_ms_per_decode",
    "step_ms_per_context_token",
    "step_jitter",
)
# Settings of the scheduler and of what is published, likewise.
_OF_LOAD: Final[Mapping[str, object]] = {
    "scheduling_policy": "fcfs",
    "long_prefill_token_threshold": 0,
    "time_factor_under_load": 1.0,
}
_OF_DRAFTS: Final[Mapping[str, object]] = {"acceptance_rate": None, "per_request_spec_decode_metrics": "summary"}
_OF_ADAPTERS: Final[Mapping[str, object]] = {"max_cpu_loras": None, "lora_load_ms": 0.0, "check_lora_paths": False}
_OF_TRANSFERS: Final[Mapping[str, object]] = {
    "kv_transfer_ms": 0.0,
    "kv_transfer_ms_per_token": 0.0,
    "kv_hold_ms": 0.0,
    "kv_engine_id": None,
    "nixl_side_channel_host": "localhost",
    "nixl_side_channel_port": 5_600,
}
_OF_EVENTS: Final[Mapping[str, object]] = {"kv_events_topic": None, "kv_events_buffer_steps": 10_000}
_COMBINATIONS: Final[tuple[tuple[tuple[str, ...], Callable[..., str | None]], ...]] = (
    (("start_rank", "engine_count"), _ranks_have_an_identity),
    (("start_rank", "engine_count", "data_parallel_size"), _ranks_fit),
    (("max_num_batched_tokens", "max_num_seqs"), _a_step_serves_every_request),
    (("max_model_len", "block_size", "num_gpu_blocks"), _the_longest_request_fits),
    (("load_model", "max_model_len", "block_size", "num_gpu_blocks"), _the_cache_keeps_a_block_to_itself),
    (("load_model", "timing"), _steps_have_a_scheduler),
    (("timing", "timing_profile"), _a_profile_is_fitted),
    (("load_model", "kv_events_endpoint"), _events_come_from_a_cache),
    (("kv_events_endpoint", "kv_events_replay_endpoint"), _replays_are_of_something),
    *((("load_model", name), partial(_needs_a_scheduler, default)) for name, default in _OF_LOAD.items()),
    *((("kv_events_endpoint", name), partial(_is_about_events, default)) for name, default in _OF_EVENTS.items()),
    *((("spec_tokens", name), partial(_there_are_drafts, default)) for name, default in _OF_DRAFTS.items()),
    (("spec_tokens", "acceptance_rate"), _every_draft_has_a_rate),
    (("output_token_chunk_size", "spec_tokens"), _one_decides_on_lengths),
    (("load_model", "max_num_batched_tokens", "spec_tokens"), _a_step_has_room_for_drafts),
    (("load_model", "kv_role"), _blocks_come_from_a_cache),
    (("kv_role", "spec_tokens"), _drafts_or_transfers),
    *((("kv_role", name), partial(_is_about_transfers, default)) for name, default in _OF_TRANSFERS.items()),
    (("start_rank", "engine_count", "kv_role", "nixl_side_channel_port"), _every_rank_has_a_side_channel),
    *((("max_loras", name), partial(_there_are_adapters, default)) for name, default in _OF_ADAPTERS.items()),
    (("max_loras", "max_cpu_loras"), _slots_are_of_loaded_adapters),
    (("tokenizer", "reply_source"), _words_are_of_a_tokenizer),
    (("tokenizer", "reasoning_length"), _reasoning_is_of_a_tokenizer),
    (("tokenizer", "tool_call_probability"), _tools_are_found_with_a_tokenizer),
    (("supported_tasks", "embedding_dim"), partial(_is_about_tasks, ("embed", "token_embed"), 256)),
    (("supported_tasks", "num_labels"), partial(_is_about_tasks, ("classify", "score", "token_classify"), 2)),
    (("tokenizer", "reply_dataset"), _records_are_of_text),
    (("reply_dataset", "reply_dataset_lookup"), _there_are_records),
    (("load_model", "timing", "itl_ms"), _steps_have_no_pace),
    *((("timing", name), partial(_is_used_by, "per_request", default)) for name, default in _OF_REQUESTS.items()),
    *((("timing", name), partial(_is_used_by, "step", 0.0)) for name in _OF_STEPS),
    (("itl_ms", "itl_stddev_ms"), _a_spread_has_a_mean),
    (("ttft_ms", "ttft_stddev_ms"), _a_spread_has_a_mean),
    (("prefill_ms_per_token", "prefill_stddev_ms_per_token"), _a_spread_has_a_mean),
    (("handshake_address", "admin_port"), _two_listen_at_two_ports),
)


def combination_problems(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names and the explanation of every combination in `values` that cannot work.

    `values` holds valid values by name; a combination that lacks one of its values is not judged.
    """
    for names, explain in _COMBINATIONS:
        if all(name in values for name in names):
            problem = explain(*(values[name] for name in names))
            if problem is not None:
                yield names, problem
