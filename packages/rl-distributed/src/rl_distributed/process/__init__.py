"""One process: its label, signals, garbage collector and activity."""
