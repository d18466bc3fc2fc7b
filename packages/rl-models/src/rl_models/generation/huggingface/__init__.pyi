from .backend import HuggingFaceGenerationBackend as HuggingFaceGenerationBackend
from .traits import Traits as Traits
