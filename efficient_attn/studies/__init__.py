"""Studies: each file or folder is a command and a function of `efficient_attn`."""
