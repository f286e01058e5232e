"""Linear attention: feature maps, the state of keys, and the full and causal algorithms."""
