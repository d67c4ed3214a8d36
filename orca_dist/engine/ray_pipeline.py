"""Stages as Ray actors: Ray places them, and tells when one dies. No more.

Without an address a private Ray is started on this machine, with its own temporary
folder and token, on loopback ports; a Ray that runs already is neither joined nor stopped.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orca_dist.bootstrap import StageBootstrap
from orca_dist.engine.last_lines import tell_end_of_file
from orca_dist.engine.placing import NodeRoom, bundle_told, bundles_of_stages, nodes_told
from orca_dist.engine.ray_address import check_joinable
from orca_dist.engine.stages import OnDeath
from orca_dist.errors import OrcaError, StartupError

log = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 5.0
PLACE_TIMEOUT_S = 1.0  # the answer has come with the stage's start, if it came at all
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 * 2**20  # the smallest that Ray takes; no object ever goes there
RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # lines of Ray's own in a worker's output
RAY_CLUSTERS, RAY_CLUSTERS_VARIABLE = "ENABLE_RAY_CLUSTER", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
MAX_TEMP_DIR_LEN = 40  # Ray's socket paths below it must stay within 107 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """`address` empty: a private Ray. CPUs and GPUs are per stage.

    environment: variables that every stage gets, on a cluster that was there before.
    """

    address: str
    num_cpus: float
    num_gpus: int
    num_stages: int
    place_timeout_s: float
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def bundle(self) -> dict[str, float]:
        """What one stage reserves."""
        gpus = {"GPU": float(self.num_gpus)} if self.num_gpus else {}
        return {"CPU": self.num_cpus} | gpus


class RayPlacement:
    """One actor a stage, one bundle an actor."""

    def __init__(self, config: RayConfig) -> None:
        if ray.is_initialized():
            raise StartupError(
                "this process is connected to a Ray already, and can't have two: close the other "
                "engine first, call ray.shutdown(), or take launcher local"
            )
        self._config = config
        self._private_dir = "" if config.address else _short_temp_dir()
        self._group: Any = None
        self._bundles: tuple[int, ...] = ()  # by stage
        self._actors: dict[int, Any] = {}  # by stage
        self._watchers: list[threading.Thread] = []
        self._closed = False
        self._left = False  # from then on a stage that ends was ended by us
        try:
            self._connect()
        except BaseException:  # an interrupt too: half a Ray is ours to remove
            self.close()
            raise
        self.control_host: str = ray.util.get_node_ip_address() if config.address else LOOPBACK

    def launch(self, bootstraps: Sequence[StageBootstrap], on_death: OnDeath) -> None:
        self._group = self._place()
        self._bundles = bundles_of_stages(self._nodes_of_bundles())
        for bootstrap in bootstraps:
            self._launch(bootstrap, on_death)

    def replace(self, bootstrap: StageBootstrap, on_death: OnDeath) -> None:
        """A fresh actor in the same bundle; Ray starts it once the old one is gone for good.

        Where the bundle's node is lost, Ray finds that out in its own time, puts the bundle on
        another, or keeps the actor waiting until there is one.
        """
        ray.kill(self._actors.pop(bootstrap.stage))
        self._launch(bootstrap, on_death)

    def why_missing(self, stages: Collection[int]) -> str:
        """Names the stages whose bundle lies on no node, and what every node has."""
        config = self._config
        nodes = self._nodes_of_bundles()
        homeless = [stage for stage in stages if not nodes[self._bundles[stage]]]
        if not homeless:
            return ""
        return (
            f"Ray has no node for stages {homeless}, which take {bundle_told(config.bundle)} each: "
            f"{nodes_told(_rooms(), config.bundle)}; add a node or free one"
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        for watcher in self._watchers:
            watcher.join(max(0.0, deadline - time.monotonic()))
        self._left = True
        if self._config.address:
            self._give_back()
        ray.shutdown()
        if self._private_dir:
            shutil.rmtree(self._private_dir, ignore_errors=True)

    def _launch(self, bootstrap: StageBootstrap, on_death: OnDeath) -> None:
        actor = self._actors[bootstrap.stage] = self._actor(bootstrap.stage)
        place = actor.stderr_place.remote()  # before serve, behind which it would wait
        serving = actor.serve.remote(self._equipped(bootstrap))
        watcher = threading.Thread(
            target=self._watch, args=(serving, place, bootstrap.stage, on_death), daemon=True
        )
        watcher.start()
        self._watchers.append(watcher)

    def _equipped(self, bootstrap: StageBootstrap) -> StageBootstrap:
        """On a Ray of our own, stages have this process's environment and loopback."""
        config = self._config
        if not config.address:
            return replace(bootstrap, host=LOOPBACK, num_gpus=config.num_gpus)
        environment = dict(config.environment)
        return replace(bootstrap, environment=environment, num_gpus=config.num_gpus)

    def _watch(self, serving: Any, place: Any, stage: int, on_death: OnDeath) -> None:
        """Waits for the one call that lasts as long as the stage."""
        try:
            ray.get(serving)
        except (ray.exceptions.RayError, ConnectionError) as error:
            if not self._left:
                _tell_last_lines(stage, place)
            on_death(stage, _reason(error))
        else:
            on_death(stage, "its actor ended")

    # ---- connecting ----------------------------------------------------

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
        try:
            with _sigterm_kept():
                if self._config.address:
                    check_joinable(self._config.address)
                    ray.init(address=self._config.address, **quiet)
                else:
                    self._start_private(quiet)
        except OrcaError:
            raise
        except Exception as error:  # noqa: BLE001  Ray's own where its node takes over 30 s
            raise StartupError(f"Ray can't be reached or started: {error}") from None

    def _start_private(self, quiet: dict[str, Any]) -> None:
        config = self._config
        with _private_environment(), _on_loopback():
            ray.init(
                address="local",
                num_cpus=max(1, math.ceil(config.num_cpus * config.num_stages)),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=self._private_dir,
                **quiet,
            )

    # ---- placing -------------------------------------------------------

    def _place(self) -> Any:
        self._check_own_gpus()
        config = self._config
        group = placement_group([config.bundle] * config.num_stages, strategy="PACK")
        if not self._placed(group):
            raise StartupError(
                f"Ray could not place {config.num_stages} stages with {bundle_told(config.bundle)} "
                f"each within start_timeout_s = {config.place_timeout_s:g} s: "
                f"{nodes_told(_rooms(), config.bundle)}; add or free nodes, take fewer stages, "
                "lower cpus_per_stage, or raise start_timeout_s"
            )
        return group

    def _nodes_of_bundles(self) -> list[str]:
        """The node of each bundle, by its id; empty where it has none at the moment."""
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        return [nodes[bundle] for bundle in range(self._config.num_stages)]

    def _placed(self, group: Any) -> bool:
        """Whether all bundles have their place in time; the group is removed if not."""
        deadline = time.monotonic() + self._config.place_timeout_s
        placed = False
        try:
            # Ray's wait runs no signal handler: Ctrl-C gets its turn between two.
            while not placed and time.monotonic() < deadline:
                placed = group.wait(1)
        finally:
            if not placed:
                remove_placement_group(group)
        return placed

    def _check_own_gpus(self) -> None:
        """On a private Ray no more will come: refused at once, without the wait."""
        config = self._config
        wanted = config.num_gpus * config.num_stages
        found = int(ray.cluster_resources().get("GPU", 0))
        if not config.address and found < wanted:
            raise StartupError(
                f"stages = {config.num_stages} need {wanted} GPUs, this machine has {found}: take "
                "fewer stages, join a cluster (ray_address), or choose device = cpu"
            )

    def _actor(self, stage: int) -> Any:
        # Imported by name: the engine itself stays free of torch, which a stage needs.
        actor = importlib.import_module("orca_dist.stage.actor").StageActor
        return actor.options(
            num_cpus=self._config.num_cpus,
            num_gpus=self._config.num_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group,
                placement_group_bundle_index=self._bundles[stage],
            ),
        ).remote()

    def _give_back(self) -> None:
        """On somebody else's cluster: leave nothing of ours behind."""
        for actor in self._actors.values():
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)


