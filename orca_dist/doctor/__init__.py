"""`orca-dist doctor`: what a machine or a cluster lacks for a server, before one starts."""

from orca_dist.doctor.examination import (
    OnProgress,
    Report,
    examine,
    with_finding,
    without_cluster,
)
from orca_dist.doctor.facts import Question, Source
from orca_dist.doctor.needs import demand_of, need_of, source_of_model
from orca_dist.doctor.nodes import Nodes, ThisNode
from orca_dist.doctor.verdicts import Check, Finding, Verdict, failed, passed, warned

__all__ = [
    "Check",
    "Finding",
    "Nodes",
    "OnProgress",
    "Question",
    "Report",
    "Source",
    "ThisNode",
    "Verdict",
    "demand_of",
    "examine",
    "failed",
    "need_of",
    "passed",
    "source_of_model",
    "warned",
    "with_finding",
    "without_cluster",
]
