# SPDX-License-Identifier: Apache-2.0
"""What the settings make of the engine: the part of them that stays when frontends come and go."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from mockengine.engine.config import BatchingConfig, ControlConfig, EngineConfig, KvTransferConfig, LoraConfig
from mockengine.engine.drafts import SpeculationConfig, even_rates
from mockengine.engine.mm_cache import MmCacheConfig
from mockengine.engine.timing import TimingConfig, make_timing
from mockengine.faults.injector import FaultListener, Injector, check_needs
from mockengine.faults.rules import RulesError
from mockengine.faults.source import read_rules
from mockengine.fit.profile import ProfileError
from mockengine.fit.profile import load as load_profile
from mockengine.lengths import LengthError, OutputLength, read_histogram, read_output_length, read_reasoning_length
from mockengine.regex_limit import RegexLimit
from mockengine.replies.dataset import Dataset, DatasetError, Lookup
from mockengine.replies.form_files import FormError
from mockengine.replies.forms import ToolCallForm, load_form
from mockengine.replies.key import SeedScope
from mockengine.replies.length import (
    LengthDraw,
    fixed_length,
    lognormal_length,
    normal_length,
    uniform_length,
    weighted_length,
)
from mockengine.replies.planner import RepliesConfig, ReplyKind
from mockengine.replies.reasoning import Reasoning
from mockengine.replies.reasoning_form import load_reasoning_form
from mockengine.replies.script_file import ScriptError, ScriptFile
from mockengine.replies.scripted import Scripted, ScriptListener
from mockengine.replies.steering import Steering
from mockengine.replies.structured.writer import StructuredWriter
from mockengine.replies.tokenizer import Tokenizer, TokenizerError
from mockengine.replies.tools import ToolCalling
from mockengine.replies.wish import WishSource
from mockengine.settings import Settings
from mockengine.settings_types import USUAL_ACCEPTANCE_RATE, acceptance_rates, task_names
from mockengine.wire.handshake import Init


class SetupListener(ScriptListener, FaultListener, Protocol):
    """Hears of what happens to what the settings name, while it runs."""


class SetupError(Exception):
    """The settings name something that cannot be used; the text says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """The engine as the settings have it, whatever its frontend.

    Attributes:
        settings: these.
        timing: how long everything takes.
        replies: what is said.
        kv_engine_id: name under which other instances know this one.
        injector: decides what goes wrong on purpose.
        profile_differences: what was otherwise where the timing profile was made, a sentence each.

    """

    settings: Settings
    timing: TimingConfig
    replies: RepliesConfig
    kv_engine_id: str
    injector: Injector
    profile_differences: Sequence[str] = ()

    def config(self, init: Init) -> EngineConfig:
        """Return what the ranks need to know towards one frontend."""
        settings = self.settings
        return EngineConfig(
            max_model_len=settings.max_model_len,
            block_size=settings.block_size,
            output_token_chunk_size=settings.output_token_chunk_size,
            replies=self.replies,
            data_parallel_size=settings.effective_data_parallel_size,
            clients=len(init.inputs),
            has_coordinator=init.has_coordinator,
            has_waves=init.coordinates_waves,
            itl_s=settings.pace_s,
            batching=_batching(settings),
            kv_transfer=_kv_transfer(settings, self.kv_engine_id),
            timing=self.timing,
            mm_cache=MmCacheConfig(settings.mm_cache_items, settings.mm_cache_miss_rate, settings.seed),
            speculation=_speculation(settings),
            supported_tasks=task_names(settings.supported_tasks),
            loras=_loras(settings),
            control=_control(settings),
        )


def set_up(settings: Settings, listener: SetupListener | None = None) -> EngineSetup:
    """Read what the settings name, and draw once whatever is drawn; raises `SetupError`.

    The listener hears of changes to a script, and of what goes wrong on purpose.
    """
    timing, differences = _checked_timing(settings)
    kv_engine_id = settings.kv_engine_id or str(uuid4())
    replies = _replies(settings, listener)
    return EngineSetup(settings, timing, replies, kv_engine_id, _injector(settings, listener), differences)


def _injector(settings: Settings, listener: FaultListener | None) -> Injector:
    rules = []
    if settings.faults is not None:
        try:
            rules = read_rules(settings.faults)
            check_needs(
                rules, has_tokenizer=settings.tokenizer is not None, has_load_model=settings.load_model != "off"
            )
        except RulesError as error:
            raise SetupError(f"faults: {error}") from error
    return Injector(rules, settings.seed, listener)


