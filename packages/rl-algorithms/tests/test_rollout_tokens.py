"""Sampled tokens are preserved, whatever tokenizer and template do."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rl_algorithms.errors import RolloutError
from rl_algorithms.rollout import (
    Outcome,
    RolloutConfig,
    RolloutEngine,
    unfold_branches,
)
from rl_distributed.batch.batched_data_dict import BatchedDataDict
from rl_envs.interfaces import EnvironmentInterface

_spec = importlib.util.spec_from_file_location(
    "scripted_rollouts", Path(__file__).with_name("scripted_rollouts.py")
)
scripted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scripted)
EOS = scripted.EOS

TEMPLATE = (
    "{% for m in messages %}|{{ m['role'][0] }}:{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}|a:{% endif %}"
)
STRIPPING = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('>')[-1] }}{% else %}{{ m['content'] }}{% endif %}",
)
MOVING = (
    "{% set s = messages[0]['content'] %}{% for m in messages[1:] %}"
    "|{{ m['role'][0] }}:{% if loop.last %}{{ s }}{% endif %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}|a:"
)
FORGETTING = "|u:{{ messages[-1]['content'] }}|a:"


class Spy:
    """A tokenizer that records its input texts."""

    def __init__(self, tokenizer):
        self.tokenizer, self.texts = tokenizer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **kwargs):
        self.texts += [text] if isinstance(text, str) else text
        return self.tokenizer(text, **kwargs)


def draw_tokens(seed, vocab_size, *, longest=6):
    """Draw any non-special ids, then the end, by the row's own seed."""
    noise = np.random.default_rng(seed)
    body = noise.integers(3, vocab_size, noise.integers(0, longest)).tolist()
    return [*body, EOS]


@settings(max_examples=25, deadline=None)
@given(
    num_turns=st.integers(1, 4),
    num_prompts=st.integers(1, 3),
    num_generations=st.integers(1, 3),
    template=st.sampled_from([None, TEMPLATE]),
    said=st.text("abc0 ", max_size=4),
    seed=st.integers(0, 2**20),
    ends=st.integers(1, 3),
)
def test_sampled_tokens_never_pass_through_text(
    num_turns, num_prompts, num_generations, template, said, seed, ends
):
    spy = Spy(scripted.ambiguous_tokenizer(template))
    size = len(spy.get_vocab())
    generator = scripted.TokenGenerator(
        lambda call, row, row_seed: draw_tokens(row_seed, size), lambda call: call + 3
    )

    def judge(log, info):
        # Some rows end early, so that the active set changes.
        return 1.0, sum(map(len, (m["content"] for m in log))) % (ends + 1) == 0, said

    batch = scripted.make_batch(spy, ["ab"] * num_prompts)
    spy.texts.clear()
    engine = RolloutEngine(
        generator, scripted.Judge(judge), spy, RolloutConfig(max_turns=num_turns)
    )
    rows = engine.run(batch, num_generations=num_generations, seed=seed).rows

    # Only the environment's text was tokenized, in its format; answers never are.
    tail = "" if template is None else "|u:"
    after = "" if template is None else "|a:"
    assert set(spy.texts) <= {f"{tail}{said}{after}"}
    # Each row holds exactly the tokens drawn from its own seeds, in order.
    expected = {}
    for call, (data, tails) in enumerate(
        zip(generator.calls, generator.sampled, strict=True)
    ):
        for row, tokens in enumerate(tails):
            start = data["input_lengths"][row]
            context = tuple(data["input_ids"][row, :start].tolist())
            expected[context, tuple(tokens)] = call
    for row in range(rows.size):
        length = int(rows["input_lengths"][row])
        ids = rows["input_ids"][row, :length].tolist()
        mask = rows["token_mask"][row].bool()
        assert not mask[length:].any()
        at = torch.arange(len(mask))
        logprobs = torch.where(mask, -(rows["input_ids"][row] + 1.0) / 64, 0.0)
        assert torch.equal(rows["generation_logprobs"][row], logprobs)
        starts = at[mask & ~torch.cat([torch.tensor([False]), mask[:-1]])].tolist()
        # Adjacent answers form one run of the mask.
        num_turns_seen = 0
        for start in starts:
            while start < length and mask[start]:
                end = ids.index(EOS, start) + 1
                call = expected[tuple(ids[:start]), tuple(ids[start:end])]
                assert rows["token_versions"][row, start:end].unique().tolist() == [
                    call + 3
                ]
                num_turns_seen += 1
                start = end
        assert num_turns_seen == rows["num_turns"][row]
        assert (rows["token_versions"][row][~mask] == -1).all()
        assert rows["weight_version"][row] == 3
    assert int(rows["token_mask"].sum()) == int(rows["generation_lengths"].sum())


