"""Settings from a YAML file and ORCA_* variables: the defaults that flags then override.

Flags win over the file, the file over variables, variables over the built-in
defaults. The same names everywhere: `--max-batch-size`, `max_batch_size`,
`ORCA_MAX_BATCH_SIZE`. Unknown names are refused, naming near ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import cattrs
import yaml

from orca_dist.cli.knobs import VARIABLE_PREFIX, Knob, knobs, near, refuse_by_name
from orca_dist.cli.values import text_reader, yaml_reader
from orca_dist.config import (
    ClusterConfig,
    EngineConfig,
    LogConfig,
    ScheduleConfig,
    ServerConfig,
    Switch,
)
from orca_dist.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"  # weights.fetch's, whose import would slow every command
DEFAULT_ADDRESS = "127.0.0.1:50051"  # the client's, likewise
API_KEYS_VARIABLE = "ORCA_API_KEYS"  # a server's
API_KEY_VARIABLE = "ORCA_API_KEY"  # a client's
SECRETS = (API_KEYS_VARIABLE, API_KEY_VARIABLE)  # read by those who need them, kept by nobody else
HOST_PORT = re.compile(r"(\[[^\s/\[\]]+\]|[^\s/:\[\]]+):([0-9]{1,5})")
MAX_PORT = 65535
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """What to serve."""

    model: str = DEFAULT_MODEL
    """Model folder or id of the Hub (org/name); or the default model, which is fetched once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Whom to talk to."""

    address: str = DEFAULT_ADDRESS
    """Server to talk to, host:port."""

    def check(self) -> None:
        """Raises ConfigError where the address is none."""
        match = HOST_PORT.fullmatch(self.address)
        if not match or not 0 < int(match[2]) <= MAX_PORT:
            raise ConfigError(
                f"address = {self.address}: needs host:port, such as {DEFAULT_ADDRESS}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """What the server asks for. The key itself is in ORCA_API_KEY or a file, never in a flag."""

    api_key_file: Path | None = None
    """File with the API key to call with; without it, ORCA_API_KEY counts."""
    tls: Switch = Switch.OFF
    """Talk TLS; on by itself with any of the four below."""
    tls_ca: Path | None = None
    """PEM file with the CA of the server's certificate; by default the well-known ones."""
    tls_client_cert: Path | None = None
    """PEM file with the client's own certificate, for a server that asks for one."""
    tls_client_key: Path | None = None
    """PEM file with the private key of tls_client_cert."""
    tls_server_name: str = ""
    """Name in the server's certificate, where it isn't the address's."""
    insecure_key: Switch = Switch.OFF
    """Send the API key to another machine without TLS."""

    @property
    def uses_tls(self) -> bool:
        """Whether the flags ask for it, in one way or another."""
        files = (self.tls_ca, self.tls_client_cert, self.tls_client_key)
        return self.tls is Switch.ON or any(files) or bool(self.tls_server_name)


FILE_GROUPS: tuple[type, ...] = (ModelChoice, EngineConfig, ServerConfig, ClusterConfig, LogConfig)
GROUPS: tuple[type, ...] = (*FILE_GROUPS, ClientConfig, AccessConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every group, with the values of file and environment in place."""

    config: Path | None = None
    model: ModelChoice = field(default_factory=ModelChoice)
    engine: EngineConfig = field(default_factory=EngineConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    log: LogConfig = field(default_factory=LogConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    access: AccessConfig = field(default_factory=AccessConfig)


def load_settings(environment: Mapping[str, str], config: Path | None) -> Settings:
    """Built-in defaults, then ORCA_* variables, then `config` (or the file ORCA_CONFIG names)."""
    values = _from_environment(environment)
    config = config or values.pop("config", None)
    if config is not None:
        values |= _from_file(config)
    return Settings(
        config=config,
        model=_filled(ModelChoice(), values),
        engine=_filled(EngineConfig(), values),
        schedule=_filled(ScheduleConfig(), values),
        server=_filled(ServerConfig(), values),
        cluster=_filled(ClusterConfig(), values),
        log=_filled(LogConfig(), values),
        client=_filled(ClientConfig(), values),
        access=_filled(AccessConfig(), values),
    )


def _filled(default: T, values: Mapping[str, object]) -> T:
    names = {knob.name for knob in knobs(type(default))}
    return replace(default, **{n: v for n, v in values.items() if n in names})  # type: ignore[type-var]


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {knob.variable: knob for knob in _knobs(GROUPS)}
    known["ORCA_CONFIG"] = Knob(name="config", type=Path, default=None, help="")
    reader = text_reader()
    values = {}
    names = {v for v in environment if v.startswith(VARIABLE_PREFIX)}
    for variable in sorted(names.difference(SECRETS)):
        if variable not in known:
            refuse_by_name(variable)
            raise ConfigError(f"{variable}: no such variable{near(variable, known)}")
        knob = known[variable]
        values[knob.name] = _read(reader, variable, environment[variable], knob)
    return values


def _from_file(path: Path) -> dict[str, Any]:
    known = {knob.name: knob for knob in _knobs(FILE_GROUPS)}
    reader = yaml_reader()
    values = {}
    for key, value in _document(path).items():
        if key not in known:
            refuse_by_name(str(key))
            raise ConfigError(f"{path}: {key}: no such key{near(str(key), known)}")
        values[key] = _read(reader, f"{path}: {key}", value, known[key])
    return values


def _document(path: Path) -> Mapping[object, object]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict | None):
        raise ConfigError(f"{path}: needs `key: value` lines, not {type(document).__name__}")
    return document or {}


def _knobs(groups: tuple[type, ...]) -> list[Knob]:
    return [knob for group in groups for knob in knobs(group)]


def _read(reader: cattrs.Converter, where: str, value: object, knob: Knob) -> object:
    try:
        return reader.structure(value, knob.type)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where} = {value!r}: {error}") from None
