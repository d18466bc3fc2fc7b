"""Building the components of a run, and closing them."""