def set_up_again(setup: EngineSetup, settings: Settings) -> EngineSetup:
    """Return the engine with other values of settings that may change while it runs; raises `SetupError`.

    What those settings do not change stays the same: tokenizer, scripts and how often they have answered, rules.
    """
    timing, differences = _checked_timing(settings)
    former = setup.replies
    told = [source for source in former.wishes if isinstance(source, Scripted | Dataset)]
    replies = _replies_with(settings, former.tokenizer, former.writer, told, former.tool_call_form)
    return replace(setup, settings=settings, timing=timing, replies=replies, profile_differences=differences)


def _checked_timing(settings: Settings) -> tuple[TimingConfig, list[str]]:
    """Return the model of time, from which everything can be drawn."""
    timing, differences = _timing(settings)
    try:
        make_timing(timing, max_num_seqs=settings.max_num_seqs, seed=settings.seed)
    except (ValueError, ArithmeticError) as error:
        raise SetupError(f"the durations of timing {settings.timing} cannot be drawn: {error}") from error
    return timing, differences


def _replies(settings: Settings, listener: ScriptListener | None) -> RepliesConfig:
    tokenizer: Tokenizer | None = None
    if settings.tokenizer is not None:
        try:
            tokenizer = Tokenizer.load(Path(settings.tokenizer))
        except TokenizerError as error:
            raise SetupError(f"tokenizer: {error}") from error
    writer = None if tokenizer is None else StructuredWriter(tokenizer)
    return _replies_with(settings, tokenizer, writer, _told(settings, tokenizer, listener), _tool_call_form(settings))


def _replies_with(
    settings: Settings,
    tokenizer: Tokenizer | None,
    writer: StructuredWriter | None,
    told: Sequence[WishSource],
    form: ToolCallForm,
) -> RepliesConfig:
    """Return what is said: what the client wants goes before a script, and that before a data set."""
    if settings.reply_source == "words" and tokenizer is not None and not tokenizer.word_ids:
        raise SetupError(f"tokenizer: {tokenizer.path} has no whole words (use reply_source=random)")
    reasoning = _reasoning(settings, tokenizer)
    wishes: list[WishSource] = [Steering(_vocab_size(settings, tokenizer), is_on=settings.steering), *told]
    if writer is not None and settings.tool_call_probability:
        wishes.append(ToolCalling(settings.tool_call_probability, writer, form, reasoning))
    return RepliesConfig(
        vocab_size=settings.vocab_size,
        seed=settings.seed,
        seed_scope=SeedScope(settings.seed_scope),
        default_output_tokens=settings.default_output_tokens,
        output_length=_lengths("output_length", read_output_length(settings.output_length)),
        reasoning=reasoning,
        kind=ReplyKind(settings.reply_source),
        tokenizer=tokenizer,
        writer=writer,
        tool_call_form=form,
        wishes=wishes,
        embedding_dim=settings.embedding_dim,
        num_labels=settings.num_labels,
    )


def _vocab_size(settings: Settings, tokenizer: Tokenizer | None) -> int:
    return settings.vocab_size if tokenizer is None else tokenizer.vocab_size


def _told(settings: Settings, tokenizer: Tokenizer | None, listener: ScriptListener | None) -> list[WishSource]:
    """Return what files want to be said."""
    told: list[WishSource] = []
    try:
        if settings.reply_script is not None:
            vocab_size = _vocab_size(settings, tokenizer)
            file = ScriptFile(Path(settings.reply_script), vocab_size, has_tokenizer=tokenizer is not None)
            told.append(Scripted(file, time.time_ns, listener, RegexLimit().search))
        if settings.reply_dataset is not None:
            told.append(Dataset(Path(settings.reply_dataset), Lookup(settings.reply_dataset_lookup)))
    except ScriptError as error:
        raise SetupError(f"reply_script: {error}") from error
    except DatasetError as error:
        raise SetupError(f"reply_dataset: {error}") from error
    return told


def _reasoning(settings: Settings, tokenizer: Tokenizer | None) -> Reasoning | None:
    try:
        form = load_reasoning_form(settings.reasoning_form)
    except FormError as error:
        raise SetupError(f"reasoning_form: {error}") from error
    if tokenizer is None:
        return None
    length = _lengths("reasoning_length", read_reasoning_length(settings.reasoning_length))
    if length is not None and not form.is_in(tokenizer):
        raise SetupError(
            f"tokenizer: {tokenizer.path} has no tokens {form.begin_mark} and {form.end_mark} "
            "(use reasoning_length=none, or the reasoning_form of the model)"
        )
    return Reasoning(tokenizer, form, length)


