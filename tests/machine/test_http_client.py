"""An exchange over an encrypted connection; those without encryption are tried in tests/reward/test_judge.py."""

import http.server
import ssl
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus

import pytest

from trainer.machine.http_client import NoReply, exchange


class Server(http.server.BaseHTTPRequestHandler):
    """Answers at once, or with a byte now and then for ever."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        if self.path == "/now":
            self.wfile.write(b"42")
        while self.path == "/drip":
            try:
                self.wfile.write(b" ")
            except OSError:
                return
            time.sleep(0.05)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def url(certificate) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_reply_over_an_encrypted_connection(url, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert exchange(f"{url}/now", {"a": 1}, timeout_s=30, largest=100, direct=True) == b"42"


def test_a_reply_that_drips_over_an_encrypted_connection(url, certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(NoReply, match="1 s"):
        exchange(f"{url}/drip", {"a": 1}, timeout_s=1, largest=10**9, direct=True)


def test_a_certificate_that_nobody_vouches_for_is_refused(url):
    with pytest.raises(NoReply, match="CERTIFICATE_VERIFY_FAILED"):
        exchange(f"{url}/now", {"a": 1}, timeout_s=30, largest=100, direct=True)