def test_decoding_and_encoding_would_change_the_tokens():
    tokenizer = scripted.ambiguous_tokenizer()
    first, second = tokenizer("a")["input_ids"][0], tokenizer("b")["input_ids"][0]
    text = tokenizer.decode([first, second])
    assert tokenizer(text)["input_ids"] != [first, second]


def play(template, *, says, on_rewrite="error", max_turns=3, prompts=("a",), **kwargs):
    tokenizer = scripted.ambiguous_tokenizer(template)
    say = scripted.texts_of(tokenizer, lambda call, row: says[call][row])
    generator = scripted.TokenGenerator(say, lambda call: call)
    environment = kwargs.pop("environment", None) or scripted.Judge(
        lambda log, info: (0.5, log[-1]["content"].endswith("h"), "bc")
    )
    config = RolloutConfig(
        max_turns=max_turns, on_template_rewrite=on_rewrite, **kwargs
    )
    engine = RolloutEngine(generator, environment, tokenizer, config)
    batch = scripted.make_batch(tokenizer, list(prompts))
    return engine.run(batch), tokenizer, generator


SAYS = [["<c>d$", "e$"], ["<f>g$", "g$"], ["h$", "h$"]]


def test_a_template_that_strips_thoughts_is_refused():
    with pytest.raises(RolloutError) as caught:
        play(STRIPPING, says=SAYS, prompts=("a", "b"))
    text = str(caught.value)
    assert "writes the first 2 messages of a conversation differently" in text
    assert "'<c>d' became 'd'" in text
    assert "rollout.on_template_rewrite=branch" in text


