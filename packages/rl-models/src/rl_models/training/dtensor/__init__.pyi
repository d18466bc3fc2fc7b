from .backend import DTensorTrainingBackend as DTensorTrainingBackend
from .traits import Traits as Traits
