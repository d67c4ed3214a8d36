"""Settings: their ranges, and the order in which flags, file, variables and defaults win."""

from __future__ import annotations

from pathlib import Path

import pytest

from orca_dist.cli.knobs import knobs
from orca_dist.cli.main import commands
from orca_dist.cli.settings import (
    DEFAULT_MODEL,
    GROUPS,
    AccessConfig,
    ClientConfig,
    Settings,
    load_settings,
)
from orca_dist.cli.usage import parse
from orca_dist.client import DEFAULT_ADDRESS
from orca_dist.config import Dtype, EngineConfig, Launcher, LogConfig, ServerConfig, Split, Switch
from orca_dist.core import Forming
from orca_dist.errors import ConfigError
from orca_dist.weights import fetch


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stages", 0),
        ("max_batch_size", -1),
        ("max_batch_tokens", 0),
        ("block_size", 0),
        ("heartbeat_s", 0.0),
        ("step_limit_s", -1.0),
        ("cpus_per_stage", 0.0),
        ("memory_share", 0.0),
        ("memory_share", 1.5),
    ],
)
def test_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = {value}: must be"):
        EngineConfig(**{name: value}).check()  # type: ignore[arg-type]


def test_the_defaults_are_within_range() -> None:
    EngineConfig().check()


@pytest.mark.parametrize("group", [EngineConfig, ServerConfig, LogConfig])
def test_every_field_has_help(group: type) -> None:
    assert [knob.name for knob in knobs(group) if not knob.help] == []


def test_no_name_is_used_twice() -> None:
    names = [knob.name for group in GROUPS for knob in knobs(group)]
    assert sorted(names) == sorted(set(names))


def test_the_default_model_is_the_one_that_is_fetched() -> None:
    assert fetch.DEFAULT_MODEL.name == DEFAULT_MODEL


def test_the_default_address_is_the_clients_and_the_servers() -> None:
    server = ServerConfig()
    assert ClientConfig().address == DEFAULT_ADDRESS == f"{server.host}:{server.port}"


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_without_file_and_variables_the_defaults_hold() -> None:
    assert load_settings({"HOME": "/home/x"}, None) == Settings()


def test_values_of_every_type_from_variables() -> None:
    settings = load_settings(
        {
            "ORCA_STAGES": "4",
            "ORCA_SPLIT": "8 7 7 8",
            "ORCA_MEMORY_SHARE": "0.5",
            "ORCA_CPUS_PER_STAGE": "1.5",
            "ORCA_MAX_MODEL_LEN": "512",
            "ORCA_FORMING": "paper",
            "ORCA_HOST": "0.0.0.0",
            "ORCA_LOG_LEVEL": "debug",
            "ORCA_MODEL": "/models/x",
            "ORCA_ADDRESS": "there:1",
        },
        None,
    )
    assert settings.engine == EngineConfig(
        stages=4,
        split=(8, 7, 7, 8),
        memory_share=0.5,
        cpus_per_stage=1.5,
        max_model_len=512,
        forming=Forming.PAPER,
    )
    assert (settings.server.host, settings.log.log_level) == ("0.0.0.0", "debug")
    assert (settings.model.model, settings.client.address) == ("/models/x", "there:1")


def test_values_of_every_type_from_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "stages: 4\nsplit: [8, 7, 7, 8]\nmemory_share: 1\nmax_model_len: 512\n"
        "dtype: bfloat16\nlauncher: local\nport: 0\nmodel: /models/x\n",
    )
    settings = load_settings({}, path)
    assert settings.engine == EngineConfig(
        stages=4,
        split=(8, 7, 7, 8),
        memory_share=1.0,
        max_model_len=512,
        dtype=Dtype.BFLOAT16,
        launcher=Launcher.LOCAL,
    )
    assert (settings.server.port, settings.model.model) == (0, "/models/x")
    assert settings.config == path


def test_who_may_call_from_a_file_and_from_variables(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "tls_cert: /pem/cert\ntls_key: /pem/key\napi_keys_file: /keys\nallow_insecure: on\n"
        "drain_s: 3\n",
    )
    expected = ServerConfig(
        tls_cert=Path("/pem/cert"),
        tls_key=Path("/pem/key"),
        api_keys_file=Path("/keys"),
        allow_insecure=Switch.ON,
        drain_s=3.0,
    )
    assert load_settings({}, path).server == expected
    variables = {
        "ORCA_TLS_CERT": "/pem/cert",
        "ORCA_TLS_KEY": "/pem/key",
        "ORCA_API_KEYS_FILE": "/keys",
        "ORCA_ALLOW_INSECURE": "on",
        "ORCA_DRAIN_S": "3",
        "ORCA_TLS_CA": "/pem/ca",
        "ORCA_API_KEY": "the client's own business",
    }
    settings = load_settings(variables, None)
    assert settings.server == expected
    assert settings.access == AccessConfig(tls_ca=Path("/pem/ca"))
    assert settings.access.uses_tls
    assert "business" not in repr(settings)


