"""How conversations ended, and how often."""

from __future__ import annotations

from hypothesis import given, strategies as st

from rl_envs.outcomes import (
    OUTCOME_KEY,
    ConversationOutcome,
    outcome_metrics,
    outcome_of,
)


def test_an_outcome_is_read_as_text_or_member_and_nothing_else() -> None:
    for outcome in ConversationOutcome:
        assert outcome_of({OUTCOME_KEY: outcome}) is outcome
        assert outcome_of({OUTCOME_KEY: outcome.value}) is outcome
    for other in ({}, {OUTCOME_KEY: "approved"}, {OUTCOME_KEY: 3}, None, "solved"):
        assert outcome_of(other) is None


@given(st.lists(st.sampled_from([*ConversationOutcome, None]), min_size=1))
def test_shares_add_up_and_count_each_conversation(
    outcomes: list[ConversationOutcome | None],
) -> None:
    metrics = outcome_metrics({OUTCOME_KEY: outcome} for outcome in outcomes)
    names = [*(each.value for each in ConversationOutcome), "unfinished"]
    assert set(metrics) == {f"outcome/{name}" for name in names}
    assert abs(sum(metrics.values()) - 1) < 1e-9
    assert metrics["outcome/unfinished"] == outcomes.count(None) / len(outcomes)
    solved = outcomes.count(ConversationOutcome.SOLVED)
    assert metrics["outcome/solved"] == solved / len(outcomes)


def test_no_conversations_have_no_metrics() -> None:
    assert outcome_metrics([]) == {}
