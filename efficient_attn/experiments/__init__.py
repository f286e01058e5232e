"""What a command or a notebook calls."""
