from .audit import enable_audit as enable_audit
from .audit_chain import (
    make_audit_key as make_audit_key,
    verify_audit_log as verify_audit_log,
)
from .ray_access import make_certificates as make_certificates
from .tls_files import TlsFiles as TlsFiles
