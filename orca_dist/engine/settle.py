"""From what the user asked to what this machine and model allow: all `auto`s end here."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from orca_dist.config import (
    AttentionBackend,
    DeviceKind,
    Dtype,
    EngineConfig,
    Launcher,
    LogConfig,
    Split,
    Switch,
)
from orca_dist.core import split_layers
from orca_dist.engine.kv_size import (
    FLASHINFER_BYTES,
    activation_bytes,
    graph_bytes,
    layer_block_bytes,
    tape_bytes,
)
from orca_dist.engine.stages import PipelineConfig
from orca_dist.errors import ConfigError
from orca_dist.spec import ModelSpec, RopeType
from orca_dist.spec.split_cost import balanced_sizes, head_layers, slowest

MEMORY_SHARES = {DeviceKind.CPU: 0.25, DeviceKind.CUDA: 0.9}

log = logging.getLogger(__name__)

MAX_GRAPH_ROWS = 256  # of a batch; beyond it kernels take longer than their launches
CPU_GRAPH_ROWS = 8  # for more, calls take long enough to hide what Python takes between them
ITEMSIZE = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2}
FAST_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def settle(
    model: str,
    spec: ModelSpec,
    config: EngineConfig,
    log: LogConfig,
    *,
    num_token_ids: int | None = None,
) -> PipelineConfig:
    """The pipeline to build; raises ConfigError naming what can't be had.

    model: what stages are told, an absolute folder or a Hub repository at a commit.
    num_token_ids: ids from here on have no text; a head may have more rows than that.
    """
    config.check()
    device = settle_device(config.device)
    dtype = settle_dtype(config.dtype, spec, device)
    layers = _layers(spec, config)
    settled = PipelineConfig(
        model=model,
        load_format=config.load_format,
        layers=layers,
        dtype=dtype,
        device=device,
        link=_link(device, config.launcher),
        num_threads=max(1, int(cpus_per_stage(config))),
        block_size=config.block_size,
        num_blocks=config.kv_tokens and -(-config.kv_tokens // config.block_size),
        max_blocks=_max_blocks(spec, config),
        layer_block_bytes=layer_block_bytes(spec, ITEMSIZE[dtype], config.block_size),
        memory_share=config.memory_share or MEMORY_SHARES[device],
        activation_bytes=_activation_bytes(spec, config, layers, device, dtype),
        graph_rows=_graph_rows(spec, config, device),
        attention_backend=_attention_backend(config, device),
        inflight=config.inflight or config.stages,
        num_token_ids=min(spec.vocab_size, num_token_ids or spec.vocab_size),
        start_timeout_s=config.start_timeout_s,
        link_timeout_s=config.link_timeout_s,
        log=log,
    )
    if device is DeviceKind.CPU:
        _warn_of_shared_cores(config)
    return settled


def settle_max_model_len(spec: ModelSpec, config: EngineConfig) -> int:
    """Tokens that a request may hold; a longer wish than the model's length is refused."""
    wanted = config.max_model_len or spec.max_model_len
    if wanted > spec.max_model_len:
        raise ConfigError(f"max_model_len = {wanted}: {_longest(spec)}")
    return wanted


def _longest(spec: ModelSpec) -> str:
    if spec.rope.rope_type is not RopeType.DYNAMIC:
        return f"the model was made for at most {spec.max_model_len}"
    return (
        f"beyond max_position_embeddings = {spec.max_model_len} dynamic rope turns tokens by how "
        "long the request has become, and an answer would depend on how its prompt was cut; set "
        f"it to at most {spec.max_model_len}, or rope_type in config.json to one that is fixed "
        "(yarn, linear), with a larger max_position_embeddings"
    )


def settle_device(wanted: DeviceKind) -> DeviceKind:
    """`auto` is CUDA where the driver's device files are."""
    if wanted is not DeviceKind.AUTO:
        return wanted
    return DeviceKind.CUDA if Path("/dev/nvidiactl").exists() else DeviceKind.CPU


def settle_dtype(wanted: Dtype, spec: ModelSpec, device: DeviceKind) -> Dtype:
    """`auto` is the checkpoint's own, but float32 on CPUs without bfloat16 arithmetic."""
    if wanted is not Dtype.AUTO:
        return wanted
    own = Dtype(spec.dtype) if spec.dtype in ITEMSIZE else Dtype.FLOAT32
    if device is DeviceKind.CUDA or (own is Dtype.BFLOAT16 and _cpu_has_fast_bf16()):
        return own
    return Dtype.FLOAT32


