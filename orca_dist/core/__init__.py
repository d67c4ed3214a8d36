"""The pure heart: request pool, memory, batching and Algorithm 1 of the Orca paper.

Standard library only, and no clock: `now` is an argument. The same Scheduler
object runs in the server and in the simulator; same events in, same plans out.
"""

from orca_dist.core.deadlines import TooLate
from orca_dist.core.events import Output
from orca_dist.core.kv import Memory, MemoryKind, NeverFits, ReserveMemory
from orca_dist.core.paged import PagedMemory
from orca_dist.core.plan import Admit, Plan, PlanResult
from orca_dist.core.policy import Batching, Forming, SchedulerConfig
from orca_dist.core.request import FinishReason, Phase, Request, Sampling
from orca_dist.core.scheduler import Scheduler
from orca_dist.core.split import sizes_by_cost, split_layers, stage_costs

__all__ = [
    "Admit",
    "Batching",
    "FinishReason",
    "Forming",
    "Memory",
    "MemoryKind",
    "NeverFits",
    "Output",
    "PagedMemory",
    "Phase",
    "Plan",
    "PlanResult",
    "Request",
    "ReserveMemory",
    "Sampling",
    "Scheduler",
    "SchedulerConfig",
    "TooLate",
    "sizes_by_cost",
    "split_layers",
    "stage_costs",
]
