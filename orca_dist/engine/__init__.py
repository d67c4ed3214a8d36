"""The control plane's side of the paper: engine master, stages' placement, watch over them."""
