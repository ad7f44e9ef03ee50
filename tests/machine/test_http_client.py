"""An exchange over an encrypted connection; those without encryption are tried in tests/reward/test_judge.py."""

import json

import pytest

from tests.hub_server import serving
from trainer.machine.http_client import NoReply, exchange


def test_an_encrypted_connection(certificate, monkeypatch):
    with serving({}, certificate=certificate) as hub:
        url = f"{hub.url}/api/validate-yaml"
        with pytest.raises(NoReply, match="CERTIFICATE_VERIFY_FAILED"):  # nobody vouches for it
            exchange(url, {}, timeout_s=30, largest=100, direct=True)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert json.loads(exchange(url, {}, timeout_s=30, largest=100, direct=True)) == {"errors": [], "warnings": []}
        hub.delay_s = 20.0
        with pytest.raises(NoReply, match="1 s"):
            exchange(hub.url, None, timeout_s=1, largest=100, direct=True)
