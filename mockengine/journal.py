# SPDX-License-Identifier: Apache-2.0
"""What the engine and the transport report: counted, and told as lines of the log."""

from collections.abc import Mapping, Sequence

from structlog.typing import FilteringBoundLogger

from mockengine.engine.observer import Served
from mockengine.faults.catalog import NAMES
from mockengine.ledger import Ledger
from mockengine.logs import Event
from mockengine.status import Counts
from mockengine.wire.codec import Flaw
from mockengine.wire.messages import Unreadable
from mockengine.wire.outputs import FinishReason


class Journal:
    """Counts reports and writes them to a log; the keys of each event are those of docs/logs.md.

    Attributes:
        counts: what has been reported so far.
        turned_at: when the engine's thread last went through its loop, in seconds of the monotonic clock; 0 before.
        ledger: keeps which requests are in flight for the engine that follows a killed one, if there may be any.

    """

    def __init__(
        self, log: FilteringBoundLogger, *, log_requests: bool, chunk_size: int, vllm_version: str = "auto"
    ) -> None:
        self.counts = Counts()
        # Series that are there from the start can be watched for their first increase.
        self.counts.finished.update({reason.name.lower(): 0 for reason in FinishReason})
        self.counts.dropped.update(dict.fromkeys([*Flaw, "init"], 0))
        self.counts.faults.update(dict.fromkeys(NAMES, 0))
        self.turned_at = 0.0
        self.ledger: Ledger | None = None
        self._stalled: set[int] = set()
        self._replays_refused: set[tuple[int, str]] = set()
        self._log = log
        self._vllm_version = vllm_version
        self._log_requests = log_requests
        self._chunk_size = chunk_size

    # Requests.

    def request_started(self, request: Served) -> None:
        """Log that a request was accepted, unless requests are not logged."""
        self.counts.prompt_tokens += request.prompt_tokens
        if self.ledger is not None:
            self.ledger.started(request.request_id, request.engine, request.client)
        if self._log_requests:
            self._log.info(
                Event.REQUEST_STARTED,
                request_id=request.request_id,
                engine=request.engine,
                client=request.client,
                prompt_tokens=request.prompt_tokens,
                max_tokens=request.max_tokens,
                chunk_size=self._chunk_size,
            )

    def tokens_said(self, count: int) -> None:
        """Count the tokens of a step."""
        self.counts.output_tokens += count

    def request_finished(self, request: Served, finish_reason: str, duration_s: float) -> None:
        """Log that an accepted request ended, unless requests are not logged."""
        self.counts.finished[finish_reason] += 1
        if self.ledger is not None:
            self.ledger.finished(request.request_id)
        if self._log_requests:
            self._log.info(
                Event.REQUEST_FINISHED,
                request_id=request.request_id,
                engine=request.engine,
                client=request.client,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
                finish_reason=finish_reason,
                duration_ms=round(1_000 * duration_s, 3),
            )

    def request_refused(self, request_id: str, engine: int, client: int, reason: str) -> None:
        """Log that a request was answered with an error."""
        self.counts.refused += 1
        self._log.warning(Event.REQUEST_REFUSED, request_id=request_id, engine=engine, client=client, reason=reason)

    def transfer_ignored(self, request_id: str, engine: int, client: int, reason: str) -> None:
        """Log that a request's `kv_transfer_params` are not followed."""
        self._log.warning(Event.KV_TRANSFER_IGNORED, request_id=request_id, engine=engine, client=client, reason=reason)

    def message_dropped(self, message: Unreadable, engine: int, client: int | None) -> None:
        """Log that a message could not be read."""
        self.counts.dropped[message.flaw] += 1
        self._log.warning(
            Event.MESSAGE_DROPPED,
            reason=message.reason,
            request_type=message.request_type,
            frame_bytes=list(message.frame_bytes),
            engine=engine,
            client=client,
        )

    def release_contradicted(self, seen: str, items: int) -> None:
        """Log that the frontend is not of the release that was set."""
        self._log.warning(
            Event.RELEASE_CONTRADICTED,
            vllm_version=self._vllm_version,
            seen=seen,
            request_items=items,
            hint="the frontend may fail to decode what it is sent: set vllm_version to its release, or to auto",
        )

    def fault_fired(self, rule: str, fault: str, engine: int | None, request_id: str | None) -> None:
        """Log that something goes wrong on purpose."""
        self.counts.faults[fault] += 1
        self._log.warning(Event.FAULT_FIRED, rule=rule, fault=fault, engine=engine, request_id=request_id)

    # The loop.

    def turned(self, now: float) -> None:
        """Note that the engine's thread goes on."""
        self.turned_at = now
        if self.ledger is not None:
            self.ledger.turned()

    def stepped(self, steps: int, lateness_s: float) -> None:
        """Count steps that were made at once, and how late they were."""
        self.counts.lateness.add(steps, lateness_s)

    def client_stalled(self, client: int, buffered_bytes: int) -> None:
        """Count that a client makes its requests wait; log it once for each frontend."""
        self.counts.stalls[client] += 1
        if client not in self._stalled:
            self._stalled.add(client)
            self._log.info(Event.CLIENT_STALLED, client=client, buffered_bytes=buffered_bytes)

    def output_refused(self, client: int | None, reason: str) -> None:
        """Log that what listens where a client (None: the coordinator) should is none."""
        self._log.warning(
            Event.OUTPUT_REFUSED,
            client=client,
            reason=reason,
            hint="it is tried again while what is to be said waits; is it a proxy, or something else at that port?",
        )

    def replay_refused(self, rank: int, reason: str) -> None:
        """Log, once for each reason, that a subscriber to KV events asked for a replay and got none or no whole one."""
        if (rank, reason) not in self._replays_refused:
            self._replays_refused.add((rank, reason))
            self._log.warning(Event.REPLAY_REFUSED, engine=rank, reason=reason)

    # The life of the process.

    def profile_differs(self, profile: str, differences: Sequence[str]) -> None:
        """Log that a timing profile is of a deployment that was set up otherwise."""
        self._log.warning(
            Event.PROFILE_DIFFERS,
            profile=profile,
            differences=list(differences),
            hint="steps take as long as there, but fill in another way: set these as there, or take another profile",
        )

    def settings_changed(self, changes: Mapping[str, object]) -> None:
        """Log that settings have other values now."""
        self._log.info(Event.SETTINGS_CHANGED, changes=dict(changes))

    def reconfigure(self, log: FilteringBoundLogger, *, log_requests: bool) -> None:
        """Write to another log, and requests or not."""
        self._log, self._log_requests = log, log_requests

    def script_reloaded(self, file: str, rules: int) -> None:
        """Log that a script has changed and is in effect."""
        self._log.info(Event.SCRIPT_RELOADED, file=file, rules=rules)

    def script_refused(self, file: str, problems: Sequence[str]) -> None:
        """Log that a script has changed and cannot be used."""
        self._log.warning(
            Event.SCRIPT_REFUSED,
            file=file,
            problems=list(problems),
            hint="what it said before stays in effect: mend the file, and it is read again",
        )

    def joining(self, address: str, ranks: Sequence[int], waiting_for: str, waited_s: float, hint: str | None) -> None:
        """Log what joining waits for, as a warning where something seems to be wrong with it."""
        log = self._log.info if hint is None else self._log.warning
        log(
            Event.ENGINE_JOINING,
            address=address,
            ranks=list(ranks),
            waiting_for=waiting_for,
            waited_s=round(waited_s, 3),
            **_hint(hint),
        )

    def init_unreadable(self, reason: str, rank: int, frame_bytes: int) -> None:
        """Log that the frontend's INIT could not be read."""
        self.counts.dropped["init"] += 1
        self._log.warning(
            Event.MESSAGE_DROPPED,
            reason=reason,
            request_type="INIT",
            frame_bytes=[frame_bytes],
            engine=rank,
            client=None,
        )

    def join_interrupted(self, reason: str, hint: str | None) -> None:
        """Log that joining begins anew."""
        self._log.warning(Event.JOIN_INTERRUPTED, reason=reason, **_hint(hint))

    def ready(self, engines: Sequence[int], clients: int, join_s: float, *, coordinator: bool) -> None:
        """Log that all ranks have joined."""
        self.counts.joins += 1
        self._stalled.clear()
        self._log.info(
            Event.ENGINE_READY,
            engines=list(engines),
            clients=clients,
            coordinator=coordinator,
            join_s=round(join_s, 3),
        )

    def frontend_starting(self, waited_s: float, open_handshakes: int, unreachable: Sequence[str]) -> None:
        """Log that the frontend is not up although every rank here is ready."""
        hint = (
            "the frontend waits for more ranks: its --data-parallel-size may be larger than data_parallel_size here, "
            "or other processes' ranks have not joined"
            if open_handshakes
            else f"its input sockets cannot be reached (yet): {', '.join(unreachable)}"
        )
        self._log.warning(Event.FRONTEND_STARTING, waited_s=round(waited_s, 3), hint=hint)

    def frontend_lost(self, reason: str, requests_dropped: int, served_s: float, hint: str | None) -> None:
        """Log that the frontend is gone."""
        self.counts.frontends_lost += 1
        self._log.warning(
            Event.FRONTEND_LOST,
            reason=reason,
            requests_dropped=requests_dropped,
            served_s=round(served_s, 3),
            **_hint(hint),
        )

    def frontend_abandoned(self, outputs: Sequence[str]) -> None:
        """Log that a frontend has been told that the engine before this one is gone."""
        self._log.warning(Event.ABANDONED_FRONTEND_TOLD, outputs=list(outputs))

    def resumed(self, outputs: Sequence[str], requests_lost: int) -> None:
        """Log that the frontend of an engine that was killed is served again."""
        self.counts.joins += 1
        self._stalled.clear()
        self._log.warning(Event.ENGINE_RESUMED, outputs=list(outputs), requests_lost=requests_lost)

    def state_not_kept(self, reason: str) -> None:
        """Log that the state file could not be written."""
        self._log.warning(
            Event.STATE_NOT_KEPT,
            reason=reason,
            hint="an engine that is killed now leaves its frontend waiting for ever: see to the file of state_file",
        )

    def leaving(self, signal_name: str | None, in_flight: int, drain_s: float) -> None:
        """Log that the engine leaves, because of a signal or, without one, of a failure."""
        self._log.info(Event.ENGINE_LEAVING, signal=signal_name, in_flight=in_flight, drain_s=drain_s)

    def left(self, exit_code: int, reason: str) -> None:
        """Log the end of the process."""
        self._log.info(Event.ENGINE_LEFT, exit_code=exit_code, reason=reason)

    def admin_failed(self, reason: str, error: BaseException | None) -> None:
        """Log that the admin port could not answer because of a defect."""
        self._log.error(Event.ADMIN_REQUEST_FAILED, reason=reason, **({} if error is None else {"exc_info": error}))

    def failed(self, error: BaseException) -> None:
        """Log an end that nobody planned, with its traceback."""
        self._log.error(Event.ENGINE_FAILED, reason=f"{type(error).__name__}: {error}", exc_info=error)


def _hint(hint: str | None) -> dict[str, str]:
    return {} if hint is None else {"hint": hint}
