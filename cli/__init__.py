"""The command `efficient-attn`: parses, calls the library once, prints."""
