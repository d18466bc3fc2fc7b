"""A layer probe detects a wrong gradient of the layer's input."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_models.errors import UnsupportedModelError
from rl_models.training.dtensor.layer_probe import LayerProbe, check_differences


def test_a_layer_with_another_gradient_of_its_input_is_found(tiny_model):
    base = AutoModelForCausalLM.from_pretrained(tiny_model).base_model
    layer = base.layers[0]
    probe = LayerProbe(base, layer)
    wanted = probe.whole(layer)
    same = probe.ask(layer, torch.device("cpu"))
    pair = {"the gradient of its input": (same.input_gradient, wanted.input_gradient)}
    check_differences(pair, "tensor", "cut", "m")
    # Twice the gradient, added to no other layer's.
    layer.register_full_backward_hook(lambda module, grad, out: (2 * grad[0],))
    found = probe.ask(layer, torch.device("cpu"))
    torch.testing.assert_close(found.input_gradient, 2 * wanted.input_gradient)
    pair = {"the gradient of its input": (found.input_gradient, wanted.input_gradient)}
    with pytest.raises(
        UnsupportedModelError, match="gradient of its input is off by 1"
    ):
        check_differences(pair, "tensor", "cut", "m")
