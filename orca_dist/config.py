"""Every knob, once: flags, YAML keys, --help and docs/cli.md derive from these fields.

A field's doc string is its help text. Frozen: what is settled at start (the
model's length, the layer split) lives elsewhere. Times are float seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path

from orca_dist.core import Batching, Forming, MemoryKind
from orca_dist.errors import ConfigError

MAX_TIMEOUT_S = 86400.0
MAX_CPUS = 1024
MAX_TOKENS = 2**31
MAX_WAIT = 1_000_000
MAX_PORT = 65535
MAX_STREAMS = 2**31 - 1
MAX_MESSAGE_BYTES = 2**31 - 1
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
TIMEOUTS = (
    "start_timeout_s",
    "recovery_timeout_s",
    "heartbeat_s",
    "step_limit_s",
    "link_timeout_s",
)


class Launcher(StrEnum):
    """Who starts and watches the stages."""

    RAY = "ray"
    LOCAL = "local"


class DeviceKind(StrEnum):
    """Where a stage computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """Of weights, activations and KV."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LoadFormat(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    DUMMY = "dummy"


class Split(StrEnum):
    """Ways to share layers out over the stages."""

    AUTO = "auto"
    EVEN = "even"


class AttentionBackend(StrEnum):
    """Whose attention runs on GPUs."""

    TRITON = "triton"
    FLASHINFER = "flashinfer"


class Switch(StrEnum):
    """Whether something is done."""

    ON = "on"
    OFF = "off"


class LogLevel(StrEnum):
    """Severities, least first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a log line looks."""

    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """What is scheduled where: all that a simulation of the pipeline needs, too."""

    stages: int = 2
    """Pipeline stages: each holds a contiguous block of layers on its own device."""
    split: tuple[int | Split, ...] = (Split.AUTO,)
    """Layers of each stage: auto, so that all take about as long, the output head counted; even;
    or numbers, e.g. 8 7 7 8."""
    max_batch_size: int = 32
    """Most requests in one batch; inflight times as many can run."""
    max_batch_tokens: int = 512
    """Most tokens in one iteration; prompts are cut to fit, unless chunked_prefill is off."""
    inflight: int | None = None
    """Most batches in the pipeline at once (the paper's n_workers); by default one a stage."""
    batching: Batching = Batching.ITERATION
    """Who may join a batch: anyone between iterations (Orca); nobody until its longest member has
    ended (request, as FasterTransformer); the same, but waiting a moment to fill it (dynamic)."""
    micro_batch_size: int | None = None
    """Requests in a plan under request and dynamic batching; by default max_batch_size."""
    batch_window_s: float = 0.1
    """Longest wait of a request for others to fill its batch, under dynamic batching."""
    forming: Forming = Forming.BALANCED
    """How batches are sized: shared out over the pipeline, or filled up as in the paper."""
    min_chunk: int = 256
    """Prompt tokens that a balanced batch may always take."""
    chunked_prefill: Switch = Switch.ON
    """Cut prompts to what a batch has room for; off: a prompt runs whole, the longest alone."""
    chunk_overlap: Switch = Switch.ON
    """Send a prompt's next chunk while the one before is still in the pipeline."""
    waiting_served_ratio: float = 0.0
    """Let requests join only once this many times the admitted ones wait; 0: at once."""
    max_waiting_iterations: int = 20
    """Batches for which waiting_served_ratio may keep a request waiting."""
    ageing_s: float = 10.0
    """Waiting that one step of priority is worth: a request is passed only by those that arrive
    less than ageing_s times their lead in priority after it."""
    memory: MemoryKind = MemoryKind.PAGED
    """KV slots as they are needed, newest requests computed again when none is left; or reserve
    prompt and max_tokens from the start, as in the paper."""
    prefix_cache: Switch | None = None
    """Reuse the KV of earlier requests that began alike; by default on with paged memory."""
    block_size: int = 16
    """KV slots in a block."""
    kv_tokens: int | None = None
    """KV slots of the pipeline; by default what fits beside the weights."""

    def __post_init__(self) -> None:
        """Plain words do for closed sets: batching="request"."""
        for field in fields(self):
            kind, value = _CLOSED_SETS.get(field.name), getattr(self, field.name)
            if kind is not None and value is not None:
                object.__setattr__(self, field.name, _word(kind, field.name, value))

    def check(self) -> None:
        """Raises ConfigError naming the first field that is out of its range."""
        _check_split(self.split)
        for name in ("stages", "max_batch_size", "max_batch_tokens", "block_size", "min_chunk"):
            _at_least_one(name, getattr(self, name))
        for name in ("inflight", "micro_batch_size"):
            if getattr(self, name) is not None:
                _at_least_one(name, getattr(self, name))
        _check_num_tokens("kv_tokens", self.kv_tokens)
        for name in ("waiting_served_ratio", "max_waiting_iterations", "ageing_s"):
            if not 0 <= getattr(self, name) <= MAX_WAIT:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}: must be at least 0 and at most {MAX_WAIT}"
                )
        if not 0 <= self.batch_window_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"batch_window_s = {self.batch_window_s}: must be at least 0 and at most "
                f"{MAX_TIMEOUT_S:.0f} (a day)"
            )
        self._check_together()

    def _check_together(self) -> None:
        if self.micro_batch_size and self.batching is Batching.ITERATION:
            raise ConfigError(
                f"micro_batch_size = {self.micro_batch_size}: is for --batching request or "
                "dynamic; leave it out, or choose one of these"
            )
        if self.prefix_cache is Switch.ON and self.memory is MemoryKind.RESERVE:
            raise ConfigError(
                "prefix_cache = on: reserved memory shares nothing; choose --memory paged, or "
                "leave prefix_cache out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(ScheduleConfig):
    """The pipeline and its schedule."""

    revision: str = ""
    """Branch, tag or commit of a model of the Hub; by default its main branch."""
    load_format: LoadFormat = LoadFormat.AUTO
    """Weights from safetensors; or dummy: random ones of the shapes that config.json says, for
    trying sizes without files."""
    tensor_parallel: int = 1
    """Shards of each stage. Only 1 so far."""
    launcher: Launcher = Launcher.RAY
    """Start stages as Ray actors, or as processes of this machine."""
    ray_address: str = ""
    """Ray cluster to join (host:port, or auto), from one of its nodes; empty: a private one on
    this machine."""
    pass_env: tuple[str, ...] = ()
    """Environment variables that stages on a cluster get from this process, besides NCCL_*, GLOO_*
    and HF_*; a name may end with *. Those of one host (*_SOCKET_IFNAME) never travel."""
    device: DeviceKind = DeviceKind.AUTO
    """Where stages compute; auto: CUDA where there is a GPU, else CPU."""
    dtype: Dtype = Dtype.AUTO
    """Of weights, activations and KV; auto: the checkpoint's own on GPUs and on CPUs with
    fast bfloat16, else float32."""
    attention_backend: AttentionBackend = AttentionBackend.TRITON
    """On GPUs: the kernels that come with orca-dist, or FlashInfer's, which every node needs then
    (pip install 'orca-dist[flashinfer]'). It has not run on a GPU yet: see docs/gpu.md."""
    cuda_graphs: Switch = Switch.OFF
    """On GPUs, capture the layers of decodes once for each of some batch sizes, and replay them;
    off: launch every kernel of every batch. Off until they have run on a GPU: see docs/gpu.md."""
    max_model_len: int | None = None
    """Most tokens of a request, prompt and answer together; by default the model's own length."""
    refuse_late: Switch = Switch.OFF
    """Refuse a request at once if max_tokens iterations at the pace of late exceed its timeout."""
    memory_share: float | None = None
    """Share of what weights and activations leave of the memory that KV may take: by default 0.25
    of a node's RAM on CPUs, 0.9 on GPUs."""
    cpus_per_stage: float | None = None
    """CPUs that a stage reserves in Ray and threads it computes with; by default an equal share."""
    max_queue: int = 1024
    """Most requests waiting for their first iteration; more are refused at once."""
    max_queue_tokens: int = 262_144
    """Most prompt tokens of waiting requests; one that would wait alone is always taken."""
    start_timeout_s: float = 180.0
    """Longest wait for all stages to be placed, loaded and connected, while no weights arrive."""
    recovery: Switch = Switch.ON
    """Replace a lost stage and go on with all requests; off: end with the pipeline."""
    recovery_timeout_s: float = 90.0
    """Longest time for a recovery; after it the pipeline is lost."""
    heartbeat_s: float = 5.0
    """A stage that is silent for this long is lost."""
    step_limit_s: float = 60.0
    """A stage hangs, and is lost, that computes one layer of an iteration for longer than this, or
    waits for its device for longer while no stage computes."""
    link_timeout_s: float = 300.0
    """Longest wait of one stage for another on the data plane."""

    def check(self) -> None:
        """Raises ConfigError naming the first field that is out of its range."""
        ScheduleConfig.check(self)
        for name in ("max_queue", "max_queue_tokens"):
            _at_least_one(name, getattr(self, name))
        _check_num_tokens("max_model_len", self.max_model_len)
        for name in TIMEOUTS:
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}: must be more than 0 and at most "
                    f"{MAX_TIMEOUT_S:.0f} (a day)"
                )
        if self.tensor_parallel != 1:
            raise ConfigError(
                f"tensor_parallel = {self.tensor_parallel}: stages can't be sharded yet; leave it "
                "at 1 and take more stages"
            )
        if self.cpus_per_stage is not None and not 0 < self.cpus_per_stage <= MAX_CPUS:
            raise ConfigError(
                f"cpus_per_stage = {self.cpus_per_stage}: must be more than 0 and "
                f"at most {MAX_CPUS}"
            )
        self._check_cluster()
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ConfigError(f"memory_share = {self.memory_share}: must be in (0, 1]")

    def _check_cluster(self) -> None:
        """What is said of a cluster needs one."""
        if self.ray_address and self.launcher is not Launcher.RAY:
            raise ConfigError(
                f"ray_address = {self.ray_address}: launcher = {self.launcher} starts stages on "
                "this machine alone; leave it out, or take --launcher ray"
            )
        if "://" in self.ray_address:
            raise ConfigError(
                f"ray_address = {self.ray_address}: stages have to reach this process; run it on a "
                "node of the cluster, for instance by `ray job submit`, and give host:port or auto"
            )
        for name in self.pass_env:
            if not VARIABLE.fullmatch(name):
                raise ConfigError(
                    f"pass_env = {name}: must be a variable's name, or its beginning and a *"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The gRPC front."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 50051
    """Port to listen on; 0 picks a free one."""
    served_model_name: str = ""
    """Name that clients see; by default the model folder's own."""
    tls_cert: Path | None = None
    """PEM file with the server's certificate and those between it and its CA: the port talks TLS.
    Read again when it changes, as tls_key and tls_client_ca are."""
    tls_key: Path | None = None
    """PEM file with the private key of tls_cert, not encrypted."""
    tls_client_ca: Path | None = None
    """PEM file with the CAs whose certificates clients have to show (mutual TLS)."""
    api_keys_file: Path | None = None
    """File of the callers' keys, a line `name:key` each; ORCA_API_KEYS can hold some, too. Read
    again when it changes."""
    allow_insecure: Switch = Switch.OFF
    """Listen beyond this machine although anyone there could call (no keys, no tls_client_ca) or
    read the keys (no tls_cert)."""
    drain_s: float = 20.0
    """Longest time for running answers to end after SIGTERM or SIGINT; a second signal ends them
    at once."""
    max_streams: int = 2048
    """Most calls at once on one connection; a client holds back those beyond."""
    max_request_bytes: int = 16 * 2**20
    """Largest request message."""

    def __post_init__(self) -> None:
        """Plain words do for closed sets."""
        word = _word(Switch, "allow_insecure", self.allow_insecure)
        object.__setattr__(self, "allow_insecure", word)

    def check(self) -> None:
        """Raises ConfigError naming the first field that can't work."""
        if not 0 <= self.port <= MAX_PORT:
            raise ConfigError(f"port = {self.port}: must be in 0..{MAX_PORT}")
        if not 0 <= self.drain_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"drain_s = {self.drain_s}: must be at least 0 and at most {MAX_TIMEOUT_S:.0f} "
                "(a day)"
            )
        for name, most in (("max_streams", MAX_STREAMS), ("max_request_bytes", MAX_MESSAGE_BYTES)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}: must be at least 1 and at most {most}"
                )
        self._check_tls()

    def _check_tls(self) -> None:
        """A certificate and its key go together, and clients' come on top."""
        missing = "tls_key" if self.tls_key is None else "tls_cert"
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError(
                f"{missing}: has to be given, too: tls_cert and tls_key belong together"
            )
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError(
                f"tls_client_ca = {self.tls_client_ca}: needs the server's own tls_cert and tls_key"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A cluster that is started for one server; `serve` itself finds it started."""

    network: str = ""
    """Network that the nodes' addresses are to be of, such as 10.1.0.0/16; by default the address
    that a node's name has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What goes to stderr."""

    log_level: LogLevel = LogLevel.INFO
    """Least severe lines that are written."""
    log_format: LogFormat = LogFormat.TEXT
    """Lines to read, or one JSON object a line."""

    def __post_init__(self) -> None:
        """Plain words do for closed sets."""
        object.__setattr__(self, "log_level", _word(LogLevel, "log_level", self.log_level))
        object.__setattr__(self, "log_format", _word(LogFormat, "log_format", self.log_format))


_CLOSED_SETS: dict[str, type[StrEnum]] = {
    "launcher": Launcher,
    "device": DeviceKind,
    "dtype": Dtype,
    "load_format": LoadFormat,
    "forming": Forming,
    "batching": Batching,
    "memory": MemoryKind,
    "chunked_prefill": Switch,
    "chunk_overlap": Switch,
    "refuse_late": Switch,
    "prefix_cache": Switch,
    "recovery": Switch,
    "cuda_graphs": Switch,
    "attention_backend": AttentionBackend,
}


def _word(kind: type[StrEnum], name: str, value: str | bool) -> StrEnum:
    try:
        return kind("on" if value else "off") if isinstance(value, bool) else kind(value)
    except ValueError:
        raise ConfigError(f"{name} = {value}: must be one of {', '.join(kind)}") from None


def _check_split(split: tuple[int | Split, ...]) -> None:
    words = [str(part) for part in split]
    if words in ([], [Split.AUTO], [Split.EVEN]):
        return
    if not all(isinstance(part, int) for part in split):
        raise ConfigError(
            f"split = {' '.join(words)}: give auto, even, or a number of layers for each stage"
        )


def _check_num_tokens(name: str, value: int | None) -> None:
    if value is not None and not 2 <= value <= MAX_TOKENS:
        raise ConfigError(
            f"{name} = {value}: must be at least 2 (a prompt token and an answer's) and "
            f"at most {MAX_TOKENS}"
        )


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} = {value}: must be at least 1")
