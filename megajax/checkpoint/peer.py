"""Parts of a training state between hosts: a small HTTP server with range requests, and its client.

Requests need the run's token, which the processes exchange through jax's coordination service. The server listens only on
the address by which this host reaches process 0. Data are not encrypted: as for jax's own connections, the network between
the hosts must be private.
"""

import contextlib
import hmac
import http.client
import http.server
import os
import pathlib
import re
import shutil
import socket
import threading
from typing import BinaryIO

from megajax.checkpoint.process_state import FILES, PartName, new_part

TIMEOUT = 60.0  # seconds without any byte
HELLO_SECONDS = 10.0  # in which a connection must have shown the token
STRANGERS = 64  # connections that have not
FOLDERS = ("own", "copies")


class PartServer:
    """Serves the files of the parts below a directory until it is closed."""

    def __init__(self, directory: pathlib.Path, token: str, address: str):
        """Starts a thread.

        Args:
          directory: has a folder for each of FOLDERS, with parts.
          token: that requests must have.
          address: to listen on; a free port is chosen.
        """

        class Handler(_Handler):
            root, expected = directory, f"Bearer {token}"

        self._server = _Server((address, 0), Handler)
        self.address = f"{address}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True, name="part server").start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    """Has a bounded number of connections that have not shown the token yet: the oldest is closed for a new one."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, *arguments):
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request, client_address) -> None:
        with self._lock:
            oldest = next(iter(self._strangers)) if len(self._strangers) >= STRANGERS else None
            self._strangers.pop(oldest, None)
            self._strangers[request] = None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread ends
        super().process_request(request, client_address)

    def admit(self, connection: socket.socket) -> None:
        """The connection has shown the token."""
        with self._lock:
            self._strangers.pop(connection, None)
        connection.settimeout(TIMEOUT)

    def shutdown_request(self, request) -> None:
        with self._lock:
            self._strangers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        """Errors of connections are not printed."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """GET /own/PART/FILE, with an optional header Range: bytes=FIRST-LAST."""

    root: pathlib.Path
    expected: str
    protocol_version = "HTTP/1.1"
    timeout = HELLO_SECONDS
    disable_nagle_algorithm = True

    def do_GET(self) -> None:  # noqa: N802 (the name is http.server's)
        if not hmac.compare_digest(self.headers.get("Authorization", ""), self.expected):
            return self._answer(403)
        self.server.admit(self.connection)
        folder, _, rest = self.path.lstrip("/").partition("/")
        name, _, file_name = rest.partition("/")
        if folder not in FOLDERS or PartName.parse(name) is None or file_name not in FILES:
            return self._answer(404)
        try:
            with open(self.root / folder / name / file_name, "rb") as file:
                self._send(file)
        except FileNotFoundError:
            self._answer(404)

    def _send(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        first, stop = 0, size
        if header := self.headers.get("Range"):
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", header)
            if not found or not int(found[1]) <= int(found[2]) < size:
                return self._answer(416)
            first, stop = int(found[1]), int(found[2]) + 1
        self._answer(206 if header else 200, stop - first)
        self.wfile.flush()
        if stop > first:
            self.connection.sendfile(file, first, stop - first)

    def _answer(self, code: int, length: int = 0) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *arguments) -> None:
        """Requests are not logged."""


class PeerClient:
    """Reads the parts of one other host over a connection that is kept; for one thread."""

    def __init__(self, address: str, token: str):
        """`address` is HOST:PORT of a `PartServer`."""
        host, _, port = address.rpartition(":")
        self.address, self._headers = address, {"Authorization": f"Bearer {token}"}
        self._connection = http.client.HTTPConnection(host, int(port), timeout=TIMEOUT)

    def read(self, path: str, start: int | None = None, stop: int = 0) -> bytes:
        """A file below the server's directory, or its bytes [start, stop).

        Raises:
          OSError: the server does not answer or does not have it.
        """
        if start is not None and start >= stop:
            return b""
        with self._get(path, {} if start is None else {"Range": f"bytes={start}-{stop - 1}"}) as response:
            try:
                return response.read()
            except http.client.HTTPException as error:
                self._connection.close()
                raise OSError(f"host {self.address} closed the connection in {path}: {error}") from error

    def download(self, path: str, into: pathlib.Path) -> None:
        """Copies a file; the caller verifies its checksum. Raises OSError as `read`."""
        with self._get(path, {}) as response, open(into, "wb") as file:
            shutil.copyfileobj(response, file, 1 << 22)

    def download_part(self, folder: str, name: PartName, into: pathlib.Path) -> None:
        """Copies a part into a directory, atomically. Raises OSError as `read`."""
        with new_part(into, name) as part:
            for file_name in FILES:
                (part / file_name).parent.mkdir(parents=True, exist_ok=True)
                self.download(f"{folder}/{name}/{file_name}", part / file_name)

    def _get(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        try:
            self._connection.request("GET", f"/{path}", headers=self._headers | headers)
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next request opens another
            raise OSError(f"host {self.address} does not answer: {error or type(error).__name__}") from error
        if response.status not in (200, 206):
            response.read()
            raise OSError(f"host {self.address} does not have {path} ({response.status})")
        return response

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def own_address(coordinator: str | None) -> str:
    """The address of this host on the network that leads to the coordinator, HOST:PORT; no packet is sent."""
    host, _, port = (coordinator or "127.0.0.1:1").rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), socket.AF_INET, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
