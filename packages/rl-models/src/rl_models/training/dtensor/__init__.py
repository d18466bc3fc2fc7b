"""Any Hugging Face causal LM, sharded with FSDP2 over gloo (CPU) or NCCL (GPU).

The backend is imported on first use, so that a driver can look at settings without
torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
