from .logging import (
    configure_logging as configure_logging,
    get_logger as get_logger,
    log_context as log_context,
)
