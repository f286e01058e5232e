"""What a backend plugs into: layers, blocks and stacks of them, on embeddings."""
