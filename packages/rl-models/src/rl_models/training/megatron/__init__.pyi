from .backend import MegatronTrainingBackend as MegatronTrainingBackend
from .traits import Traits as Traits
