"""The commands in this process: exit codes, one-line errors, names that are nearly right."""

from __future__ import annotations

import io
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from orca_dist import __version__
from orca_dist.cli.generate import SamplingFlags
from orca_dist.cli.knobs import knobs
from orca_dist.cli.main import commands, main, run
from orca_dist.cli.settings import ClientConfig, Settings
from orca_dist.cli.usage import parse
from orca_dist.client import Chunk, Client
from orca_dist.config import Dtype, EngineConfig, Launcher
from orca_dist.errors import OrcaError, PipelineLost
from orca_dist.params import SamplingParams
from scripts import docs_cli
from tests.fixtures.checkpoints import byte_tokenizer
from tests.fixtures.foreign_port import answering

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ORCA_")]:
        monkeypatch.delenv(name)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def errors_of(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code and the one line of a command that fails."""
    code = main(arguments)
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return code, line


# ---- usage -------------------------------------------------------------


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"orca-dist {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "generate", "info", "model", "simulate", "plan"])
def test_help_is_no_error(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert "--log-level" in capfd.readouterr().out


def test_the_first_help_names_every_command_and_the_version(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    out = capfd.readouterr().out
    assert "--version" in out
    assert all(name in out for name in commands(Settings()))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "",
            "Expected one of {serve, generate, info, model, profile, bench,",
        ),
        ("serv x", "serv: no such command; did you mean serve?; choose one of serve, generate"),
        ("xyz", "error: xyz: no such command; choose one of serve, generate, info, model"),
        ("serve --max-batch-siz 3", "--max-batch-siz, 3; did you mean --max-batch-size?"),
        ("generate x --temprature 1", "did you mean --temperature?"),
        ("serve --stages two", "error: --stages two: needs a whole number; see orca-dist"),
        ("serve --stages=it's", "error: --stages it's: needs a whole number; see"),
        ("serve --max-model-len 32k", "error: --max-model-len 32k: needs a whole number; see"),
        ("serve --memory-share half", "error: --memory-share half: needs a number; see"),
        ("generate x --timeout-s 3s", "error: --timeout-s 3s: needs a number; see"),
        ("serve --stages", "Missing value for argument '--stages'"),
        ("serve --dtype int4", "invalid choice 'int4' for argument '--dtype'"),
        ("serve a b", "Unrecognized options: b"),
        ("serve --stages 0", "stages = 0: must be at least 1"),
        ("serve --port 70000", "port = 70000: must be in 0..65535"),
        ("serve --config no/such.yaml", "no/such.yaml can't be read"),
        ("info --log-level loud", "invalid choice 'loud' for argument '--log-level'"),
        ("generate x --top-p 7", "error: top_p: 7.0 is not in (0, 1]"),
        ("generate x --max-tokens 0", "error: max_tokens: 0 is less than 1"),
        ("generate x --seed -1", "error: seed: -1 is not in"),
        ("generate x --timeout-s 0", "timeout_s = 0.0: must be more than 0"),
        ("generate x --timeout-s nan", "timeout_s = nan: must be more than 0"),
        ("model convert a", "TARGET"),
        ("model", "Expected one of {fetch, convert, show}"),
        (
            "model ftch",
            "error: ftch: no such command; did you mean fetch?; choose one of fetch, convert, show",
        ),
        ("model convrt a b", "error: convrt: no such command; did you mean convert?; choose"),
        ("model --log-level debug shw x", "error: shw: no such command; did you mean show?"),
        ("model xyz", "error: xyz: no such command; choose one of fetch, convert, show"),
        ("model --log-lvel debug fetch", "--log-lvel, debug; did you mean --log-level?"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    line: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, error = errors_of(line.split(), capfd)
    assert code == 2
    assert message in error


def test_an_unknown_variable_is_refused_with_near_names(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCA_MAX_BATCH", "3")
    code, error = errors_of(["info"], capfd)
    assert code == 2
    assert "ORCA_MAX_BATCH: no such variable; did you mean ORCA_MAX_BATCH_SIZE" in error


# ---- settings reach the command ----------------------------------------


def parsed(line: str, settings: Settings | None = None) -> object:
    return parse(commands(settings or Settings()), line.split())


def test_every_flag_of_serve_is_a_field() -> None:
    command = parsed(
        "serve /models/x --stages 4 --split 8 7 7 8 --launcher local --dtype bfloat16 "
        "--max-model-len 512 --memory-share 0.5 --host ::1 --port 0 --log-level debug"
    )
    assert command.model == "/models/x"  # type: ignore[attr-defined]
    assert command.engine == EngineConfig(  # type: ignore[attr-defined]
        stages=4,
        split=(8, 7, 7, 8),
        launcher=Launcher.LOCAL,
        dtype=Dtype.BFLOAT16,
        max_model_len=512,
        memory_share=0.5,
    )
    assert command.server.host == "::1"  # type: ignore[attr-defined]
    assert command.log.log_level == "debug"  # type: ignore[attr-defined]


def test_flags_win_over_the_file_and_the_file_over_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineConfig] = []
    monkeypatch.setattr(
        "orca_dist.cli.serve.Serve.run", lambda command: seen.append(command.engine) or 0
    )
    path = tmp_path / "settings.yaml"
    path.write_text("stages: 3\nmax_batch_size: 3\n")
    variables = {"ORCA_STAGES": "4", "ORCA_MAX_BATCH_SIZE": "4", "ORCA_BLOCK_SIZE": "4"}
    run(["serve", "--config", str(path), "--stages", "2"], variables)
    run(["serve", f"--config={path}", "--stages=2"], variables)
    assert [(c.stages, c.max_batch_size, c.block_size) for c in seen] == [(2, 3, 4)] * 2


def test_sampling_flags_are_the_sampling_params_but_for_what_no_server_offers() -> None:
    flags = {(k.name, k.type, k.default) for k in knobs(SamplingFlags)}
    params = {(k.name, k.type, k.default) for k in knobs(SamplingParams)}
    assert {name for name, _, _ in params - flags} == {"return_logits"}
    assert flags - params == set()


def test_the_page_of_commands_is_up_to_date() -> None:
    assert docs_cli.main(["--check"]) == 0


# ---- commands that fail ------------------------------------------------


def test_nobody_at_the_port(capfd: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{closed_port()}"
    for command in (["generate", "hi"], ["generate", "hi", "--json"], ["info"]):
        code, error = errors_of([*command, "--address", address], capfd)
        assert code == 1
        assert f"no orca-dist server answers at {address}" in error


def test_a_prompt_from_a_terminal_has_to_be_given(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    code, error = errors_of(["generate"], capfd)
    assert (code, error) == (2, "error: no prompt: give one as an argument, or pipe one in")


def test_a_prompt_that_is_not_unicode(capfd: pytest.CaptureFixture[str]) -> None:
    code, error = errors_of(["generate", "a\udcff", "--address", "127.0.0.1:1"], capfd)
    assert code == 2
    assert error.startswith("error: text: can't be sent")


def test_a_piped_prompt_that_is_not_utf_8(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    code, error = errors_of(["generate"], capfd)
    assert code == 2
    assert error.startswith("error: the prompt on stdin is not UTF-8: ")


def test_a_port_that_speaks_another_protocol(capfd: pytest.CaptureFixture[str]) -> None:
    with answering() as address:
        for command in ("generate x", "generate x --json", "info"):
            code, error = errors_of([*command.split(), "--address", address], capfd)
            assert code == 1
            assert address in error


def test_an_unknown_key_of_a_file_is_refused_with_near_names(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("stagse: 3\n")
    code, error = errors_of(["serve", "--config", str(path)], capfd)
    assert code == 2
    assert error == f"error: {path}: stagse: no such key; did you mean stages?"


@pytest.mark.parametrize("command", ["generate x", "info"])
@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "http://127.0.0.1:50051", "a:b", "a:0", "a:65536", ":50051", "::1", "a:1/", ""],
)
def test_an_address_is_host_and_port(
    command: str, address: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, error = errors_of([*command.split(), "--address", address], capfd)
    assert code == 2
    assert error == f"error: address = {address}: needs host:port, such as 127.0.0.1:50051"


@pytest.mark.parametrize("address", ["localhost:1", "[::1]:50051", "a.b-c.example:65535"])
def test_addresses_that_may_be_a_server_s(address: str) -> None:
    ClientConfig(address=address).check()


class OneChunk(Client):
    """Answers with one piece of text, and then with an error."""

    prompts: ClassVar[list[object]] = []

    def stream(self, prompt: object, *_: object, **__: object) -> Iterator[Chunk]:  # type: ignore[override]
        self.prompts.append(prompt)
        yield Chunk(
            request_id="r1", text="half an ans", token_ids=(5,), finish_reason=None, usage=None
        )
        raise PipelineLost("stage 1 is lost")


def test_an_error_starts_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orca_dist.client.Client", OneChunk)
    assert main(["generate", "x"]) == 4
    assert capfd.readouterr() == ("half an ans\n", "error: stage 1 is lost\n")


@pytest.mark.parametrize(
    ("piped", "prompt"), [("one\n", "one"), ("one\n\n", "one\n"), (" one", " one")]
)
def test_the_newline_that_ends_a_piped_prompt_is_left_out(
    piped: str, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orca_dist.client.Client", OneChunk)
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    main(["generate"])
    assert OneChunk.prompts.pop() == prompt


def test_serve_looks_at_the_port_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def too_early(*arguments: object) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr("orca_dist.engine.engine.Engine.start", too_early)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = errors_of(["serve", str(tmp_path), "--port", str(port)], capfd)
    assert code == 3
    assert f"can't listen on 127.0.0.1:{port}: Address already in use" in error


@pytest.mark.parametrize("model", ["no/such/folder", "."])
def test_serve_names_a_model_that_is_none(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, error = errors_of(["serve", model, "--port", "0", "--launcher", "local"], capfd)
    assert code == 3
    assert ("config.json does not exist" if model == "." else model) in error


def test_model_show_names_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, error = errors_of(["model", "show", str(byte_tokenizer(tmp_path))], capfd)
    assert code == 3
    assert "config.json" in error


def test_model_convert_names_a_file_that_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing, target = tmp_path / "no.gguf", tmp_path / "out"
    code, error = errors_of(["model", "convert", str(missing), str(target)], capfd)
    assert code == 3
    assert str(missing) in error
    assert not target.exists()


def test_model_fetch_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orca_dist.llm.fetch_default_model", lambda: Path("/models/default"))
    assert main(["model", "fetch"]) == 0
    assert capfd.readouterr().out == "/models/default\n"


def test_model_show_prints_one_document(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orca_dist.weights.describe", lambda folder: {"folder": str(folder)})
    assert main(["model", "show", str(tmp_path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"schema": 1, "folder": str(tmp_path)}
    assert main(["model", "show", str(tmp_path)]) == 0
    assert capfd.readouterr().out == f"folder: {tmp_path}\n"


def test_the_exit_code_is_the_error_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(OrcaError):
        exit_code = 4

    def lose(command: object) -> int:
        raise Lost("gone")

    monkeypatch.setattr("orca_dist.cli.info.Info.run", lose)
    assert main(["info"]) == 4
