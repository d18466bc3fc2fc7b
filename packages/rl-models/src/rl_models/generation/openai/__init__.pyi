from .backend import OpenAIGenerationBackend as OpenAIGenerationBackend
from .traits import Traits as Traits
