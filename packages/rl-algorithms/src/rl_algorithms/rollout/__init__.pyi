from .branches import Branch as Branch, unfold_branches as unfold_branches
from .config import (
    RetryConfig as RetryConfig,
    RolloutConfig as RolloutConfig,
    RolloutSettings as RolloutSettings,
)
from .engine import RolloutEngine as RolloutEngine
from .result import (
    Outcome as Outcome,
    RolloutResult as RolloutResult,
    RolloutSample as RolloutSample,
)
from .retries import ConfiguredRetry as ConfiguredRetry, RetryPolicy as RetryPolicy
from .timeline import Timeline as Timeline
from .versions import mark_stale as mark_stale, staleness as staleness
