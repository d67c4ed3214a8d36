"""`orca-dist doctor`, as a person calls it on one machine."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from orca_dist.cli.main import main
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.hub import REPO, loopback_hub, use_hub


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("ORCA_", "GLOO_", "NCCL_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("doctor") / "loud")


def examined(
    folder: Path, capfd: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, dict[str, str]], dict]:
    """The exit code, the findings by check, and the whole document."""
    code = main(["doctor", str(folder), "--port", "0", "--device", "cpu", *flags, "--json"])
    document = json.loads(capfd.readouterr().out)
    return code, {finding["check"]: finding for finding in document["findings"]}, document


def test_the_document(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, findings, document = examined(folder, capfd)
    assert document["schema"] == 1
    assert (code == 1) is (document["verdict"] == "fail")
    assert findings["model"] == {
        "check": "model",
        "verdict": "pass",
        "seen": f"{folder}: is here",
        "remedy": "",
        "node": "127.0.0.1",
    }
    for check in ("versions", "memory", "interface", "links", "port"):
        assert findings[check]["verdict"] == "pass"
    (node,) = document["nodes"]
    assert node["node"] == "127.0.0.1"
    assert node["hostname"] == socket.gethostname()
    (link,) = document["links"]
    assert (link["source"], link["target"], link["problem"]) == ("127.0.0.1", "127.0.0.1", "")


def test_a_taken_port_fails_the_command(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, findings, _ = examined(folder, capfd, "--port", str(port))
    assert code == 1
    assert findings["port"]["verdict"] == "fail"
    assert f"(pid {os.getpid()})" in findings["port"]["seen"]


def test_access_is_judged_as_serve_does(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing on loopback; beyond it strangers, and files that don't do."""
    everywhere = ("--host", "0.0.0.0")
    keys = ("--api-keys-file", str(tmp_path / "none"))
    cases: list[tuple[tuple[str, ...], str, str]] = [
        ((), "pass", "strangers stay out of 127.0.0.1"),
        (everywhere, "fail", "anyone who reaches it could use the server"),
        ((*everywhere, "--allow-insecure", "on"), "warn", "anyone who reaches it could use"),
        (keys, "fail", "none: can't be read"),
    ]
    for flags, verdict, seen in cases:
        code, findings, _ = examined(folder, capfd, *flags)
        assert findings["access"]["verdict"] == verdict
        assert seen in findings["access"]["seen"]
        assert findings["access"]["node"] == "127.0.0.1"
        assert code == (verdict == "fail")


def test_a_model_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, findings, _ = examined(tmp_path / "absent", capfd)
    assert code == 1
    assert findings["model"]["seen"] == f"{tmp_path / 'absent'}: no such folder"
    assert "memory" not in findings


def test_a_model_of_the_hub(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub answers; then the weights are here; and one that there isn't. Nothing is fetched."""
    with loopback_hub() as hub:
        hub.repos[REPO] = loud_llama(tmp_path / "loud")
        use_hub(hub, tmp_path / "hf" / "hub", monkeypatch)
        _, findings, _ = examined(Path(REPO), capfd)
        assert findings["model"]["verdict"] == "pass"
        assert findings["model"]["seen"].endswith("fetched at start")
        assert not any(name.endswith((".safetensors", "config.json")) for name in hub.sent)
        assert "memory" not in findings
        assert main(["model", "fetch", REPO]) == 0
        capfd.readouterr()
        _, findings, _ = examined(Path(REPO), capfd)
        assert findings["model"]["seen"] == f"{REPO}: is here"
        assert findings["memory"]["verdict"] == "pass"
        code, findings, _ = examined(Path("tiny/absent"), capfd)
    assert (code, findings["model"]["verdict"]) == (1, "fail")
    assert "tiny/absent" in findings["model"]["seen"]


def test_what_stages_need_follows_the_flags(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, findings, _ = examined(folder, capfd, "--stages", "4")
    assert findings["memory"]["seen"].startswith("4 stages of ")


def test_no_cluster_at_the_address(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A finding among the others, of this node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        code, _, document = examined(folder, capfd, "--ray-address", address)
    assert code == 1
    last = document["findings"][-1]
    assert (last["check"], last["verdict"]) == ("ray", "fail")
    assert address in last["seen"]
    assert "Connection refused" in last["seen"]
    assert len(document["nodes"]) == 1


def test_settings_that_serve_refuses(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--stages", "5000"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")


def test_the_table(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert main(["doctor", str(folder), "--port", str(port)]) == 1
    lines = capfd.readouterr().out.splitlines()
    (row,) = (index for index, line in enumerate(lines) if " port " in line and "fail" in line)
    assert lines[row].split()[:2] == ["fail", "port"]
    assert lines[row + 1].strip().startswith("\u2192 end that")
    assert lines[-1].split(":")[0].endswith("checks of 1 node")
    assert max(map(len, lines)) <= 120
