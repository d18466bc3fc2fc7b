"""Training rows and losses of one optimizer step."""
