"""An S3 server on this machine, and in front of it a proxy that sees every request and can spoil it."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: What spoils a request: a status to answer with, "hang" (for longer than anyone waits), "break" (half an
#: answer), or "damage" (another last byte in what is sent). None passes it on.
Fault = Callable[[str, str], int | str | None]


class Store:
    """A bucket called `bucket`. `asked` holds `(method, key, range)` of every request that came through the proxy."""

    def __init__(self, backend: int) -> None:
        self.asked: list[tuple[str, str, str]] = []
        self.connections = 0
        self.fault: Fault = lambda method, key: None
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, backend))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.env = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",
            "FSSPEC_S3_ENDPOINT_URL": self.endpoint,
        }

    def client(self) -> Any:
        """boto3's own client, through the proxy."""
        import boto3

        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.endpoint, **keys)

    def put(self, key: str, content: bytes) -> None:
        self.client().put_object(Bucket="bucket", Key=key, Body=content)

    def names(self, prefix: str = "") -> list[str]:
        """The keys of all objects below a prefix, without it."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
        return [entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", ())]

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """All objects below a prefix."""
        client = self.client()
        return {
            name: client.get_object(Bucket="bucket", Key=prefix + name)["Body"].read() for name in self.names(prefix)
        }

    def sent(self) -> list[str]:
        """The keys of all uploads, in order."""
        return [key for verb, key, _ in self.asked if verb == "PUT"]

    def empty(self) -> None:
        client = self.client()
        for name in self.names():
            client.delete_object(Bucket="bucket", Key=name)
        self.asked.clear()

    def of(self, key: str, method: str = "GET") -> list[str]:
        """The ranges of all requests for a key, in order."""
        return [range for verb, name, range in self.asked if (verb, name) == (method, key)]


def _handler(store: Store, backend: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            with store.lock:
                store.connections += 1

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            key = self.path.partition("?")[0].removeprefix("/bucket").lstrip("/")
            with store.lock:
                store.asked.append((self.command, key, self.headers.get("Range", "")))
            fault = store.fault(self.command, key)
            if fault == "hang":
                threading.Event().wait(30)
                self.close_connection = True
                return
            if isinstance(fault, int):
                self.answer(fault, [], b"")
                return
            if fault == "damage":
                body = body[:-1] + bytes([body[-1] ^ 1])
            inner = http.client.HTTPConnection("127.0.0.1", backend)
            inner.request(self.command, self.path, body, dict(self.headers))
            response = inner.getresponse()
            self.answer(response.status, response.getheaders(), response.read(), fault == "break")
            inner.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

        def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, broken: bool = False) -> None:
            self.send_response_only(status)
            sized = False
            for name, value in headers:
                sized = sized or name.lower() == "content-length"
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            if not sized:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if broken else body)
            self.close_connection = self.close_connection or broken

        def log_message(self, *args: Any) -> None: ...

    return Handler


@contextmanager
def serving() -> Iterator[Store]:
    """A store for as long as it is needed."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    store = Store(server.get_host_and_port()[1])
    store.client().create_bucket(Bucket="bucket")
    try:
        yield store
    finally:
        store.server.shutdown()
        server.stop()
