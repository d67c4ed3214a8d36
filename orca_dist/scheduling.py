"""The Scheduler that a configuration names: the one place where settings become a schedule.

The server and the simulator both build theirs here, so that they are the same.
"""

from __future__ import annotations

from orca_dist.config import ScheduleConfig, Switch
from orca_dist.core import (
    Memory,
    MemoryKind,
    PagedMemory,
    ReserveMemory,
    Scheduler,
    SchedulerConfig,
)


def make_scheduler(
    config: ScheduleConfig, *, num_blocks: int, refuse_late: bool = False
) -> Scheduler:
    """A scheduler over `num_blocks` blocks of KV."""
    return Scheduler(
        config=SchedulerConfig(
            inflight=inflight(config),
            max_batch_size=config.max_batch_size,
            max_batch_tokens=config.max_batch_tokens,
            batching=config.batching,
            forming=config.forming,
            min_chunk=config.min_chunk,
            chunked_prefill=config.chunked_prefill is Switch.ON,
            chunk_overlap=config.chunk_overlap is Switch.ON,
            micro_batch_size=config.micro_batch_size,
            batch_window_s=config.batch_window_s,
            waiting_served_ratio=config.waiting_served_ratio,
            max_waiting_iterations=config.max_waiting_iterations,
            ageing_s=config.ageing_s,
            refuse_late=refuse_late,
        ),
        memory=_memory(config, num_blocks),
    )


def inflight(config: ScheduleConfig) -> int:
    """Most plans in the pipeline at once: one a stage unless told otherwise."""
    return config.inflight or config.stages


def _memory(config: ScheduleConfig, num_blocks: int) -> Memory:
    if config.memory is MemoryKind.RESERVE:
        return ReserveMemory(num_blocks=num_blocks, block_size=config.block_size)
    return PagedMemory(
        num_blocks=num_blocks,
        block_size=config.block_size,
        prefix_cache=config.prefix_cache is not Switch.OFF,
    )
