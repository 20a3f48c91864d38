# SPDX-License-Identifier: Apache-2.0
"""The life of the process: start, join, serve, drain, leave; and join again when the frontend goes away."""

import os
import time
from contextlib import ExitStack
from functools import partial
from typing import Final, NoReturn
from uuid import uuid4

import zmq

from mockengine import __version__, logs
from mockengine.admin.port import AdminPort, AdminPortError
from mockengine.admin.view import View
from mockengine.engine.core import EngineCore
from mockengine.engine.dialect import Dialect
from mockengine.engine.ranks import Ranks
from mockengine.engine_setup import EngineSetup, SetupError, set_up
from mockengine.faults.of_joining import SpoiledJoin
from mockengine.journal import Journal
from mockengine.ledger import Ledger
from mockengine.publishers import Publishers
from mockengine.remote import Remote
from mockengine.settings import Settings
from mockengine.state_file import Served, StateFile, StateFileError
from mockengine.transport.abandoned import AbandonedFrontend
from mockengine.transport.calamities import Calamities, CrashError
from mockengine.transport.desk import Desk
from mockengine.transport.handshake import JoinPlan, JoinTimeoutError, join
from mockengine.transport.kv_publisher import KvEventsError, KvEventsPlan
from mockengine.transport.loop import Ending, Loop
from mockengine.transport.presence import Presence
from mockengine.transport.session import Session
from mockengine.transport.sockets import Context, make_context
from mockengine.transport.stop import StopSignal
from mockengine.watch import Watch
from mockengine.wire.codec import WireError
from mockengine.wire.handshake import Init, ReadyResponse, read_init
from mockengine.wire.kv_events import event_form
from mockengine.wire.lines import line_of_release
from mockengine.wire.outputs import ENGINE_CORE_DEAD

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
# What was said before leaving may take this long to reach a frontend that reads.
_LINGER_MS: Final = 2_000
_SHORT_FAREWELL_S: Final = 0.2
# The last lines of the log may take this long to be read.
_LOG_FLUSH_S: Final = 1.0
# What the ready response claims as the engine's release when no setting names one.
_DEFAULT_VLLM_VERSION: Final = "0.33.0"
# A frontend that is gone this soon after it was joined has probably refused the engine.
_SOON_S: Final = 10.0


class StartError(Exception):
    """The engine cannot start where it is; the text says why and what to do."""


def run(settings: Settings) -> int:
    """Play the engine in the main thread until a signal asks to stop; return the exit code.

    Returns:
        0 after SIGTERM or SIGINT; 1 when no frontend was joined in time, when the frontend went away and
        `rejoin` is off, or after an error that nobody planned.

    Raises:
        StartError: the admin port, the state file, an address for KV events or a file that a setting names cannot be
            had.

    """
    logs.configure(settings.log_format, settings.log_level)
    journal = Journal(
        logs.get_logger(),
        log_requests=settings.log_requests,
        chunk_size=settings.output_token_chunk_size,
        vllm_version=settings.vllm_version,
    )
    try:
        with StopSignal() as stop:
            return play(settings, stop, journal)
    finally:
        logs.flush(_LOG_FLUSH_S)


def play(settings: Settings, stop: StopSignal, journal: Journal) -> int:
    """Play the engine until `stop` is requested; return the exit code and raise errors as `run` does."""
    with ExitStack() as cleanup:
        try:
            state_file = StateFile(settings.state_file)
            cleanup.callback(state_file.close)
            if settings.state_file is not None and settings.resume:
                journal.ledger = _ledger(settings.state_file)
                cleanup.callback(journal.ledger.close)
            admin = AdminPort(settings.admin_host, settings.admin_port) if settings.admin_port else None
            publishers = Publishers(_kv_events(settings), _ranks(settings), journal.replay_refused)
            cleanup.callback(publishers.close)
            setup = set_up(settings, journal)
        except KvEventsError as error:
            raise StartError(f"{error} (see to kv_events_endpoint and kv_events_replay_endpoint)") from error
        except (AdminPortError, StateFileError, SetupError) as error:
            raise StartError(str(error)) from error
        if setup.profile_differences:
            journal.profile_differs(settings.timing_profile or "", setup.profile_differences)
        context = make_context()
        service = _Service(settings, context, stop, journal, state_file, admin, publishers, setup)
        if admin is not None:
            cleanup.callback(admin.close)
            admin.start(service.view(), service.remote, journal.admin_failed, stop.fail)
        exit_code, reason = service.run()
        # Blocks until what was said last has left, or its linger time is over.
        context.term()
    journal.left(exit_code, reason)
    return exit_code


