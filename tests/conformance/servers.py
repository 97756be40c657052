"""Servers that the stores are tested against: a real S3 server, a network that fails, and what WebHDFS answers."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"

_S3 = """
import sys
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple
application = DomainDispatcherApplication(create_backend_app)
run_simple(sys.argv[1], int(sys.argv[2]), application, request_handler=MotoRequestHandler, threaded=False)
"""
"""One request after the other: moto looks for an object, then puts it, so two threads may both succeed; in S3 not."""


@contextlib.contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """Run moto's S3 server in a process of its own; yield its address."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", _S3, HOST, str(port)], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection((HOST, port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
        yield f"http://{HOST}:{port}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def serve(handler: type[http.server.BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """Serve requests from threads of this process; yield the address. The handlers find the attributes in `server`."""
    server = http.server.ThreadingHTTPServer((HOST, 0), handler)
    server.daemon_threads = True
    vars(server).update(attributes)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclasses.dataclass
class Network:
    """Between a client and a server: what happens to a request is decided by `fault`, which may be set at any time.

    It gets the method and the path and returns None or one of: `answer lost` (the server does it, the client's
    connection is cut), `503`, `hang` (nothing happens until `release`), `unconditional` (conditions are ignored).
    """

    fault: Callable[[str, str], str | None] = lambda method, path: None
    release: threading.Event = dataclasses.field(default_factory=threading.Event)

    @contextlib.contextmanager
    def to(self, target: str) -> Iterator[str]:
        """Yield an address that stands for the target's."""
        with serve(_Forwarding, network=self, target=urllib.parse.urlsplit(target).netloc) as url:
            try:
                yield url
            finally:
                self.release.set()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Any

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))


class _Forwarding(_Handler):
    def _forward(self) -> None:
        body = self._body()
        fault = self.server.network.fault(self.command, self.path)
        self.close_connection = fault is not None
        if fault == "hang":
            self.server.network.release.wait(60)
        elif fault == "503":
            self._answer(503, [], b"<Error><Code>ServiceUnavailable</Code><Message>busy</Message></Error>")
        else:
            headers = dict(self.headers.items())
            if fault == "unconditional":
                headers.pop("If-None-Match", None)
            with contextlib.closing(http.client.HTTPConnection(self.server.target, timeout=60)) as connection:
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            if fault == "answer lost":
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self._answer(answer.status, answer.getheaders(), content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815 - http.server's names

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        lengths = [value for name, value in headers if name.lower() == "content-length"]
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in {"connection", "transfer-encoding", "content-length", "server", "date"}:
                self.send_header(name, value)
        is_head = self.command == "HEAD"  # tells of a length, and sends nothing
        self.send_header("Content-Length", lengths[0] if is_head and lengths else str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class WebHdfs(_Handler):
    """Answers as HDFS's REST interface does, as far as a store asks it, from a directory `root` of the server.

    It is written after the documentation, since no HDFS runs here: rename refuses an existing file with `false`, and a
    directory that is not empty is deleted only recursively.
    """

    def _handle(self) -> None:
        body = self._body()
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        path = self.server.root / urllib.parse.unquote(url.path).removeprefix("/webhdfs/v1").lstrip("/")
        with _ONE_NAME_NODE:
            try:
                status, content = self._do(query, path, body)
            except (FileNotFoundError, NotADirectoryError):
                status, content = 404, _remote_error("FileNotFoundException", f"File does not exist: {path}")
            except OSError as error:
                status, content = 403, _remote_error("IOException", str(error))
        self.send_response(status)
        if status == 307:
            self.send_header("Location", f"http://{self.headers['Host']}{self.path}&data=true")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = _handle  # noqa: N815 - http.server's names

    def _do(self, query: dict[str, str], path: Path, body: bytes) -> tuple[int, bytes]:
        operation = query["op"]
        if operation in {"CREATE", "APPEND", "OPEN"} and "data" not in query:
            return 307, b""  # the client is sent to a data node
        if operation == "CREATE":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
            return 201, b""
        if operation == "APPEND":
            with path.open("ab") as file:
                file.write(body)
            return 200, b""
        if operation == "OPEN":
            start = int(query.get("offset", 0))
            return 200, path.read_bytes()[start : start + int(query["length"])]
        answer = getattr(self, f"_{operation.lower()}")(query, path)
        return 200, json.dumps(answer).encode()

    def _getfilestatus(self, query: dict[str, str], path: Path) -> object:
        return {"FileStatus": _status(path, "")}

    def _liststatus(self, query: dict[str, str], path: Path) -> object:
        if path.is_dir():
            statuses = [_status(child, child.name) for child in sorted(path.iterdir())]
        else:
            statuses = [_status(path, "")]
        return {"FileStatuses": {"FileStatus": statuses}}

    def _mkdirs(self, query: dict[str, str], path: Path) -> object:
        path.mkdir(parents=True, exist_ok=True)
        return {"boolean": True}

    def _rename(self, query: dict[str, str], path: Path) -> object:
        target = self.server.root / query["destination"].lstrip("/")
        if target.exists() or not path.exists() or not target.parent.is_dir():
            return {"boolean": False}
        path.rename(target)
        return {"boolean": True}

    def _delete(self, query: dict[str, str], path: Path) -> object:
        if not path.exists():
            return {"boolean": False}
        path.rmdir() if path.is_dir() else path.unlink()
        return {"boolean": True}


_ONE_NAME_NODE = threading.Lock()


def _status(path: Path, suffix: str) -> dict[str, object]:
    length = path.stat().st_size
    kind = "DIRECTORY" if path.is_dir() else "FILE"
    return {"pathSuffix": suffix, "type": kind, "length": 0 if kind == "DIRECTORY" else length}


def _remote_error(name: str, message: str) -> bytes:
    return json.dumps({"RemoteException": {"exception": name, "message": message}}).encode()
