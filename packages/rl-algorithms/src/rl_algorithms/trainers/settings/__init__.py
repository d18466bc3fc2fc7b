"""Configuration sections that trainers share."""
