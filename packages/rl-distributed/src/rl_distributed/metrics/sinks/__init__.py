"""The sinks that come with the package; each is found by its name in `rl.loggers`."""
