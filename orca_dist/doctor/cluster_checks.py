"""Verdicts on what nodes have in common, and on the ways between them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orca_dist.doctor.facts import Demand, Link, Need, NodeFacts, RayPort, Room
from orca_dist.doctor.network import is_loopback
from orca_dist.doctor.verdicts import Check, Finding, failed, passed, warned
from orca_dist.doctor.words import listed, milliseconds, rate, size
from orca_dist.versions import essential

SLOW_LATENCY_S = 2e-3
SLOW_BYTES_S = 100e6  # a gigabit Ethernet brings 118
CLOCK_WARN_S = 0.1
CLOCK_FAIL_S = 60.0  # certificates and tokens begin to look too new or too old

TOKEN_REMEDY = (
    "stop it, and start every node with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN (openssl rand "
    "-hex 32)"
)


def check_versions(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """All alike, or who has what."""
    names = nodes[0].versions.keys()
    differing = [name for name in names if len({node.versions[name] for node in nodes}) > 1]
    for name in differing:
        yield _differing(name, nodes)
    alike = [f"{name} {nodes[0].versions[name] or '-'}" for name in names if name not in differing]
    everywhere = f" on all {len(nodes)} nodes" if len(nodes) > 1 else ""
    if alike:
        yield passed(Check.VERSIONS, f"{', '.join(alike)}{everywhere}")


def _differing(name: str, nodes: Sequence[NodeFacts]) -> Finding:
    holders: dict[str, list[str]] = {}
    for node in nodes:
        holders.setdefault(node.versions[name], []).append(node.node)
    seen = "; ".join(f"{name} {at or '-'} on {listed(who)}" for at, who in holders.items())
    remedy = f"install one {name} on all nodes (pip install -c constraints.txt does)"
    if len({essential(name, version) for version in holders}) == 1:
        return warned(Check.VERSIONS, seen, f"use one {name} on all nodes")
    return failed(Check.VERSIONS, seen, remedy)


def check_places(rooms: Sequence[Room], demand: Demand) -> Iterator[Finding]:
    """Whether Ray has a place for each stage, were nobody else there."""
    places = [demand.places(room) for room in rooms]
    each = f"{demand.num_cpus:g} CPU{'s' * (demand.num_cpus != 1)}"
    seen = (
        f"{_count(demand.num_stages, 'stage')} of {each}{' and a GPU' * demand.on_gpu}; Ray has "
        f"{_count(sum(places), 'such place')} on {sum(map(bool, places))} of "
        f"{_count(len(rooms), 'node')}"
    )
    if sum(places) >= demand.num_stages:
        yield passed(Check.PLACES, seen)
        return
    yield failed(Check.PLACES, seen, "add nodes, take fewer --stages, or lower --cpus-per-stage")


def check_memory(nodes: Sequence[NodeFacts], need: Need) -> Iterator[Finding]:
    """Whether the stages fit, and a request of the longest length beside them."""
    rooms = _gpu_rooms(nodes) if need.on_gpu else [node.memory.limit_bytes for node in nodes]
    where = "GPU" if need.on_gpu else "node"
    stages, total = sorted(need.stage_bytes, reverse=True), sum(need.stage_bytes)
    if need.on_gpu and len(rooms) < len(stages):
        yield failed(
            Check.GPUS,
            f"{len(stages)} stages need as many GPUs, {_count(len(rooms), 'GPU')} found",
            "take fewer --stages, add nodes, or choose --device cpu",
        )
        return
    seen = (
        f"{_count(len(stages), 'stage')} of {_span(stages)} (weights and activations); "
        f"{_count(len(rooms), where)} of {_span(rooms)}"
    )
    if not _fit(stages, rooms, alone=need.on_gpu):
        yield failed(Check.MEMORY, seen, "take more nodes or --stages, or a smaller --dtype")
        return
    used = sorted(rooms, reverse=True)[: len(stages)] if need.on_gpu else rooms
    num_tokens = int((sum(used) - total) * need.memory_share / need.token_bytes)
    if num_tokens < need.max_model_len:
        yield warned(
            Check.MEMORY,
            f"{seen}; room for {max(0, num_tokens)} KV tokens, a request may have "
            f"{need.max_model_len}",
            "lower --max-model-len, raise --memory-share, or take more nodes or --stages",
        )
        return
    yield passed(Check.MEMORY, seen)
    if not need.on_gpu:
        yield from _available(nodes, max(stages))


def _gpu_rooms(nodes: Sequence[NodeFacts]) -> list[int]:
    return [gpu.memory_bytes for node in nodes for gpu in node.gpus.gpus]


def _fit(stages: Sequence[int], rooms: Sequence[int], *, alone: bool) -> bool:
    """Largest first into the largest room left; `alone`: a room takes one."""
    left = sorted(rooms, reverse=True)
    for stage in stages:
        if not left or stage > left[0]:
            return False
        left[0] = 0 if alone else left[0] - stage
        left.sort(reverse=True)
    return True


def _available(nodes: Sequence[NodeFacts], stage_bytes: int) -> Iterator[Finding]:
    """Memory that others hold at the moment."""
    for node in nodes:
        memory = node.memory
        if memory.available_bytes < stage_bytes:
            around = " of the container or job" if memory.is_limited else ""
            yield warned(
                Check.MEMORY,
                f"{size(memory.available_bytes)} of {size(memory.limit_bytes)}{around} free, a "
                f"stage needs {size(stage_bytes)}",
                "end what holds it, or take another node",
                node=node.node,
            )


def check_links(links: Sequence[Link], need: Need | None) -> Iterator[Finding]:
    """Every way between two nodes, and from a node to itself."""
    for link in links:
        if link.problem:
            yield failed(
                Check.LINKS,
                f"{link.source} does not reach {link.target}: {link.problem}",
                "open all ports between the nodes (stages listen on free ones), and see that "
                "each Ray node has the address that the others reach",
            )
    good = [link for link in links if not link.problem]
    slow = [link for link in good if _is_slow(link)]
    for link in slow:
        yield warned(
            Check.LINKS,
            f"{link.source} to {link.target}: {_told([link], need)}",
            "use the faster network between them: start Ray with its --node-ip-address",
        )
    if fast := [link for link in good if link not in slow]:
        yield passed(Check.LINKS, f"{_count(len(fast), 'way')}: {_told(fast, need)}")


def _is_slow(link: Link) -> bool:
    return link.latency_s > SLOW_LATENCY_S or link.bytes_s < SLOW_BYTES_S


def _told(links: Sequence[Link], need: Need | None) -> str:
    """Latency and bandwidth, from the best to the worst, and what they mean for the model."""
    latencies = sorted(link.latency_s for link in links)
    rates = sorted((link.bytes_s for link in links), reverse=True)
    told = (
        f"{_range([milliseconds(s) for s in latencies])} there and back, "
        f"{_range([rate(b) for b in rates])}"
    )
    if need is None:
        return told
    slowest = milliseconds(need.link_bytes / rates[-1])
    return f"{told}; {need.rows} tokens' activations take {slowest}"


def _range(words: Sequence[str]) -> str:
    return words[0] if words[0] == words[-1] else f"{words[0]} to {words[-1]}"


def check_clocks(links: Sequence[Link]) -> Iterator[Finding]:
    """Of nodes beside the first one's clock."""
    first = links[0].source if links else ""
    found = [
        link for link in links if link.source == first and link.target != first and not link.problem
    ]
    off = [link for link in found if abs(link.offset_s) - link.error_s > CLOCK_WARN_S]
    for link in off:
        judged = failed if abs(link.offset_s) > CLOCK_FAIL_S else warned
        ahead = "ahead of" if link.offset_s > 0 else "behind"
        yield judged(
            Check.CLOCK,
            f"{link.target} is {abs(link.offset_s):.3g} s {ahead} {first}",
            "run chrony or another NTP client on every node",
        )
    right = [abs(link.offset_s) for link in found if link not in off]
    if right:
        yield passed(Check.CLOCK, f"within {milliseconds(max(right))} of {first}")


