"""Who may talk to a cluster: tokens, certificates, the audit log."""