class _Service:
    """One process's way from frontend to frontend."""

    def __init__(
        self,
        settings: Settings,
        context: Context,
        stop: StopSignal,
        journal: Journal,
        state_file: StateFile,
        admin: AdminPort | None,
        publishers: Publishers,
        setup: EngineSetup,
    ) -> None:
        self._settings = settings
        self._context = context
        self._stop = stop
        self._journal = journal
        self._state_file = state_file
        self._admin = admin
        self._publishers = publishers
        self._desk = Desk(stop.wake)
        self.remote = Remote(setup, self._desk, journal, stop.wake)
        self._instance_id = uuid4().hex
        self._ranks = _ranks(settings)
        # Release lines of a frontend that is served again.
        self._known_lines: tuple[str, ...] = ()
        self._watch = Watch(self._ranks, journal, stop, time.monotonic())

    def view(self) -> View:
        """Return what the admin port may see."""
        return View(
            __version__, self._watch.status, self._journal.counts, logs.lines_dropped, logs.last_lines, self._stop.wake
        )

    def run(self) -> tuple[int, str]:
        """Serve one frontend after the other; return the exit code and why it is that."""
        while True:
            session: Session | None = None
            try:
                session = self._join()
                if session is None:
                    return self._stopped()
                ending = self._serve(session)
            except JoinTimeoutError as timeout:
                return EXIT_FAILED, str(timeout)
            except Exception as error:  # noqa: BLE001 - whatever it is, the frontend must hear that its engine is gone
                self._journal.failed(error)
                self._stop.fail(error)
                if session is not None:
                    self._leave(session)
                return EXIT_FAILED, "failed"
            if ending is Ending.STOPPED:
                said_all = self._leave(session)
                return self._stopped("" if said_all else "; the frontend did not read the last of it")
            if not self._settings.rejoin:
                return EXIT_FAILED, "the frontend is gone and rejoin is off"

    def _stopped(self, remark: str = "") -> tuple[int, str]:
        if self._stop.failure is None:
            return EXIT_OK, f"asked to stop{remark}"
        self._journal.failed(self._stop.failure)
        return EXIT_FAILED, "failed"

    def _abandoned(self, served: Served | None) -> AbandonedFrontend | None:
        """Return the frontend that an engine served which was killed, to be served again or, restarted, joined anew."""
        if served is None:
            return None

        def note() -> None:
            # In this order: whoever reads the line finds it done.
            self._state_file.forget()
            self._journal.frontend_abandoned(served.outputs)

        notice = None if self._settings.leave_notice == "none" else [ENGINE_CORE_DEAD]
        return AbandonedFrontend(self._context, served.outputs, notice, note)

    def _resumes(self, served: Served | None) -> Init | None:
        """Return what that frontend said, if it may be served again."""
        if served is None or not self._settings.resume:
            return None
        try:
            return read_init(bytes.fromhex(served.init))
        except (WireError, ValueError):
            return None

    def _join(self) -> Session | None:
        settings = self._settings
        started = time.monotonic()
        extra: dict[str, object] = {"num_gpu_blocks": settings.num_gpu_blocks}
        if settings.parallel_config_hash is not None:
            extra["parallel_config_hash"] = settings.parallel_config_hash
        served = self._state_file.recall(self._ranks)
        self._known_lines = ()
        abandoned = self._abandoned(served)
        plan = JoinPlan(
            address=settings.handshake_address,
            ranks=self._ranks,
            data_parallel_size=settings.effective_data_parallel_size,
            describe=self._describe,
            on_init=self._remember,
            ready_extra=extra,
            timeout_s=settings.join_timeout_s,
            startup_s=settings.time_scale * settings.startup_ms / 1_000,
            limit_bytes=settings.most_bytes_ahead,
            farewell=[ENGINE_CORE_DEAD] if settings.leave_notice == "dead" else None,
            abandoned=abandoned,
            resumes=self._resumes(served),
            between=self._desk.work_off,
            spoil=lambda: SpoiledJoin(self.remote.setup.injector.on_join()),
        )
        try:
            session = join(self._context, plan, self._stop, self._journal, time.monotonic)
        finally:
            if abandoned is not None:
                abandoned.close(_LINGER_MS)
        if session is not None and session.is_resumed:
            self._known_lines = () if served is None else served.lines
        if session is not None and not session.is_resumed:
            self._journal.ready(
                self._ranks,
                len(session.init.inputs),
                time.monotonic() - started,
                coordinator=session.init.has_coordinator,
            )
        if session is not None and self._admin is not None:
            self._admin.begin()
        return session

    def _serve(self, session: Session) -> Ending:
        settings = self._settings
        started = time.monotonic()
        ranks = self._make_ranks(session.init)
        self._disown(session, ranks)
        self._watch.serving(session, ranks)
        poller = zmq.Poller()
        calamities = Calamities(self.remote.injector, session, ranks, self._stop, self._desk)
        self.remote.serving(ranks, session.init)
        presence = Presence(
            self._context,
            session,
            settings.handshake_address,
            self._journal,
            poller,
            grace_s=settings.rejoin_grace_s,
            now=started,
        )
        loop = Loop(
            session,
            ranks,
            presence,
            self._stop,
            poller,
            self._journal,
            calamities,
            drain_s=settings.shutdown_timeout_s,
            clock=time.monotonic,
        )
        try:
            ending = loop.run()
        except CrashError as crash:
            self._crash(session, crash)
        finally:
            calamities.close()
            # Its sockets would keep the context from ending.
            presence.close()
            self._watch.joining()
            self.remote.joining()
        if ending is Ending.FRONTEND_LOST:
            self._lose(session, ranks, presence, served_s=time.monotonic() - started)
        return ending

    def _crash(self, session: Session, crash: CrashError) -> NoReturn:
        """End the process as one ends that fails: nobody tidies up, and the frontend hears of it or does not."""
        if crash.has_notice:
            session.announce([ENGINE_CORE_DEAD])
            session.flush(_LINGER_MS / 1_000, self._journal)
        self._journal.left(crash.exit_code, "a fault has it crash")
        logs.flush(_LOG_FLUSH_S)
        os._exit(crash.exit_code)

    def _disown(self, session: Session, ranks: Ranks) -> None:
        """Tell clients of what an engine before this one had in flight, which is lost."""
        lost = [] if self._journal.ledger is None else self._journal.ledger.take_lost()
        if not session.is_resumed:
            return
        for engine in ranks.engines:
            ids: dict[int, list[str]] = {}
            for each in lost:
                if each.engine == engine.rank:
                    ids.setdefault(each.client, []).append(each.request_id)
            for message in engine.disown(ids, time.monotonic()):
                session.outputs[message.destination].send(message.messages)
        self._journal.resumed(session.init.outputs, len(lost))

    def _remember(self, init: Init, lines: tuple[str, ...] = ()) -> None:
        address = self._settings.handshake_address
        served = Served(tuple(self._ranks), address, tuple(init.outputs), init.to_wire().hex(), lines)
        problem = self._state_file.remember(served)
        if problem is not None:
            self._journal.state_not_kept(problem)

    def _lose(self, session: Session, ranks: Ranks, presence: Presence, served_s: float) -> None:
        """Forget a frontend that is gone and its requests, after telling those of its API servers that are left."""
        in_flight = ranks.num_requests
        last_words = ranks.abort_everything(time.monotonic())
        self._journal.frontend_lost(
            presence.loss or "", in_flight, served_s, self._refusal_hint(session.init, served_s)
        )
        if presence.is_replaced:
            # Behind the same addresses may be the next frontend, which must not hear that its engine is gone.
            session.close()
            self._state_file.forget()
            return
        connected = session.connected_clients
        for message in last_words:
            if message.destination in connected:
                session.outputs[message.destination].send(message.messages)
        self._leave(session)

    def _leave(self, session: Session) -> bool:
        """Say goodbye: a frontend does not notice by itself that an engine has gone, and would hang its clients.

        A setting switches that off for those who want to see just this; a failure is told all the same.

        Returns:
            Whether everything has been said, as far as this side can know.

        """
        session.look()
        connected = session.connected_clients
        if not connected and session.was_lost:
            session.close()
            self._state_file.forget()
            return True
        if self._settings.leave_notice == "dead" or self._stop.failure is not None:
            for client in connected or range(len(session.outputs)):
                session.outputs[client].send([[ENGINE_CORE_DEAD]])
        if not connected:
            # Nobody is there yet: it may still reach one that is just coming up.
            session.flush(_SHORT_FAREWELL_S, self._journal)
            session.close()
            return True
        said_all = session.flush(_LINGER_MS / 1_000, self._journal)
        if said_all:
            self._state_file.forget()
        session.close(_LINGER_MS)
        return said_all

    def _make_ranks(self, init: Init) -> Ranks:
        settings = self._settings
        config = self.remote.setup.config(init)
        release = settings.vllm_version
        named = None if release == "auto" else line_of_release(release)
        dialect = Dialect(named, self._known_lines, partial(self._remember, init))
        self._publishers.begin()
        return Ranks(
            [
                EngineCore(
                    rank, config, dialect, self._journal, self._publishers.sink(rank), self.remote.setup.injector
                )
                for rank in self._ranks
            ]
        )

    def _describe(self, rank: int, init: Init) -> ReadyResponse:
        settings = self._settings
        release = settings.vllm_version
        tokens = settings.num_gpu_blocks * settings.block_size
        backend = settings.weight_transfer_backend
        return ReadyResponse(
            max_model_len=settings.max_model_len,
            num_gpu_blocks=settings.num_gpu_blocks,
            block_size=settings.block_size,
            dp_stats_address=init.frontend_stats_publish_address,
            dtype=settings.dtype,
            vllm_version=_DEFAULT_VLLM_VERSION if release == "auto" else release,
            world_size=settings.world_size,
            data_parallel_size=settings.effective_data_parallel_size,
            tensor_parallel_size=settings.world_size,
            data_parallel_rank=rank,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            instance_id=self._instance_id,
            supports_lora=settings.max_loras > 0,
            max_loras=settings.max_loras,
            weight_transfer_backend=None if backend == "none" else backend,
            kv_cache_size_tokens=tokens,
            kv_cache_max_concurrency=tokens / settings.max_model_len,
            effective_attention_block_size=settings.block_size,
            coordinator_input_address=init.coordinator_input,
            coordinator_output_address=init.coordinator_output,
            kv_events_config=self._publishers.config(rank),
        )

    def _refusal_hint(self, init: Init, served_s: float) -> str | None:
        if served_s > _SOON_S or not init.parallel_config:
            return None
        return (
            "it may have refused parallel_config_hash: a Python frontend of a mixture-of-experts model then logs "
            "'Configuration mismatch detected' with the expected hash, which MOCKENGINE_PARALLEL_CONFIG_HASH must name"
        )


def _ledger(state_file: str) -> Ledger:
    try:
        return Ledger.beside(state_file)
    except OSError as error:
        raise StartError(
            f"state_file {state_file}: the requests in flight cannot be kept beside it: {error.strerror} "
            "(make room, let the user write there, or set resume=false)"
        ) from error


def _ranks(settings: Settings) -> range:
    return range(settings.start_rank, settings.start_rank + settings.engine_count)


def _kv_events(settings: Settings) -> KvEventsPlan | None:
    if settings.kv_events_endpoint is None:
        return None
    release = _DEFAULT_VLLM_VERSION if settings.vllm_version == "auto" else settings.vllm_version
    return KvEventsPlan(
        settings.kv_events_endpoint,
        settings.kv_events_replay_endpoint,
        settings.kv_events_topic or "",
        settings.kv_events_buffer_steps,
        form=event_form(release),
    )
