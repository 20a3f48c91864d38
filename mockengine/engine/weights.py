# SPDX-License-Identifier: Apache-2.0
"""Weights that a rank does not have: how a trainer replaces them, what they are called, and their checksums.

A trainer connects once and then, as often as it likes, starts an update, sends it in parts and finishes it. Whatever
comes out of order fails with vLLM's words. Checksums tell one state of the weights from another, and no more.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Final

from mockengine.engine.answers import UtilityError
from mockengine.wire.values import shown

DEFAULT_VERSION: Final = "default"
# It labels every output, so it must not be long.
_VERSION_CHARACTERS: Final = 256
_NO_BACKEND: Final = "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
_ALREADY_ACTIVE: Final = (
    "start_weight_update called while a weight update is already active. Call finish_weight_update first."
)
_UPDATE_NOT_STARTED: Final = "start_weight_update must be called before update_weights."
_FINISH_NOT_STARTED: Final = "finish_weight_update called without a matching start_weight_update."
# By backend; those that are missing need no connection.
_NOT_CONNECTED: Final[Mapping[str, str]] = {
    "nccl": "NCCL weight transfer not initialized. Call init_transfer_engine() first.",
    "sparse_nccl": "NCCL weight transfer not initialized. Call init_transfer_engine() first.",
    "nccl_m2n": "nccl_m2n weight transfer not initialized. Call init_transfer_engine() first.",
    "sharded_rdt": "Sharded RDT engine not initialized. Call init_transfer_engine() first.",
}
_RELEASED_TOO_EARLY: Final = "Cannot release a trainer connection during a weight update"
_NO_DRAFT_MODEL: Final = "Draft model weight update requested, but no draft model is configured."
_NOTHING_TO_SAVE: Final = "this engine has no weights that could be saved"
# Tensors whose checksums are told, a few of those that every causal language model has.
_TENSORS: Final = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
# By backend that cannot update a draft model, the name of its class.
_WITHOUT_DRAFTS: Final[Mapping[str, str]] = {
    "sparse_nccl": "SparseNCCLWeightTransferEngine",
    "nccl_m2n": "M2NWeightTransferEngine",
    "sharded_rdt": "ShardedRDTWeightTransferEngine",
}


class Weights:
    """The weights of one rank's workers.

    Attributes:
        version: what they are called.

    """

    def __init__(self, rank: int, world_size: int, backend: str | None, seed: int) -> None:
        """Begin with the weights of the checkpoint.

        Args:
            rank: whose workers hold them.
            world_size: how many workers these are.
            backend: how a trainer may send others; None is not at all.
            seed: of the replies, since other weights would say something else.

        """
        self.version = DEFAULT_VERSION
        self._rank = rank
        self._world_size = world_size
        self._backend = backend
        self._seed = seed
        self._is_connected = False
        self._is_updated = False
        self._num_updates = 0
        # Names what the weights are, for the checksums.
        self._contents = "checkpoint"

    def set_version(self, version: object) -> None:
        """Call them something else; raises UtilityError: no short text."""
        if not isinstance(version, str) or len(version) > _VERSION_CHARACTERS:
            raise UtilityError(
                f"{shown(version)} is no weight version (a str of at most {_VERSION_CHARACTERS} characters)"
            )
        self.version = version

    def drop(self) -> None:
        """Lose them, as the deeper sleep does; an update or `reload_weights` brings others."""
        self._contents = "nothing"

    def save(self) -> None:
        """Raise UtilityError: what is not there cannot be written to a folder."""
        raise UtilityError(_NOTHING_TO_SAVE)

    def checksums(self) -> list[dict[str, str]]:
        """Return a map for each worker, of a tensor's name to its checksum."""
        return [
            {f"dp{self._rank}:pp0:pcp0:tp{worker}:{name}": self._digest(worker, name) for name in _TENSORS}
            for worker in range(self._world_size)
        ]

    def call_workers(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a method of every worker; return an item for each, nil for a method of which nothing is known.

        Raises:
            UtilityError: it is not its turn, or cannot be done.

        """
        if method == "compute_weight_checksums":
            return list(self.checksums())
        self._obey(method, args, kwargs)
        return [None] * self._world_size

    # What workers are told to do.

    def _obey(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        match method:
            case "init_weight_transfer_engine":
                self._connect(args, kwargs)
            case "shutdown_weight_transfer_engine":
                self._disconnect()
            case "start_weight_update":
                self._start()
            case "start_draft_weight_update":
                self._start_draft()
            case "update_weights":
                self._update(args, kwargs)
            case "finish_weight_update":
                self._finish()
            case "reload_weights":
                self._contents = "checkpoint"
            case "reset_weights":
                self._contents = "zeros"
            case "save_sharded_state":
                self.save()

    def _connect(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._need_backend()
        problem = _info_problem("init_info", args, kwargs)
        if problem is not None:
            raise UtilityError(problem)
        self._is_connected = True

    def _disconnect(self) -> None:
        if self._is_updated:
            raise UtilityError(_RELEASED_TOO_EARLY)
        self._is_connected = False

    def _start(self) -> None:
        self._need_backend()
        if self._is_updated:
            raise UtilityError(_ALREADY_ACTIVE)
        self._is_updated = True

    def _start_draft(self) -> None:
        engine = _WITHOUT_DRAFTS.get(self._need_backend())
        if engine is not None:
            raise UtilityError(f"{engine} does not support draft model weight updates.")
        raise UtilityError(_ALREADY_ACTIVE if self._is_updated else _NO_DRAFT_MODEL)

    def _update(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        backend = self._need_backend()
        if not self._is_updated:
            raise UtilityError(_UPDATE_NOT_STARTED)
        problem = _info_problem("update_info", args, kwargs)
        if problem is None and not self._is_connected:
            problem = _NOT_CONNECTED.get(backend)
        if problem is not None:
            # As in vLLM the update is over then.
            self._is_updated = False
            raise UtilityError(problem)
        self._num_updates += 1
        self._contents = f"update {self._num_updates}"

    def _finish(self) -> None:
        self._need_backend()
        if not self._is_updated:
            raise UtilityError(_FINISH_NOT_STARTED)
        self._is_updated = False

    def _need_backend(self) -> str:
        if self._backend is None:
            raise UtilityError(_NO_BACKEND)
        return self._backend

    def _digest(self, worker: int, name: str) -> str:
        return sha256(f"{self._seed}/{self._contents}/{worker}/{name}".encode()).hexdigest()


def _info_problem(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Check what a trainer says of itself or of a part of an update, whose keys depend on the backend."""
    value = args[0] if args else kwargs.get(name)
    if isinstance(value, dict) or (name == "update_info" and isinstance(value, list)):
        return None
    return f"{name}: {shown(value)} where a map is expected"