def cpus_per_stage(config: EngineConfig) -> float:
    """CPUs of a stage: as asked; one on a cluster that isn't ours; else an equal share."""
    if config.cpus_per_stage is not None:
        return config.cpus_per_stage
    if config.ray_address:
        return 1.0
    return len(os.sched_getaffinity(0)) / config.stages


def _warn_of_shared_cores(config: EngineConfig) -> None:
    cores = len(os.sched_getaffinity(0))
    if config.stages > cores and not config.ray_address:
        log.warning("%d stages share %d cores: they wait for each other", config.stages, cores)


def _cpu_has_fast_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return not FAST_BF16_FLAGS.isdisjoint(flags.split())


def _layers(spec: ModelSpec, config: EngineConfig) -> tuple[range, ...]:
    try:
        even = split_layers(spec.num_layers, config.stages)
        sizes = _sizes(spec, config)
        layers = even if sizes is None else split_layers(spec.num_layers, config.stages, sizes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.stages > 1:
        log.info("split %s: %s", " ".join(str(len(each)) for each in layers), _why(spec, config))
    return tuple(layers)


def _sizes(spec: ModelSpec, config: EngineConfig) -> tuple[int, ...] | None:
    """Layers of each stage; None: as even as can be."""
    if config.split in ((), (Split.AUTO,)):
        return balanced_sizes(spec, config.stages)
    if config.split == (Split.EVEN,):
        return None
    return tuple(int(size) for size in config.split)


def _why(spec: ModelSpec, config: EngineConfig) -> str:
    if config.split not in ((), (Split.AUTO,)):
        return "as asked"
    sizes, head = balanced_sizes(spec, config.stages), head_layers(spec)
    if sizes is None:
        return f"even, since the output head counts as {head:.1f} layers of the last stage"
    even = split_layers(spec.num_layers, config.stages)
    before, after = slowest([len(each) for each in even], head), slowest(sizes, head)
    return (
        f"the output head counts as {head:.1f} layers of the last stage; the slowest stage has "
        f"{after:.1f} layers to do, {before:.1f} in an even split"
    )


def _link(device: DeviceKind, launcher: Launcher) -> str:
    """Local stages share the machine's first GPU, where NCCL refuses two members."""
    if device is DeviceKind.CPU:
        return "gloo"
    return "nccl" if launcher is Launcher.RAY else "host"


def _activation_bytes(
    spec: ModelSpec,
    config: EngineConfig,
    layers: tuple[range, ...],
    device: DeviceKind,
    dtype: Dtype,
) -> tuple[int, ...]:
    """Of each stage; the last one has the head."""
    whole = config.chunked_prefill is Switch.OFF  # a prompt runs as it is, however long
    longest = settle_max_model_len(spec, config)
    graphs = tape_bytes if device is DeviceKind.CPU else graph_bytes
    return tuple(
        activation_bytes(
            spec,
            rows=max(config.max_batch_tokens, longest if whole else 0),
            sampled_rows=config.max_batch_size,
            itemsize=ITEMSIZE[dtype],
            has_head=each.stop == spec.num_layers,
            cut_len=longest if device is DeviceKind.CUDA else 0,
        )
        + graphs(
            spec,
            rows=_graph_rows(spec, config, device),
            num_layers=len(each),
            itemsize=ITEMSIZE[dtype],
            block_size=config.block_size,
        )
        + (FLASHINFER_BYTES if config.attention_backend is AttentionBackend.FLASHINFER else 0)
        for each in layers
    )


def _graph_rows(spec: ModelSpec, config: EngineConfig, device: DeviceKind) -> int:
    """Of the largest batch of decodes that runs as a graph; on CPUs experts ask who goes where."""
    if device is DeviceKind.CPU:
        return 0 if spec.experts else min(config.max_batch_size, CPU_GRAPH_ROWS)
    return 0 if config.cuda_graphs is Switch.OFF else min(config.max_batch_size, MAX_GRAPH_ROWS)


def _attention_backend(config: EngineConfig, device: DeviceKind) -> AttentionBackend:
    backend = config.attention_backend
    if device is DeviceKind.CPU and backend is AttentionBackend.FLASHINFER:
        raise ConfigError(
            f"attention_backend = {backend}: it runs on GPUs alone, and stages are to compute on "
            "the CPU; leave it out, or take --device cuda"
        )
    return backend


def _max_blocks(spec: ModelSpec, config: EngineConfig) -> int:
    """What the batches in flight can use, were all requests as long as can be."""
    longest = -(-settle_max_model_len(spec, config) // config.block_size)
    return longest * config.max_batch_size * (config.inflight or config.stages)
