"""Logging: files, console lines, and what is concealed in them."""