def check_ray(head: RayPort | None, nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """The cluster's head, and every other that listens beyond its machine."""
    if head is not None:
        yield _ray_port(head, "")
    others = [
        (port, node.node)
        for node in nodes
        for port in node.ray_ports
        if head is None or _port(port) != _port(head)
    ]
    for port, node in others:
        if head is None or port.open:
            yield _ray_port(port, node)
    if head is None and not others:
        yield passed(Check.RAY, "no Ray of this user listens beyond this machine")


def _port(port: RayPort) -> str:
    """A head listens on all addresses of its node, and is known by one."""
    return port.address.rpartition(":")[2]


def _ray_port(port: RayPort, node: str) -> Finding:
    if port.open is None:
        seen = f"{port.address} does not say whether it wants a token ({port.problem})"
        return warned(Check.RAY, seen, "see that RAY_AUTH_MODE=token is set there", node=node)
    if not port.open:
        return passed(Check.RAY, f"{port.address} wants a token", node=node)
    seen = f"{port.address} needs no token"
    if is_loopback(port.address.rpartition(":")[0].strip("[]")):
        return warned(
            Check.RAY, f"{seen}: users of this machine can run code in it", TOKEN_REMEDY, node=node
        )
    return failed(
        Check.RAY, f"{seen}: whoever reaches it can run code on it", TOKEN_REMEDY, node=node
    )


def _span(sizes: Sequence[int]) -> str:
    """Of sizes in any order."""
    return _range([size(each) for each in sorted(sizes)]) if sizes else size(0)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"
