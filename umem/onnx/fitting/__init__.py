"""Ways to make the step of an exported model fit a GPU: modes, recomputation, offload."""
