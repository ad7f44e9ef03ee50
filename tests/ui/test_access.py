"""Access to `octet ui`: who is refused, what is too large, and which names lead out of the folder."""

import os
import shutil
from itertools import chain
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from tests.commands.conftest import config_of, write
from tests.conftest import NANO, said_by
from tests.reports.conftest import HOSTILE
from tests.ui.conftest import does
from trainer.commands.page.access import LARGEST, LARGEST_UPLOAD

ROUTES = ["", "ui.js", "ui.css", "page.css", "live", "do/look", "commands", "upload?name=a.csv"]
ROUTES += ["made/share.png?run=run-1"]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_asks_for_the_key_a_local_name_and_no_other_origin(asked, address, path):
    for method in ("GET", "POST", "PUT"):
        for key in ("/", "/wrong/", urlsplit(address).path[:-2] + "/"):
            assert asked(method, path, key=key)[0] == 403
        for host in ("evil.example", "127.0.0.1.evil.example:80"):
            assert asked(method, path, Host=host)[0] == 403
        for origin in ("http://evil.example", "null"):
            assert asked(method, path, Origin=origin)[0] == 403


def test_a_web_socket_is_refused(asked):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Key": "AAAA"}
    upgrade |= {"Sec_WebSocket_Version": "13"}
    assert asked("GET", "live", key="/", **upgrade)[0] == 403
    assert asked("GET", "live", **upgrade)[0] == 200  # it is answered as what it is without the upgrade


def test_nothing_listens_but_loopback(address):
    port = urlsplit(address).port
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for line in chain.from_iterable(tables)]
    assert {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")} == {f"0100007F:{port:04X}"}


def test_the_page_loads_nothing_from_elsewhere_and_says_so(asked):
    status, headers, page = asked("GET", "", Origin="http://localhost:1", Host="localhost:1")
    assert status == 200
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('value="q8_0"') == 1
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_a_table_is_kept_and_nothing_that_could_run(asked, folder):
    status, _, said = asked("PUT", "upload?name=my%20table.CSV", "question,answer\n1+1,2\n")
    assert (status, "my_table.CSV, 22 bytes" in said) == (200, True)
    assert (folder / "runs/uploads/my_table.CSV").read_text() == "question,answer\n1+1,2\n"
    assert asked("PUT", "upload?name=sums.parquet", b"PAR1\0\xff")[0] == 200
    assert (folder / "runs/uploads/sums.parquet").read_bytes() == b"PAR1\0\xff"
    for name in ("x.py", "x.csv.py", "", "..", ".csv", "config.yaml", "x.csv/../../x.py"):
        assert asked("PUT", f"upload?name={quote(name)}", "x")[0] == 415
    for name in ("../../out.csv", "/tmp/out.csv", "..\\out.csv", "out.csv"):
        assert asked("PUT", f"upload?name={quote(name)}", "x")[0] == 200
    assert sorted(os.listdir(folder / "runs/uploads")) == ["my_table.CSV", "out.csv", "sums.parquet"]
    assert sorted(os.listdir(folder)) == ["runs", "server.log"]
    place, moved = folder / "runs/uploads", (folder / "runs/uploads").rename(folder / "moved")
    for kind in ("", moved):  # a file, or a link to a folder
        place.symlink_to(kind) if kind else place.touch()
        status, _, said = asked("PUT", "upload?name=other.csv", "x")
        assert (status, 'class="error"' in said, (moved / "other.csv").exists()) == (507, True, False)
        place.unlink()
    moved.rename(place)


@pytest.mark.parametrize(
    ("method", "path", "most"), [("PUT", "upload?name=a.csv", LARGEST_UPLOAD), ("POST", "do/plan", LARGEST)]
)
def test_what_is_too_large_is_refused_and_leaves_nothing(asked, folder, method, path, most):
    status, _, said = asked(method, path, bytes(most + 1))
    assert status == 413
    assert ("write the path of the file" in said, 'id="sent"' in said) == (True, method == "PUT")
    assert not [name for name in os.listdir(folder / "runs") if "partial" in name]


@pytest.mark.parametrize(
    "name", ["", "..", "../out", "a/b", "/tmp/out", ".hidden", "-x", "a b", "a\nb", "x" * 65, "uploads"]
)
def test_the_name_of_a_run_leads_nowhere_else(asked, folder, name):
    given = {"--preset": "nano", "task.name": "nano", "name": name, "into": "said"}
    assert "it consists of at most 64 letters" in does(asked, "train", **given)
    assert "there is no run of this name" in does(asked, "resume", run=name)
    assert asked("GET", f"made/report.html?run={quote(name)}")[0] == 404


def test_a_link_out_of_the_folder_has_no_name(asked, folder, tmp_path):
    (folder / "runs/link").symlink_to(write(tmp_path, {"config.yaml": config_of()}))
    assert "it consists of at most 64 letters" in does(asked, "train", **{"--preset": "nano", "name": "link"})
    assert "there is no run of this name" in does(asked, "stop", run="link")
    assert "link" not in asked("GET", "live?run=link")[2]


@pytest.mark.parametrize("more", ["--debug", "run.dir=/tmp/x", "task.name=nano; reboot", "'open", "$(reboot)"])
def test_more_settings_are_settings(asked, more):
    given = {"--preset": "nano", "task.name": "nano", "name": "run-1", "more": more}
    assert "More settings" in does(asked, "train", **given)


def test_only_the_actions_of_the_table_exist(asked):
    for name in ("training", "told", "__init__", "nothing"):
        assert asked("POST", f"do/{name}", "{}")[0] == 404
    for body in ("", "[1]", "no", "3"):
        assert asked("POST", "do/plan", body)[0] == 400
    assert asked("GET", "do/plan")[0] == 405


def test_a_hostile_table_is_text(asked, folder):
    """It says what the command says, and its names and values are escaped."""
    (folder / "runs/uploads").mkdir(exist_ok=True)
    table = folder / "runs/uploads/hostile.csv"
    rows = [f'"{number} {HOSTILE}",{HOSTILE}' for number in range(9)]
    table.write_text("\n".join(["question,answer", *rows, f'"{HOSTILE}",']), encoding="utf-8", errors="replace")
    said = does(asked, "look", **{"--preset": "nano", "task.name": "records", "task.path": str(table), "into": "sheet"})
    assert "&lt;script&gt;" in said
    assert "<script" not in said
    assert "\x1b" not in said
    (folder / "runs/uploads/broken.csv").write_bytes(b"\0\xff\xfe" * 50)
    said = does(asked, "look", **{"--preset": "nano", "task.name": "records", "task.path": "runs/uploads/broken.csv"})
    assert 'class="error"' in said


def test_a_port_that_is_taken_is_said(capsys, address, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    port = urlsplit(address).port
    status, _, said = said_by(capsys, "ui", "--port", port)
    assert (status, f"--port {port}: it cannot be used (Address already in use). " in said) == (2, True)


def test_the_files_of_a_run_are_sent_and_no_others(asked, folder):
    place = write(folder / "runs/sent", {"config.yaml": config_of(), "report.html": "<script>alert(1)</script>"})
    status, headers, _ = asked("GET", "made/report.html?run=sent")
    assert (status, "sandbox" in headers["Content-Security-Policy"]) == (200, True)
    assert asked("GET", "made/config.yaml?run=sent")[0] == 404
    assert asked("GET", "made/..%2fconfig.yaml?run=sent")[0] == 404
    (place / "share.png").symlink_to(NANO / "config.json")
    assert asked("GET", "made/share.png?run=sent")[0] == 404
    shutil.rmtree(place)
