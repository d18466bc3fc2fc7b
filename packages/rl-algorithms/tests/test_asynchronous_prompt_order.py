"""The prompts of all epochs as one sequence."""

from __future__ import annotations

from rl_algorithms.asynchronous.prompt_order import Prompt, PromptOrder


def test_prompts_run_across_epochs_to_the_end():
    order = PromptOrder(2, 2)
    drawn = []
    while not order.is_used_up:
        drawn.append(order.draw())
    assert drawn == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert order.prompt(2) == Prompt(2, 1, 0)


def test_without_a_limit_there_is_always_another_one():
    order = PromptOrder(3, None)
    order.position = 10**9
    assert not order.is_used_up
    assert order.draw() == (10**9, 333333333, 1)
