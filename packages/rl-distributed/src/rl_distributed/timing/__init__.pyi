from .timer import (
    TimeoutChecker as TimeoutChecker,
    Timer as Timer,
)
from .tracing import (
    Span as Span,
    export_chrome_trace as export_chrome_trace,
)
