"""One pipeline stage: plans in, activations through, tokens out at the end (Orca §3, §4.1)."""
