"""Names of other systems, so that programs written for them run here."""
