"""Speed against named peers, as ratios measured in one run."""
