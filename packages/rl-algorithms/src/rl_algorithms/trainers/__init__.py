"""The trainer loop that all algorithms share."""
