"""`orca-dist plan`: which configuration of a cluster serves a model at a rate."""

from __future__ import annotations

from dataclasses import dataclass

from tyro.conf import OmitArgPrefixes, Positional

from orca_dist.cli.output import count_progress, print_json
from orca_dist.cli.plan_tables import document, print_found, print_note
from orca_dist.cli.sim_costs import ITEMSIZE, MAX_SIZE, model_folder, model_shape, positive, within
from orca_dist.cli.sim_workloads import OUTPUT_LENS, PROMPT_LEN
from orca_dist.config import Dtype, LogConfig
from orca_dist.errors import ConfigError
from orca_dist.logs import Origin, set_up_logging
from orca_dist.sim.hardware import DEVICES, NETWORK_BYTES_S, find_device
from orca_dist.sim.layouts import Cluster, Layout, Misfit, Target
from orca_dist.sim.lengths import parse_lengths
from orca_dist.sim.paper import EFFICIENCY
from orca_dist.sim.planner import Demand, Found, search
from orca_dist.sim.roofline import MEMORY_SHARE
from orca_dist.sim.workload import Arrivals
from orca_dist.spec import load_spec

NUM_REQUESTS = 200
MIN_REQUESTS, MAX_REQUESTS = 10, 100_000
MAX_NODES = 1024
MAX_DEVICES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Find the configuration that serves a model at a rate: all that fit, simulated and ranked.

    Needs only the model's config.json. Those that keep up and meet --slo-s come first, by fewest
    devices and then latency.
    """

    model: Positional[str] = ""
    """Model folder, of which only config.json is read; or the default model's name."""
    layers: int | None = None
    """Layers of a GPT-style model (an MLP four times as wide), in place of MODEL."""
    hidden: int | None = None
    """Its hidden size; heads are of size 128."""
    gpu: str = ""
    """Each device: A100-40GB, A100-80GB, H100, H200, L4, L40S or CPU."""
    nodes: int = 1
    """Nodes that there are."""
    gpus_per_node: int = 8
    """Devices of each."""
    rate: float | None = None
    """Requests per second that come, at random (Poisson)."""
    slo_s: float = 0.2
    """Most that the median normalised latency may be: seconds from arrival to the end of the
    answer, over its tokens."""
    prompt_len: str = PROMPT_LEN
    """Tokens of a prompt: 8, a range to draw from (32-512), or a list to go through (5,50,8)."""
    output_lens: str = OUTPUT_LENS
    """Tokens of an answer, written like --prompt-len."""
    batch_sizes: str = "8,32,128"
    """Values of max_batch_size to try."""
    dtype: Dtype = Dtype.AUTO
    """Of weights, activations and KV; auto: 16 bits."""
    efficiency: float = EFFICIENCY
    """Share of the datasheet's peaks that is reached; the default is what the paper's are."""
    network_gb_s: float = NETWORK_BYTES_S / 1e9
    """GB per second from a node to the next; the default is a 100 Gb/s adapter."""
    num_requests: int = NUM_REQUESTS
    """Requests of each run."""
    seed: int = 0
    """Same seed, same requests."""
    all: bool = False
    """Rank stages of several devices among the others. serve can't run them yet, so that they
    follow after all others without this."""
    top: int = 20
    """Rows to print; 0: all. --json has all of them."""
    json: bool = False
    """Print one JSON document instead."""
    log: OmitArgPrefixes[LogConfig]

    def run(self) -> int:
        """Returns 0; raises ConfigError where nothing fits or flags are wrong, ModelError for a
        bad folder."""
        set_up_logging(self.log, Origin())
        self._check()
        demand, batch_sizes = self._demand(), self._batch_sizes()
        target = self._target(demand)
        with count_progress("simulating") as on_progress:
            found = search(
                target, demand, batch_sizes, sharded_too=self.all, on_progress=on_progress
            )
        if not found.candidates:
            raise ConfigError(self._refusal(target, found))
        self._note(demand)
        if self.json:
            print_json(document(target, demand, found))
        else:
            print_found(target, found, self.top or len(found.candidates))
        return 0

    def _check(self) -> None:
        if not self.gpu:
            raise ConfigError(f"gpu: say which devices: one of {', '.join(DEVICES)}")
        if self.rate is None:
            raise ConfigError("rate: say how many requests per second come, such as --rate 5")
        Arrivals(rate=self.rate).check()
        within("nodes", self.nodes, 1, MAX_NODES)
        within("gpus_per_node", self.gpus_per_node, 1, MAX_DEVICES)
        within("num_requests", self.num_requests, MIN_REQUESTS, MAX_REQUESTS)
        within("top", self.top, 0, MAX_SIZE)
        for name, value in (
            ("slo_s", self.slo_s),
            ("efficiency", self.efficiency),
            ("network_gb_s", self.network_gb_s),
        ):
            positive(name, value)

    def _demand(self) -> Demand:
        assert self.rate is not None, "checked before"
        return Demand(
            rate=self.rate,
            slo_s=self.slo_s,
            prompt_lens=parse_lengths("prompt_len", self.prompt_len),
            output_lens=parse_lengths("output_lens", self.output_lens),
            num_requests=self.num_requests,
            seed=self.seed,
        )

    def _batch_sizes(self) -> list[int]:
        """Each once."""
        if "-" in self.batch_sizes:
            raise ConfigError(f"batch_sizes = {self.batch_sizes}: needs a list, such as 8,32,128")
        lengths = parse_lengths("batch_sizes", self.batch_sizes)
        return sorted({*lengths.listed} or {lengths.high})

    def _target(self, demand: Demand) -> Target:
        cluster = Cluster(
            device=find_device(self.gpu),
            num_nodes=self.nodes,
            devices_per_node=self.gpus_per_node,
            network_bytes_s=self.network_gb_s * 1e9,
        )
        shape = model_shape(self.model, self.layers, self.hidden)
        self._check_longest(demand.longest)
        return Target(
            shape=shape,
            cluster=cluster,
            longest=demand.longest,
            itemsize=ITEMSIZE[self.dtype],
            efficiency=self.efficiency,
        )

    def _check_longest(self, longest: int) -> None:
        """A server would refuse what the model was not made for."""
        if not self.model:
            return
        most = load_spec(model_folder(self.model)).max_model_len
        if longest > most:
            raise ConfigError(
                f"prompt_len = {self.prompt_len}: with output_lens = {self.output_lens} up to "
                f"{longest} tokens, the model takes {most}; shorten them"
            )

    def _note(self, demand: Demand) -> None:
        """Where the runs end before a queue could have been seen to grow."""
        needed = round(2 * demand.out_at_slo)
        if needed > self.num_requests:
            print_note(
                f"{self.num_requests} requests are few: at {self.rate:g} a second and "
                f"{self.slo_s:g} s a token {demand.out_at_slo:.0f} are out at once; "
                f"--num-requests {2 * needed} tells better who keeps up"
            )

    def _refusal(self, target: Target, found: Found) -> str:
        """What the best layout lacks, and what would do."""
        best = min(found.misfits, key=lambda misfit: misfit.needed_bytes)
        return (
            f"{self.model or 'the model'} fits no configuration of {self.nodes} x "
            f"{self.gpus_per_node} {target.cluster.device.name}: {_lack(best)}; "
            f"{_enough(target)}"
        )


def _lack(misfit: Misfit) -> str:
    return (
        f"even as {_words(misfit.layout)} a device needs {_gb(misfit.needed_bytes)} for weights "
        f"and the longest request, and has {_gb(misfit.room_bytes)} ({MEMORY_SHARE:.0%} of its "
        f"memory), {(misfit.needed_bytes - misfit.room_bytes) / 1e9:.3g} GB too little"
    )


def _enough(target: Target) -> str:
    smallest = target.smallest()
    if smallest is None:
        return "no number of them would do; take devices with more memory"
    text = f"the fewest that would do are {smallest.num_devices}, as {_words(smallest)}"
    if smallest.tensor_parallel == 1:
        return text
    stages = target.fewest_stages(1)
    alone = f"it needs {stages} of 1 device" if stages else "no number of unsharded ones would do"
    return f"{text}, which serve can't run yet: {alone}"


def _words(layout: Layout) -> str:
    stages, devices = layout.num_stages, layout.tensor_parallel
    return f"{stages} stage{'s' * (stages > 1)} of {devices} device{'s' * (devices > 1)}"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
