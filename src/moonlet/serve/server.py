"""Running the application on a socket: binding rules, start-up, draining on signals."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from moonlet.core.errors import ConfigError
from moonlet.serve.http_protocol import BoundedHttpProtocol
from moonlet.serve.service import Service

__all__ = ["Server", "bind", "check_exposure", "is_loopback"]

_BACKLOG = 2048


def is_loopback(host: str) -> bool:
    """Whether every address that a host name stands for is a loopback address.

    Raises:
        ConfigError: The name cannot be resolved.
    """
    return all(ipaddress.ip_address(address).is_loopback for _, address in _resolve(host, 0))


def check_exposure(host: str, has_key: bool, insecure: bool) -> None:
    """Refuse to serve other machines without a key.

    Raises:
        ConfigError: The host is no loopback address and there is neither key nor consent.
    """
    if not (has_key or insecure or is_loopback(host)):
        raise ConfigError(
            f"--host {host} would let other machines in without a key; give --api-key, or "
            "--insecure if that is what you want"
        )


def bind(host: str, port: int) -> socket.socket:
    """Take the address at once, so that a taken port shows before a long load.

    Clients that connect before the model is loaded wait for it.

    Args:
        host: Name or address.
        port: 0 takes a free one.

    Raises:
        ConfigError: The address cannot be bound.
    """
    family, address = _resolve(host, port)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port"
        ) from error
    return bound


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} cannot be resolved: {error}") from error
    return [(family, str(address[0])) for family, _, _, _, address in found]


class Server(uvicorn.Server):
    """Serves until a signal, then drains: no new work, running requests finish.

    A first SIGTERM or SIGINT starts the drain, a second one ends it at once.

    Args:
        app: Application of `create_app`.
        drain_timeout_s: How long running requests may take to finish.
        on_started: Called once requests are accepted.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        drain_timeout_s: int = 30,
        on_started: Callable[[], None] | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            http=BoundedHttpProtocol,
            ws="none",
            timeout_graceful_shutdown=drain_timeout_s,
        )
        super().__init__(config)
        self._service: Service = app.state.service
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        if self._on_started is not None:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining, or stop draining when it happens again."""
        self._service.is_draining = True
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    def run_until_exit(self, bound: socket.socket) -> bool:
        """Serve on a bound socket until a signal.

        Returns:
            Whether the drain was cut short by a second signal.
        """
        self.run(sockets=[bound])
        return self.force_exit