def _tool_call_form(settings: Settings) -> ToolCallForm:
    try:
        return load_form(settings.tool_call_form)
    except FormError as error:
        raise SetupError(f"tool_call_form: {error}") from error


def _lengths(setting: str, form: OutputLength | None) -> LengthDraw | None:
    if form is None:
        return None
    match form.name:
        case "fixed":
            return fixed_length(round(form.first))
        case "uniform":
            return uniform_length(round(form.first), round(form.second))
        case "normal":
            return normal_length(form.first, form.second)
        case "lognormal":
            return lognormal_length(form.first, form.second)
    try:
        return weighted_length(*read_histogram(Path(form.file)))
    except LengthError as error:
        raise SetupError(f"{setting}: {error}") from error


def _batching(settings: Settings) -> BatchingConfig | None:
    if settings.load_model == "off":
        return None
    return BatchingConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_gpu_blocks=settings.num_gpu_blocks,
        enable_prefix_caching=settings.enable_prefix_caching,
        scheduling_policy=settings.scheduling_policy,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        async_scheduling=settings.async_scheduling,
    )


def _speculation(settings: Settings) -> SpeculationConfig | None:
    if not settings.spec_tokens:
        return None
    text = settings.acceptance_rate
    rates = USUAL_ACCEPTANCE_RATE if text is None else acceptance_rates(text)
    return SpeculationConfig(
        acceptance_rates=even_rates(rates, settings.spec_tokens) if isinstance(rates, float) else rates,
        metrics=settings.per_request_spec_decode_metrics,
    )


def _loras(settings: Settings) -> LoraConfig | None:
    if not settings.max_loras:
        return None
    return LoraConfig(
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras or settings.max_loras,
        load_s=settings.time_scale * settings.lora_load_ms / 1_000,
        is_there=_has_adapter if settings.check_lora_paths else lambda _path: True,
    )


def _has_adapter(path: str) -> bool:
    """Tell whether there is an adapter at a path that a frontend names, which may be any text."""
    try:
        return (Path(path).expanduser() / "adapter_config.json").is_file()
    except (OSError, RuntimeError, ValueError):
        return False


def _control(settings: Settings) -> ControlConfig:
    backend = settings.weight_transfer_backend
    return ControlConfig(
        world_size=settings.world_size,
        weight_transfer_backend=None if backend == "none" else backend,
        sleep_s=settings.time_scale * settings.sleep_ms / 1_000,
        wake_up_s=settings.time_scale * settings.wake_up_ms / 1_000,
    )


def _kv_transfer(settings: Settings, engine_id: str) -> KvTransferConfig | None:
    if settings.kv_role == "none":
        return None
    unit_s = settings.time_scale / 1_000
    return KvTransferConfig(
        engine_id=engine_id,
        is_producer=settings.kv_role != "consumer",
        is_consumer=settings.kv_role != "producer",
        side_channel_host=settings.nixl_side_channel_host,
        side_channel_port=settings.nixl_side_channel_port,
        transfer_s=unit_s * settings.kv_transfer_ms,
        transfer_s_per_token=unit_s * settings.kv_transfer_ms_per_token,
        hold_s=unit_s * settings.kv_hold_ms,
    )


def _timing(settings: Settings) -> tuple[TimingConfig, list[str]]:
    """Return the model of time, and what was otherwise where its profile was made."""
    timing = TimingConfig(
        timing=settings.timing,
        time_scale=settings.time_scale,
        timing_distribution=settings.timing_distribution,
        ttft_ms=settings.ttft_ms,
        ttft_stddev_ms=settings.ttft_stddev_ms,
        prefill_ms_per_token=settings.prefill_ms_per_token,
        prefill_stddev_ms_per_token=settings.prefill_stddev_ms_per_token,
        itl_ms=settings.itl_ms,
        itl_stddev_ms=settings.itl_stddev_ms,
        time_factor_under_load=settings.time_factor_under_load,
        step_base_ms=settings.step_base_ms,
        step_ms_per_prefill_token=settings.step_ms_per_prefill_token,
        step_ms_per_decode=settings.step_ms_per_decode,
        step_ms_per_context_token=settings.step_ms_per_context_token,
        step_jitter=settings.step_jitter,
    )
    if settings.timing_profile is None:
        return timing, []
    try:
        profile = load_profile(Path(settings.timing_profile))
    except ProfileError as error:
        raise SetupError(f"timing_profile: {error}") from error
    differences = profile.differences(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        async_scheduling=settings.async_scheduling,
    )
    return replace(timing, **asdict(profile.coefficients)), differences
