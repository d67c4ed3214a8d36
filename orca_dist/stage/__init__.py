"""One pipeline stage: plans in, activations through, tokens out at the end (Orca §3.2, §4)."""
