"""A thin Ray shell around a stage. Ray places it and tells of its death, no more.

serve() is one call that lasts as long as the stage: its reference fails when the
actor dies, and no Ray call happens between two tokens.
"""

from __future__ import annotations

import os
from dataclasses import replace

import ray

from orca_dist.bootstrap import StageBootstrap


@ray.remote(max_restarts=0, max_task_retries=0)
class StageActor:
    """One stage on one bundle of the placement group."""

    def stderr_place(self) -> tuple[str, str]:
        """This node's address, and the file that takes what the process writes to stderr."""
        return ray.util.get_node_ip_address(), os.readlink("/proc/self/fd/2")

    def serve(self, bootstrap: StageBootstrap) -> bool:
        """Runs the stage; True when the master closed it."""
        from orca_dist.stage.process import serve_stage
        from orca_dist.stage.worker import StageWorker

        host = ray.util.get_node_ip_address()
        bootstrap = replace(bootstrap, host=bootstrap.host or host)
        worker = StageWorker(host=bootstrap.host)
        actor_id = ray.get_runtime_context().get_actor_id()
        return serve_stage(bootstrap, worker, actor_id=actor_id)