def _rooms() -> list[NodeRoom]:
    """Every living node of the cluster."""
    free = importlib.import_module("ray._private.state").available_resources_per_node()
    return [
        NodeRoom(
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _tell_last_lines(stage: int, place: Any) -> None:
    """What the stage wrote to stderr last; `place` is to become what stderr_place returns."""
    try:
        node, path = ray.get(place, timeout=PLACE_TIMEOUT_S)
    except (ray.exceptions.RayError, ConnectionError):
        return  # it died before it could tell
    if path.startswith("/"):  # else a pipe, which somebody has read
        tell_end_of_file(stage, node, Path(path), without=RAY_MARKS)


def _reason(error: Exception) -> str:
    """One line: what was raised in the actor; of a dead one, the last line that Ray has."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if isinstance(cause, OrcaError):
        return str(cause)
    return f"{type(cause).__name__}: {lines[-1] if lines else 'no reason given'}"


def _short_temp_dir() -> str:
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="orca-", dir=base if len(base) <= MAX_TEMP_DIR_LEN else "/tmp")


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray's handler of SIGTERM prints a native stack; a program that has its own keeps it."""
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if on_main and callable(before):
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _private_environment() -> Iterator[None]:
    """Variables that Ray reads while it starts; afterwards all are as the caller had them.

    Ray leaves some of its own behind, which would reach every later child process.
    """
    theirs = dict(os.environ)
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_AUTH_TOKEN"] = theirs.get("RAY_AUTH_TOKEN") or _process_token()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        yield
    finally:
        for name in os.environ.keys() - theirs.keys():
            del os.environ[name]
        os.environ.update(theirs)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """A Ray that starts meanwhile listens on 127.0.0.1 alone, as it does where it can't cluster.

    Asked for that address by its own argument, it takes a reachable one instead. Its switch is
    a variable, which its processes read, and a constant of this process that was made of it.
    """
    names = vars(importlib.import_module("ray._private.ray_constants"))
    before = names.get(RAY_CLUSTERS)
    os.environ[RAY_CLUSTERS_VARIABLE] = "0"  # _private_environment takes it back
    names[RAY_CLUSTERS] = False
    try:
        yield
    finally:
        names[RAY_CLUSTERS] = before


@functools.cache
def _process_token() -> str:
    """One for all private Rays of this process: Ray reads it once a process and keeps it."""
    return secrets.token_hex(32)
