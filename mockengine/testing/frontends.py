# SPDX-License-Identifier: Apache-2.0
"""Starts real vLLM frontends as child processes, for tests, demos and benchmarks.

A frontend starts when it is made, and serves once its engines have joined it::

    with RustFrontend(rust_frontend(), model_dir) as frontend:
        ...  # start an engine that joins frontend.handshake_address
        frontend.wait_healthy()
        ...  # talk to frontend.url

This module knows command lines and environments. It does not know where an executable comes from (see
:mod:`mockengine.testing.fetch`), nor anything about engines.
"""

import http.client
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import ClassVar, Final

from mockengine.testing.processes import ChildProcess, free_port

SERVED_MODEL_NAME: Final = "tiny"
"""What a request names as its model, whatever the model's folder is called."""

_LOOPBACK: Final = "127.0.0.1"
_ANSWER_DEADLINE_S: Final = 2.0

_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "NO_COLOR": "1"}

# Empty is as good as unset. What this interpreter was given is not meant for another; and an environment whose bytecode
# is never kept takes twice as long for each start.
_FOREIGN_TO_PYTHON: Final = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE"), "")


class Frontend(ChildProcess):
    """A real frontend that has no engines of its own, serves at the loopback address and downloads nothing.

    Attributes:
        handshake_port: where engines join.
        http_port: where it serves.
        slow_start_s: how long its start may take on a slow machine, in seconds.

    """

    slow_start_s: ClassVar[float] = 60.0

    def __init__(
        self,
        launcher: Sequence[str],
        model_dir: Path,
        *,
        handshake_port: int | None,
        http_port: int | None,
        data_parallel_size: int,
        extra_args: Sequence[str],
        env: Mapping[str, str],
    ) -> None:
        """Start the program that `launcher` names; a port that is None is a free one."""
        self.handshake_port = free_port() if handshake_port is None else handshake_port
        self.http_port = free_port() if http_port is None else http_port
        command = [
            *(*launcher, "serve", str(model_dir)),
            *("--served-model-name", SERVED_MODEL_NAME),
            *("--data-parallel-size", str(data_parallel_size)),
            *("--data-parallel-size-local", "0"),
            *("--data-parallel-address", _LOOPBACK),
            *("--data-parallel-rpc-port", str(self.handshake_port)),
            *("--host", _LOOPBACK),
            *("--port", str(self.http_port)),
            *extra_args,
        ]
        super().__init__(command, _OFFLINE | dict(env))

    @property
    def url(self) -> str:
        """Where it serves, without a slash at the end."""
        return f"http://{_LOOPBACK}:{self.http_port}"

    @property
    def handshake_address(self) -> str:
        """Where engines join."""
        return f"tcp://{_LOOPBACK}:{self.handshake_port}"

    @property
    def is_healthy(self) -> bool:
        """Whether it answers `GET /health` with 200 now."""
        # Not urllib, which would ask a proxy that the environment names.
        connection = http.client.HTTPConnection(_LOOPBACK, self.http_port, timeout=_ANSWER_DEADLINE_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_healthy(self, deadline_s: float | None = None, *, besides: ChildProcess | None = None) -> None:
        """Wait until it is healthy, for which all its engines must have joined.

        Args:
            deadline_s: how long, in seconds; by default `slow_start_s`.
            besides: its engine, without which waiting has no point.

        Raises:
            TimeoutError: it is not in time, or it or its engine has ended; the text shows what was written.

        """
        what = f"200 from {self.url}/health (have all engines joined {self.handshake_address}?)"

        def is_decided() -> bool:
            return self.is_healthy or (besides is not None and besides.has_ended)

        try:
            self.wait_until(is_decided, what, self.slow_start_s if deadline_s is None else deadline_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\nThe engine wrote:\n{besides.tail}" if besides else str(error)) from None
        if besides is not None and besides.has_ended and not self.is_healthy:
            code = besides.wait()
            raise TimeoutError(f"no {what}: the engine ended with {code} and wrote:\n{besides.tail}")


class RustFrontend(Frontend):
    """The Rust frontend, `vllm-rs`; healthy some tenths of a second after its engines have joined."""

    def __init__(
        self,
        executable: Path,
        model_dir: Path,
        *,
        handshake_port: int | None = None,
        http_port: int | None = None,
        data_parallel_size: int = 1,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the frontend.

        Args:
            executable: the file `vllm-rs`.
            model_dir: a folder with a configuration and a tokenizer.
            handshake_port: where engines join; a free port by default.
            http_port: where it serves; a free port by default.
            data_parallel_size: how many engines it waits for.
            extra_args: further arguments for its command line.
            env: variables to set besides this process's; its own settings are not passed on.

        """
        super().__init__(
            [str(executable)],
            model_dir,
            handshake_port=handshake_port,
            http_port=http_port,
            data_parallel_size=data_parallel_size,
            extra_args=extra_args,
            env=env or {},
        )


class PythonFrontend(Frontend):
    """The Python frontend, `vllm serve`; healthy after 10 to 60 seconds, most of which are imports."""

    slow_start_s = 240.0

    def __init__(
        self,
        python: Path,
        model_dir: Path,
        *,
        handshake_port: int | None = None,
        http_port: int | None = None,
        data_parallel_size: int = 1,
        api_server_count: int | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the frontend.

        Args:
            python: the interpreter of an environment that has vLLM.
            model_dir: as for RustFrontend, and so are the arguments that are not named here.
            handshake_port: see there.
            http_port: see there.
            data_parallel_size: see there.
            api_server_count: how many processes serve HTTP; by default as many as there are engines.
            extra_args: see there.
            env: see there; what this interpreter was told by `PYTHONPATH` and the like is not passed on either.

        """
        servers = () if api_server_count is None else ("--api-server-count", str(api_server_count))
        super().__init__(
            [str(python), "-m", "vllm.entrypoints.cli.main"],
            model_dir,
            handshake_port=handshake_port,
            http_port=http_port,
            data_parallel_size=data_parallel_size,
            extra_args=[*servers, *extra_args],
            env=_FOREIGN_TO_PYTHON | dict(env or {}),
        )
