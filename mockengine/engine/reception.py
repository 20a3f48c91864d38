# SPDX-License-Identifier: Apache-2.0
"""Which requests a rank accepts, and how those end at once that it does not.

Nothing is sent from here: whoever asks is told how a request ends, and the observer is.
"""

from collections.abc import Callable
from dataclasses import replace

from mockengine.engine.adapters import Adapters
from mockengine.engine.config import EngineConfig
from mockengine.engine.control import SHUTTING_DOWN
from mockengine.engine.faulty import RankFaults
from mockengine.engine.kv_transfer import KvTransfer, has_kv_transfer_params, read_kv_transfer
from mockengine.engine.mm_cache import MmCache
from mockengine.engine.observer import Observer
from mockengine.engine.requests import Request
from mockengine.replies.asked import ReplyError
from mockengine.replies.planner import Planner
from mockengine.wire.outputs import EngineCoreOutput, FinishReason, RequestError
from mockengine.wire.requests import EngineCoreRequest
from mockengine.wire.sampling import EMPTY_POOLING_OUTPUT, SamplingParams
from mockengine.wire.values import shown


class Reception:
    """Looks at the requests of one rank.

    Attributes:
        is_closed: whether nothing is accepted any more.

    """

    def __init__(
        self,
        rank: int,
        config: EngineConfig,
        observer: Observer,
        adapters: Adapters | None,
        mm_cache: MmCache,
        is_in_flight: Callable[[str], bool],
        faults: RankFaults,
    ) -> None:
        """Begin open.

        Args:
            rank: whose requests they are.
            config: what it plays.
            observer: hears of requests that are accepted, and of those that are not.
            adapters: which it has, where there may be any.
            mm_cache: data of multimodal items that it is said to have.
            is_in_flight: tells whether there is a request of an id.
            faults: what goes wrong with requests.

        """
        self.is_closed = False
        self._rank = rank
        self._config = config
        self._observer = observer
        self._adapters = adapters
        self._mm_cache = mm_cache
        self._is_in_flight = is_in_flight
        self._faults = faults
        self._planner = make_planner(config)

    def reconfigure(self, config: EngineConfig, planner: Planner) -> None:
        """Plan replies in another way from the next request on."""
        self._config = config
        self._planner = planner

    def refusal(self, request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Return how a request ends at once whatever it asks, if it does."""
        is_pooling = request.pooling_params is not None
        if self.is_closed:
            reason, output = SHUTTING_DOWN, last_output(request.request_id, FinishReason.ABORT, is_pooling=is_pooling)
        else:
            missing = self._mm_cache.missing(request.mm_features)
            if not missing:
                return None
            what = f"{len(missing)} of {len(request.mm_features)} multimodal items"
            reason = f"cache miss: the engine does not hold the data of {what} (send the request again)"
            error = RequestError("multimodal_cache_miss", reason, retryable=True)
            output = last_output(request.request_id, FinishReason.ERROR, error, is_pooling=is_pooling)
            output = replace(output, mm_cache_miss_hashes=missing)
        self._observer.request_refused(request.request_id, self._rank, request.client_index, reason)
        return output

    def problem(self, request: EngineCoreRequest) -> RequestError | None:
        """Return what is wrong with a request, if anything is."""
        config = self._config
        pooling = request.pooling_params
        if pooling is None and request.sampling_params is None:
            return invalid("neither sampling_params nor pooling_params are set")
        supported = config.supported_tasks
        if not (config.generates if pooling is None else pooling.task in supported):
            task = "generate" if pooling is None else pooling.task
            return invalid(f"the task {shown(task)} is none of supported_tasks, which are {', '.join(supported)}")
        if self._is_in_flight(request.request_id):
            return invalid("a request of the same id is in flight")
        if request.num_prompt_tokens == 0:
            return invalid("the prompt is empty")
        if request.num_prompt_tokens > config.max_model_len:
            return invalid(
                f"the prompt has {request.num_prompt_tokens} tokens where max_model_len is {config.max_model_len}"
            )
        return self._lora_problem(request)

    def plan(self, request: EngineCoreRequest, now: float, *, is_first_turn: bool = True) -> Request | RequestError:
        """Return an accepted request, or why it cannot be served.

        Args:
            request: with which nothing is wrong otherwise.
            now: the time, in engine seconds.
            is_first_turn: whether no turn of its session, if it has one, has been served.

        """
        self._faults.now = now
        try:
            # A rule may be named that does not exist, so it is not enough to ask where there are any.
            plan = self._planner.plan(request, self._faults.strike_request)
        except ReplyError as error:
            return invalid(str(error))
        params = request.sampling_params or SamplingParams()
        accepted = Request(request, plan, now, is_first_turn=is_first_turn)
        if has_kv_transfer_params(params.extra_args):
            accepted.kv_transfer = self._kv_transfer(request, params)
        self._observer.request_started(accepted.served(self._rank))
        return accepted

    def refuse(self, request: EngineCoreRequest, client: int, error: RequestError) -> EngineCoreOutput:
        """Return how a request ends that is not accepted, which is for a client to hear."""
        self._observer.request_refused(request.request_id, self._rank, client, error.message)
        is_pooling = request.pooling_params is not None
        return last_output(request.request_id, FinishReason.ERROR, error, is_pooling=is_pooling)

    def _lora_problem(self, request: EngineCoreRequest) -> RequestError | None:
        if request.lora_request is None:
            return None
        if self._adapters is None:
            return invalid(f"LoRA is not enabled (asked for {shown(request.lora_request.name)})")
        problem = self._adapters.problem(request.lora_request)
        return None if problem is None else invalid(problem)

    def _kv_transfer(self, request: EngineCoreRequest, params: SamplingParams) -> KvTransfer | None:
        """Return what a request asks of disaggregation; what cannot be done of it costs a warning, as in vLLM."""
        transfer: KvTransfer | None = None
        problem: str | None = "kv_role is none"
        if self._config.kv_transfer is not None:
            num_tokens, block_size = request.num_prompt_tokens, self._config.block_size
            transfer, problem = read_kv_transfer(params.extra_args, num_tokens, block_size)
        if problem is not None:
            self._observer.transfer_ignored(request.request_id, self._rank, request.client_index, problem)
        return transfer


def make_planner(config: EngineConfig) -> Planner:
    """Return what plans the replies of an engine; ranks may share it."""
    return Planner(config.replies, config.max_model_len, config.most_tokens_per_step)


def invalid(message: str) -> RequestError:
    """Make the error that a frontend of 0.33 answers with an HTTP 400."""
    return RequestError("validation_error", message)


def last_output(
    request_id: str, reason: FinishReason, error: RequestError | None = None, *, is_pooling: bool = False
) -> EngineCoreOutput:
    """Make an output that ends a request without a token; one for pooling needs a tensor whatever its end."""
    return EngineCoreOutput(
        request_id=request_id,
        pooling_output=EMPTY_POOLING_OUTPUT if is_pooling else None,
        finish_reason=reason,
        error=error,
    )
