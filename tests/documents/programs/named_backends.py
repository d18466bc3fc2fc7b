from rl_models import get_generation_backend, get_training_backend

training = get_training_backend("dtensor")  # or "megatron"
generation = get_generation_backend("vllm")  # or "megatron"
