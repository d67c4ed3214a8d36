"""One suite over every Channel.

What a sender may do with a tensor after send(): drop it, not write to it. The
link holds on to it until it has been sent.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch

from orca_dist.transport.channel import Channel, LinkError
from orca_dist.transport.links import open_links
from orca_dist.transport.rendezvous import host_store, join_store, pair_store
from tests.fixtures.link_pairs import (
    CHECKED,
    EPOCHS,
    HOST,
    MAX_PENDING,
    Link,
    in_threads,
    link_config,
    make_link,
    open_chain,
)

KINDS = ["loopback", "gloo", "host", pytest.param("nccl", marks=pytest.mark.gpu)]
NETWORKED = KINDS[1:]
ON_CPU = ["gloo", "host"]
CHECKED_KINDS = [*KINDS, *CHECKED]  # those that follow a device's clocks have to be links, too
NOTICE_S = 20.0  # a dead peer must be noticed long before the link's own limit of 300 s


@pytest.fixture(params=CHECKED_KINDS)
def link(request: pytest.FixtureRequest) -> Iterator[Link]:
    need_gpus(request.param)
    link = make_link(request.param)
    yield link
    link.close()


def need_gpus(kind: str) -> None:
    if kind == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two ends on one GPU")


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pass_through(link: Link, sent: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sends on a thread of its own, as a stage does, while this one receives."""
    sender = threading.Thread(
        target=lambda: [link.upstream.send(link.at_source(x_TH)) for x_TH in sent]
    )
    sender.start()
    received = [link.receive(*x_TH.shape, dtype=x_TH.dtype) for x_TH in sent]
    sender.join()
    return received


