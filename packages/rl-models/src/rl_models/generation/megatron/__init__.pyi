from .backend import MegatronGenerationBackend as MegatronGenerationBackend
from .traits import Traits as Traits
