from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MasterMessage(_message.Message):
    __slots__ = ("setup", "open", "plan", "ping", "close")
    SETUP_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    setup: Setup
    open: Open
    plan: Plan
    ping: Ping
    close: Close
    def __init__(self, setup: _Optional[_Union[Setup, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Setup(_message.Message):
    __slots__ = ("stage", "num_stages", "model", "first_layer", "end_layer", "dtype", "device", "link", "num_threads", "block_size", "inflight", "num_token_ids", "load_format", "graph_rows", "attention_backend")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    END_LAYER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    INFLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FORMAT_FIELD_NUMBER: _ClassVar[int]
    GRAPH_ROWS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    stage: int
    num_stages: int
    model: str
    first_layer: int
    end_layer: int
    dtype: str
    device: str
    link: str
    num_threads: int
    block_size: int
    inflight: int
    num_token_ids: int
    load_format: str
    graph_rows: int
    attention_backend: str
    def __init__(self, stage: _Optional[int] = ..., num_stages: _Optional[int] = ..., model: _Optional[str] = ..., first_layer: _Optional[int] = ..., end_layer: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., link: _Optional[str] = ..., num_threads: _Optional[int] = ..., block_size: _Optional[int] = ..., inflight: _Optional[int] = ..., num_token_ids: _Optional[int] = ..., load_format: _Optional[str] = ..., graph_rows: _Optional[int] = ..., attention_backend: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("epoch", "store_address", "num_blocks", "link_timeout_s")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LINK_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    store_address: str
    num_blocks: int
    link_timeout_s: float
    def __init__(self, epoch: _Optional[int] = ..., store_address: _Optional[str] = ..., num_blocks: _Optional[int] = ..., link_timeout_s: _Optional[float] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "return_logits")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOGITS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    return_logits: bool
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., return_logits: bool = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("id", "sampling", "tokens", "blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: int
    sampling: Sampling
    tokens: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("seq", "drops", "admits", "ids", "starts", "lengths", "samples", "num_new_tokens", "new_tokens", "num_new_blocks", "new_blocks")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    ADMITS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    drops: _containers.RepeatedScalarFieldContainer[int]
    admits: _containers.RepeatedCompositeFieldContainer[Admit]
    ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    samples: _containers.RepeatedScalarFieldContainer[bool]
    num_new_tokens: _containers.RepeatedScalarFieldContainer[int]
    new_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_new_blocks: _containers.RepeatedScalarFieldContainer[int]
    new_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[int] = ..., drops: _Optional[_Iterable[int]] = ..., admits: _Optional[_Iterable[_Union[Admit, _Mapping]]] = ..., ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., samples: _Optional[_Iterable[bool]] = ..., num_new_tokens: _Optional[_Iterable[int]] = ..., new_tokens: _Optional[_Iterable[int]] = ..., num_new_blocks: _Optional[_Iterable[int]] = ..., new_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageMessage(_message.Message):
    __slots__ = ("hello", "loaded", "ready", "result", "pong", "failure", "load_progress", "epoch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    loaded: Loaded
    ready: Ready
    result: Result
    pong: Pong
    failure: Failure
    load_progress: LoadProgress
    epoch: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., load_progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("stage", "pid", "node", "actor_id", "versions", "host", "gpus")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    ACTOR_ID_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    stage: int
    pid: int
    node: str
    actor_id: str
    versions: str
    host: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stage: _Optional[int] = ..., pid: _Optional[int] = ..., node: _Optional[str] = ..., actor_id: _Optional[str] = ..., versions: _Optional[str] = ..., host: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("device", "weight_bytes", "store_address", "free_bytes", "fetched_bytes", "fetch_s", "read_bytes", "read_s", "node_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_S_FIELD_NUMBER: _ClassVar[int]
    NODE_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    weight_bytes: int
    store_address: str
    free_bytes: int
    fetched_bytes: int
    fetch_s: float
    read_bytes: int
    read_s: float
    node_bytes: int
    def __init__(self, device: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., store_address: _Optional[str] = ..., free_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., fetch_s: _Optional[float] = ..., read_bytes: _Optional[int] = ..., read_s: _Optional[float] = ..., node_bytes: _Optional[int] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("done_bytes", "total_bytes")
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    done_bytes: int
    total_bytes: int
    def __init__(self, done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("last_seq",)
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    last_seq: int
    def __init__(self, last_seq: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("seq", "ids", "num_tokens", "tokens", "failed", "logits")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    failed: _containers.RepeatedCompositeFieldContainer[FailedRequest]
    logits: _containers.RepeatedCompositeFieldContainer[Logits]
    def __init__(self, seq: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., failed: _Optional[_Iterable[_Union[FailedRequest, _Mapping]]] = ..., logits: _Optional[_Iterable[_Union[Logits, _Mapping]]] = ...) -> None: ...

class FailedRequest(_message.Message):
    __slots__ = ("id", "message")
    ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    id: int
    message: str
    def __init__(self, id: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Logits(_message.Message):
    __slots__ = ("id", "rows")
    ID_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    id: int
    rows: bytes
    def __init__(self, id: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "last_seq", "phase", "since_s", "trace", "num_requests")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    last_seq: int
    phase: str
    since_s: float
    trace: Trace
    num_requests: int
    def __init__(self, nonce: _Optional[int] = ..., last_seq: _Optional[int] = ..., phase: _Optional[str] = ..., since_s: _Optional[float] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ..., num_requests: _Optional[int] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("seq", "received_s", "input_ready_s", "compute_start_s", "compute_end_s", "sent_s", "bytes_sent")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    INPUT_READY_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_START_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_END_S_FIELD_NUMBER: _ClassVar[int]
    SENT_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    seq: _containers.RepeatedScalarFieldContainer[int]
    received_s: _containers.RepeatedScalarFieldContainer[float]
    input_ready_s: _containers.RepeatedScalarFieldContainer[float]
    compute_start_s: _containers.RepeatedScalarFieldContainer[float]
    compute_end_s: _containers.RepeatedScalarFieldContainer[float]
    sent_s: _containers.RepeatedScalarFieldContainer[float]
    bytes_sent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seq: _Optional[_Iterable[int]] = ..., received_s: _Optional[_Iterable[float]] = ..., input_ready_s: _Optional[_Iterable[float]] = ..., compute_start_s: _Optional[_Iterable[float]] = ..., compute_end_s: _Optional[_Iterable[float]] = ..., sent_s: _Optional[_Iterable[float]] = ..., bytes_sent: _Optional[_Iterable[int]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("message", "traceback", "link")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    message: str
    traceback: str
    link: bool
    def __init__(self, message: _Optional[str] = ..., traceback: _Optional[str] = ..., link: bool = ...) -> None: ...
