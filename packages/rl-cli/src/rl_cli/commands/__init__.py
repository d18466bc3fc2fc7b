"""The commands of `rl`, one module each."""
