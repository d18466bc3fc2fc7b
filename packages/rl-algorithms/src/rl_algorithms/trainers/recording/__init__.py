"""Recording of what a run trains on."""
