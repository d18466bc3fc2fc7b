from .audit import enable_audit as enable_audit
from .audit_chain import (
    create_audit_key as create_audit_key,
    verify_audit_log as verify_audit_log,
)
from .ray_access import create_certificates as create_certificates
from .tls_files import TlsFiles as TlsFiles
