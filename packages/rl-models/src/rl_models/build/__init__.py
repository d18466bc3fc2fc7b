"""Building small models and tokenizers from a configuration."""
