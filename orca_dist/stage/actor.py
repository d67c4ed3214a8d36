"""A thin Ray shell around a stage. Ray places it and tells of its death, no more.

serve() is one call that lasts as long as the stage: its reference fails when the
actor dies, and no Ray call happens between two tokens.
"""

from __future__ import annotations

import os
from dataclasses import replace

import ray

from orca_dist.bootstrap import StageBootstrap
from orca_dist.errors import StartupError


@ray.remote(max_restarts=0, max_task_retries=0)
class StageActor:
    """One stage on one bundle of the placement group."""

    def stderr_place(self) -> tuple[str, str]:
        """This node's address, and the file that takes what the process writes to stderr."""
        return ray.util.get_node_ip_address(), os.readlink("/proc/self/fd/2")

    def serve(self, bootstrap: StageBootstrap) -> bool:
        """Runs the stage; True when the master closed it."""
        os.environ.update(bootstrap.environment)  # before what reads it is imported
        bootstrap = self._at_home(bootstrap)
        from orca_dist.stage.process import serve_stage
        from orca_dist.stage.worker import StageWorker

        worker = StageWorker(host=bootstrap.host)
        actor_id = ray.get_runtime_context().get_actor_id()
        return serve_stage(bootstrap, worker, actor_id=actor_id)

    def _at_home(self, bootstrap: StageBootstrap) -> StageBootstrap:
        """With this node's address and this stage's GPUs, as Ray has them."""
        host = bootstrap.host or ray.util.get_node_ip_address()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        if len(gpus) != bootstrap.num_gpus:
            raise StartupError(
                f"on node {host} Ray gave stage {bootstrap.stage} the GPUs [{', '.join(gpus)}], "
                f"and it is to have {bootstrap.num_gpus} of its own"
            )
        return replace(bootstrap, host=host, gpus=gpus)
