"""Foreign traces: formats, hub sets, and recorded sessions as a script."""