# ---- what travels ------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (7, 64), (1, 1), (513, 96)])
def test_contents_arrive_to_the_bit(link: Link, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    sent = noise(*shape, dtype=dtype)
    (received,) = pass_through(link, [sent])
    assert torch.equal(received, sent)


def test_a_large_tensor_arrives(link: Link) -> None:
    sent = noise(4096, 2048)
    (received,) = pass_through(link, [sent])
    assert torch.equal(received, sent)
    assert link.upstream.bytes_sent == 4096 * 2048 * 4


def test_special_values_arrive(link: Link) -> None:
    sent = torch.tensor([[torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45]])
    (received,) = pass_through(link, [sent])
    assert torch.equal(received.view(torch.int32), sent.view(torch.int32))


def test_order_is_kept(link: Link) -> None:
    """Many more than may be pending, small among large."""
    sent = [noise(1 + 37 * i % 200, 64, seed=i) for i in range(60)]
    for got, wanted in zip(pass_through(link, sent), sent, strict=True):
        assert torch.equal(got, wanted)


def test_bytes_sent_is_the_payload(link: Link) -> None:
    before = link.upstream.bytes_sent
    pass_through(link, [noise(5, 48), noise(3, 48, dtype=torch.bfloat16)])
    assert link.upstream.bytes_sent - before == 5 * 48 * 4 + 3 * 48 * 2


# ---- when send() returns -----------------------------------------------


def test_sends_do_not_wait_for_a_receiver(link: Link) -> None:
    """As many as plans may be in flight: all on this thread, then all receives."""
    sent = [noise(4, 64, seed=i) for i in range(MAX_PENDING)]
    for x_TH in sent:
        link.upstream.send(link.at_source(x_TH))
    for x_TH in sent:
        assert torch.equal(link.receive(4, 64), x_TH)


def test_a_sent_tensor_may_be_dropped(link: Link) -> None:
    """Its memory isn't given to others before its bytes have left."""
    for seed in range(MAX_PENDING):
        link.upstream.send(link.at_source(noise(256, 512, seed=seed)))
    gc.collect()
    churn = [torch.full((256, 512), -1.0) for _ in range(2 * MAX_PENDING)]
    for seed in range(MAX_PENDING):
        assert torch.equal(link.receive(256, 512), noise(256, 512, seed=seed))
    assert len(churn) == 2 * MAX_PENDING


def test_loopback_sends_a_copy() -> None:
    """Stages on threads share memory: what is sent must not, as on a wire."""
    link = make_link("loopback")
    sent = noise(4, 64)
    link.upstream.send(sent)
    sent.zero_()
    assert torch.equal(link.receive(4, 64), noise(4, 64))


# ---- ends --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loopback", *ON_CPU])
def test_silence_is_a_link_error_after_the_limit(kind: str) -> None:
    link = make_link(kind, timeout_s=0.5)
    with pytest.raises(LinkError):
        link.receive(1, 64)
    link.close()


@pytest.mark.parametrize("kind", ["loopback", *ON_CPU])
def test_a_receiver_notices_that_its_peer_closed(kind: str) -> None:
    link = make_link(kind, timeout_s=300.0)
    threading.Timer(0.2, link.upstream.close).start()
    raises_soon(lambda: link.receive(1, 64))
    link.close()


def test_a_closed_end_refuses_to_work(link: Link) -> None:
    for _ in range(3):
        link.close()
    with pytest.raises(LinkError):
        link.upstream.send(link.at_source(noise(1, 64)))
    for _ in range(2):
        with pytest.raises(LinkError):
            link.receive(1, 64)


def raises_soon(call: Callable[[], object]) -> None:
    """LinkError, long before the link's limit."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  a thread's root: handed to the test
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(NOTICE_S)
    assert not thread.is_alive(), "still waiting for a peer that is gone"
    assert [type(error) for error in errors] == [LinkError]


def test_a_killed_process_is_noticed_at_both_ends() -> None:
    """This process is stages 0 and 2; the one between them is killed."""
    store, address = host_store(HOST, 60.0)
    peer = subprocess.Popen(
        [sys.executable, "-m", "tests.fixtures.link_peer", address], stdout=subprocess.PIPE
    )
    try:
        links = [_outer_links(kind, epoch, store, address) for kind, epoch in EPOCHS.items()]
        assert peer.stdout is not None
        assert peer.stdout.readline() == b"ready 2\n"
    finally:
        peer.kill()
        peer.wait()
    for to_peer, from_peer in links:
        raises_soon(lambda channel=from_peer: channel.post_recv(torch.empty(1, 64)).wait())
        raises_soon(lambda channel=to_peer: _send_many(channel))


def _outer_links(
    kind: str, epoch: int, store: torch.distributed.Store, address: str
) -> tuple[Channel, Channel]:
    """Stage 0's link to the peer, and stage 2's from it."""

    def open_stage(index: int) -> Channel | None:
        config = link_config(kind, 2 * index, 3, timeout_s=300.0)
        own_store = join_store(address, 60.0) if index else store
        return open_links(config, own_store, epoch)[1 - index]

    to_peer, from_peer = in_threads(open_stage, 2)
    assert to_peer is not None
    assert from_peer is not None
    return to_peer, from_peer


def _send_many(channel: Channel) -> None:
    for _ in range(10 * MAX_PENDING):
        channel.send(torch.zeros(64, 64))


# ---- rendezvous --------------------------------------------------------


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_the_store_listens_on_its_own_address_alone(host: str) -> None:
    before = listening()
    store, address = host_store(host, 5.0)
    assert {f"{ip}:{port}" for ip, port in listening() - before} == {address}
    assert address.startswith(f"{host}:")
    store.set("key", "value")
    assert join_store(address, 5.0).get("key") == b"value"


@pytest.mark.parametrize("kind", ON_CPU)
def test_links_listen_on_the_stages_address_alone(kind: str) -> None:
    before = listening()
    links = open_chain(kind, 2, host="127.0.0.2")
    assert {ip for ip, _ in listening() - before} <= {"127.0.0.2"}
    close_all(links)


def test_every_link_of_every_epoch_has_its_own_corner_of_the_store() -> None:
    store, _ = host_store(HOST, 5.0)
    corners = [pair_store(store, epoch, stage) for epoch in (1, 2, 11) for stage in (0, 1, 11)]
    for index, corner in enumerate(corners):
        corner.set("key", str(index))
    assert [int(corner.get("key")) for corner in corners] == list(range(len(corners)))


@pytest.mark.parametrize("kind", NETWORKED)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_open_links_makes_a_chain(kind: str, num_stages: int) -> None:
    need_gpus(kind)
    links = open_chain(kind, num_stages)
    assert [previous is not None for previous, _ in links] == [False] + [True] * (num_stages - 1)
    assert [following is not None for _, following in links] == [True] * (num_stages - 1) + [False]
    arrived = in_threads(lambda stage: _relay(*links[stage], stage), num_stages)
    assert arrived == [float(stage) for stage in range(num_stages)]
    close_all(links)


@pytest.mark.parametrize("kind", ON_CPU)
def test_links_are_told_of_before_they_are_used(kind: str) -> None:
    """So that one which gets stuck as it is proven can be aborted."""

    class NotNow(Exception):
        pass

    def refuse(channel: Channel) -> None:
        made.append(channel)
        raise NotNow

    def open_stage(stage: int) -> bool:
        own_store = store if stage == 0 else join_store(address, 60.0)
        with pytest.raises(NotNow):
            open_links(link_config(kind, stage, 2, timeout_s=20.0), own_store, 1, refuse)
        return True

    made: list[Channel] = []
    store, address = host_store(HOST, 60.0)
    assert in_threads(open_stage, 2) == [True, True]
    for channel in made:
        channel.abort()
        channel.close()
    assert len(made) == 2


def _relay(previous: Channel | None, following: Channel | None, stage: int) -> float:
    """Receive, add one, send on: what arrives is the number of the stage."""
    x_TH = torch.zeros(3, 64)
    if previous is not None:
        previous.post_recv(x_TH).wait()
    if following is not None:
        following.send(x_TH + 1)
    return float(x_TH.mean())


def close_all(links: list[tuple[Channel | None, Channel | None]]) -> None:
    for channel in (channel for pair in links for channel in pair if channel is not None):
        channel.close()


def test_a_new_epoch_is_opened_on_the_same_store() -> None:
    """As after a lost stage: the old links don't get in the way of the new ones."""
    store, address = host_store(HOST, 60.0)
    for epoch in (1, 2):
        stores = [store, join_store(address, 60.0)]
        (_, upstream), (downstream, _) = in_threads(
            lambda stage, stores=stores, epoch=epoch: open_links(
                link_config("gloo", stage, 2, timeout_s=20.0), stores[stage], epoch
            ),
            2,
        )
        assert upstream is not None
        assert downstream is not None
        upstream.send(torch.full((2, 64), float(epoch)))
        x_TH = torch.zeros(2, 64)
        downstream.post_recv(x_TH).wait()
        assert x_TH.eq(epoch).all()
