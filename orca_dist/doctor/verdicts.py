"""What a doctor says: verdicts on what was seen, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The best first."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


class Check(StrEnum):
    """What is looked at, in the order of a report."""

    NODE = "node"
    VERSIONS = "versions"
    PLACES = "places"
    MODEL = "model"
    MEMORY = "memory"
    GPUS = "gpus"
    COMPILER = "compiler"
    SHM = "shm"
    FILES = "files"
    PORT = "port"
    ACCESS = "access"
    INTERFACE = "interface"
    LINKS = "links"
    CLOCK = "clock"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One verdict. node: empty where it is on the cluster; remedy: empty where nothing is wrong."""

    check: Check
    verdict: Verdict
    seen: str
    remedy: str = ""
    node: str = ""


def worst(findings: Sequence[Finding]) -> Verdict:
    """PASS where there is none."""
    order = list(Verdict)
    return max((finding.verdict for finding in findings), key=order.index, default=Verdict.PASS)


def passed(check: Check, seen: str, *, node: str = "") -> Finding:
    """Nothing to do."""
    return Finding(check=check, verdict=Verdict.PASS, seen=seen, node=node)


def warned(check: Check, seen: str, remedy: str, *, node: str = "") -> Finding:
    """Works, but not as well as it could."""
    return Finding(check=check, verdict=Verdict.WARN, seen=seen, remedy=remedy, node=node)


def failed(check: Check, seen: str, remedy: str, *, node: str = "") -> Finding:
    """A server would not start, or not be safe."""
    return Finding(check=check, verdict=Verdict.FAIL, seen=seen, remedy=remedy, node=node)
