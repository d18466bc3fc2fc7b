from .backend import VllmGenerationBackend as VllmGenerationBackend
from .engine_args import (
    engine_args as engine_args,
    engine_variables as engine_variables,
)
from .traits import Traits as Traits