def test_the_file_wins_over_variables_and_these_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "stages: 4\n")
    settings = load_settings({"ORCA_STAGES": "3", "ORCA_PORT": "1234"}, path)
    assert (settings.engine.stages, settings.server.port) == (4, 1234)


def test_a_variable_can_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "stages: 4\n")
    assert load_settings({"ORCA_CONFIG": str(path)}, None).engine.stages == 4


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "# nothing yet\n")
    assert load_settings({}, path).engine == EngineConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_siz: 3", "max_batch_siz: no such key; did you mean max_batch_size"),
        ("address: x:1", "address: no such key"),
        ("stages: '4'", "stages = '4': needs a whole number"),
        ("stages: 2.5", "stages = 2.5: needs a whole number"),
        ("stages: true", "stages = True: needs a whole number"),
        ("memory_share: much", "memory_share = 'much': needs a number"),
        ("split: 8", "split = 8: needs a list"),
        ("split: [8, x]", r"split = \[8, 'x'\]: needs auto"),
        ("host: 127", "host = 127: needs a text; quote it"),
        ("forming: papr", "forming = 'papr': choose one of balanced, paper"),
        ("[1, 2]", "needs `key: value` lines, not list"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as raised:
        load_settings({}, path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no/such\.yaml can't be read"):
        load_settings({}, Path("no/such.yaml"))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ORCA_STAGE", "3", "ORCA_STAGE: no such variable; did you mean ORCA_STAGES"),
        ("ORCA_STAGES", "many", "ORCA_STAGES = 'many': needs a whole number"),
        ("ORCA_PORT", "tcp://10.0.0.1:80", "ORCA_PORT = .*: needs a whole number"),
        ("ORCA_DTYPE", "int4", "ORCA_DTYPE = 'int4': choose one of auto, float32"),
        ("ORCA_SPLIT", "8 x", "ORCA_SPLIT = '8 x': needs auto, even, or whole numbers"),
    ],
)
def test_what_is_wrong_in_a_variable_is_named(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings({variable: value}, None)


def test_tensor_parallel_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel = 2: stages can't be sharded yet"):
        EngineConfig(tensor_parallel=2).check()


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("auto", (Split.AUTO,)),
        ("even", (Split.EVEN,)),
        ("[8, 7]", (8, 7)),
        ("[auto]", (Split.AUTO,)),
    ],
)
def test_a_split_is_a_rule_or_numbers(
    tmp_path: Path, text: str, split: tuple[int | Split, ...]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"split: {text}\n")
    variable = text.strip("[]").replace(",", "")
    assert load_settings({}, path).engine.split == split
    assert load_settings({"ORCA_SPLIT": variable}, None).engine.split == split
    serve = commands(Settings())
    parsed = parse(serve, ["serve", "m", "--split", *variable.split()])
    assert parsed.engine.split == split


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"launcher": "local", "ray_address": "auto"},
            "ray_address = auto: launcher = local starts stages on this machine alone",
        ),
        (
            {"ray_address": "ray://10.0.0.1:10001"},
            "ray_address = ray://10.0.0.1:10001: stages have to reach this process; run it",
        ),
        ({"pass_env": ("A", "*")}, r"pass_env = \*: must be a variable's name, or its beginning"),
        ({"pass_env": ("A=1",)}, "pass_env = A=1: must be a variable's name"),
    ],
)
def test_what_no_cluster_can_do_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**changes).check()  # type: ignore[arg-type]


def test_variables_to_pass_on_are_a_list(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("pass_env: [OMP_NUM_THREADS, MINE_*]\n")
    wanted = ("OMP_NUM_THREADS", "MINE_*")
    assert load_settings({}, path).engine.pass_env == wanted
    assert load_settings({"ORCA_PASS_ENV": " ".join(wanted)}, None).engine.pass_env == wanted
    parsed = parse(commands(Settings()), ["serve", "m", "--pass-env", *wanted])
    assert parsed.engine.pass_env == wanted
    path.write_text("pass_env: MINE_*\n")
    with pytest.raises(ConfigError, match="needs a list"):
        load_settings({}, path)