@pytest.mark.parametrize("template", [MOVING, FORGETTING])
def test_templates_that_move_or_forget_are_refused(template):
    tokenizer = scripted.ambiguous_tokenizer(template)
    chat = [{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]
    generator = scripted.TokenGenerator(
        scripted.texts_of(tokenizer, lambda call, row: "d$")
    )
    engine = RolloutEngine(
        generator,
        scripted.Judge(lambda log, info: (0.0, False, "b")),
        tokenizer,
        RolloutConfig(max_turns=2),
    )
    with pytest.raises(RolloutError, match="differently once others follow"):
        engine.run(scripted.make_batch(tokenizer, [chat]))


def test_blanks_around_an_answer_may_be_trimmed():
    trimming = TEMPLATE.replace("m['content'] }}", "m['content'] | trim }}")
    result, tokenizer, _ = play(trimming, says=[[" d $"], ["h$"]])
    [text] = scripted.row_texts(tokenizer, result.rows)
    assert text == "|u:a|a: d <eos>|u:bc|a:h<eos>"


def test_a_rewritten_conversation_branches():
    result, tokenizer, generator = play(
        STRIPPING, says=SAYS, on_rewrite="branch", prompts=("a", "b")
    )
    rows = result.rows
    # The second conversation has nothing to strip and remains one row.
    assert scripted.row_texts(tokenizer, rows) == [
        "|u:a|a:d<eos>|u:bc|a:g<eos>|u:bc|a:h<eos>",
        "|u:b|a:e<eos>|u:bc|a:g<eos>|u:bc|a:h<eos>",
    ]
    assert [len(branches) for branches in rows["branches"]] == [2, 0]
    first, second = rows["branches"][0]
    assert tokenizer.decode(first.input_ids.tolist()) == "|u:a|a:<c>d<eos>"
    assert (
        tokenizer.decode(second.input_ids.tolist()) == "|u:a|a:d<eos>|u:bc|a:<f>g<eos>"
    )
    # Each sampled token is trained on once, in the row with its actual prompt.
    parts = [first, second]
    for call, part in enumerate(parts):
        sampled = part.input_ids[part.token_mask.bool()].tolist()
        assert sampled == generator.sampled[call][0]
        assert part.token_versions[part.token_mask.bool()].unique().tolist() == [call]
        assert not part.generation_logprobs[~part.token_mask.bool()].any()
    assert (
        rows["input_ids"][0][rows["token_mask"][0].bool()].tolist()
        == (generator.sampled[2][0])
    )
    assert rows["rewards"].tolist() == [1.5, 1.5]
    assert rows["generation_lengths"].tolist() == [5 + 5 + 2, 2 + 2 + 2]
    assert float(result.metrics["mean_branches_per_sample"]) == 1.0


def test_branches_become_rows_that_share_the_advantage():
    result, _, _ = play(STRIPPING, says=SAYS, on_rewrite="branch", prompts=("a", "b"))
    rows = result.rows
    train = BatchedDataDict(
        {
            name: rows[name]
            for name in (
                "input_ids",
                "input_lengths",
                "token_mask",
                "sample_mask",
                "generation_logprobs",
                "token_versions",
                "branches",
            )
        }
    )
    train["advantages"] = torch.tensor([2.0, -1.0])
    unfolded = unfold_branches(train)
    assert "branches" not in unfolded
    assert unfolded["advantages"].tolist() == [2.0, -1.0, 2.0, 2.0]
    assert int(unfolded["token_mask"].sum()) == int(rows["generation_lengths"].sum())
    assert unfolded["input_lengths"][2:].tolist() == [
        len(branch.input_ids) for branch in rows["branches"][0]
    ]
    mask = unfolded["token_mask"].bool()
    assert (unfolded["token_versions"][~mask] == -1).all()
    assert (unfolded["generation_logprobs"][mask] < 0).all()
    per_token = train.copy()
    per_token["advantages"] = torch.ones_like(rows["token_mask"])
    with pytest.raises(RolloutError, match="'advantages' has a value per token"):
        unfold_branches(per_token)
    # Without branches nothing changes.
    plain = train.select_indices([1])
    assert unfold_branches(plain)["input_ids"].tolist() == [
        rows["input_ids"][1].tolist()
    ]
    assert unfold_branches(unfolded) is unfolded


def test_a_branch_without_room_ends_as_truncated():
    result, tokenizer, _ = play(
        STRIPPING,
        says=[["<ccccc>d$"]],
        on_rewrite="branch",
        max_total_sequence_length=16,
        environment=scripted.Judge(lambda log, info: (1.0, False, "bc" * 6)),
    )
    assert result.rows["branches"] == [()]
    assert result.rows["outcome"].tolist() == [Outcome.TRUNCATED]
    assert scripted.row_texts(tokenizer, result.rows) == ["|u:a|a:<ccccc>d<eos>"]


TOOLS = TEMPLATE.replace(
    "{% for m in messages %}",
    "{% if tools %}|{% for t in tools %}{{ t['function']['name'] }}{% endfor %}"
    "{% endif %}{% for m in messages %}",
    1,
)


class Calling(scripted.Judge):
    def tool_schemas(self):
        return [{"type": "function", "function": {"name": "abc"}}]


def test_prompts_and_turns_tell_of_the_tools(caplog):
    said = [{"role": "tool", "content": "0"}, {"role": "tool", "content": "1"}]

    def judge(log, info):
        return 1.0, log[-1]["content"] == "h", said

    result, tokenizer, generator = play(
        TOOLS, says=[["d$"], ["h$"]], environment=Calling(judge)
    )
    assert scripted.row_texts(tokenizer, result.rows) == [
        "|abc|u:a|a:d<eos>|t:0|t:1|a:h<eos>"
    ]
    assert [m["role"] for m in result.message_logs[0]] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert generator.calls[0]["input_lengths"].tolist() == [len("|abc|u:a|a:") - 2]
    assert not caplog.records
    play(TEMPLATE, says=[["h$"]], environment=Calling(judge))
    assert "chat template does not show tools" in caplog.text


def test_a_plain_prompt_is_left_as_it_is():
    environment = Calling(lambda log, info: (1.0, False, "b"))
    result, tokenizer, _ = play(
        None, says=[["d$"], ["h$"]], environment=environment, max_turns=2
    )
    assert scripted.row_texts(tokenizer, result.rows) == ["ad<eos>bh<eos>"]
    assert isinstance(environment, EnvironmentInterface)
