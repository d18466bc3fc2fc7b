"""Agents calling a run's endpoint, with the real client and rule-based tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
import torch

from rl_algorithms.errors import RolloutError
from rl_algorithms.rollout import Outcome, unfold_branches
from rl_algorithms.rollout.agents.policy_server import PolicyServer
from rl_algorithms.rollout.agents.session import AgentSession, Asked
from rl_distributed.errors import WorkerDiedError
from rl_envs import AgentEnvironment, AgentReward, conversation
from rl_envs.bridges.textarena import TextArenaSelfPlay, TextArenaTasks
from rl_envs.errors import AgentError, AgentSetupError, EnvironmentContractError

_spec = importlib.util.spec_from_file_location(
    "agent_rollouts", Path(__file__).with_name("agent_rollouts.py")
)
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)
scripted = made.scripted

DEADLINE_S = 30.0
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "sum",
        "parameters": {"type": "object", "properties": {}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return made.overlapping_tokenizer()


def say_in_turn(*texts):
    """Emit one text per generator call; the last one repeats."""
    return lambda call, row: texts[min(call, len(texts) - 1)]


class Played:
    """The outcomes of agents."""

    def __init__(
        self,
        tokenizer,
        agent,
        say,
        *,
        prompts=("ab",),
        copies=1,
        columns=None,
        **options,
    ):
        engine, self.generation = made.engine_of(tokenizer, agent, say, **options)
        self.tokenizer = tokenizer
        try:
            batch = scripted.make_batch(
                tokenizer,
                list(prompts),
                answer=[str(n) for n in range(len(prompts))],
                **(columns or {}),
            )
            self.result = engine.run(batch, num_generations=copies)
        finally:
            engine.close()
        self.rows = self.result.rows

    @property
    def outcomes(self):
        return [Outcome(value) for value in self.rows["outcome"].tolist()]

    def texts(self, row=0):
        """Return each part of a row as text, with trained parts in brackets."""
        found = []
        for tokens, mask in made.parts_of(self.rows, row):
            text, inside = "", 0.0
            for token, is_sampled in zip(tokens, mask, strict=True):
                if is_sampled != inside:
                    text += "[" if is_sampled else "]"
                    inside = is_sampled
                text += self.tokenizer.decode([token])
            found.append(text + ("]" if inside else ""))
        return found


def ask(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


def said(answer):
    return answer.choices[0].message.model_dump(exclude_none=True)


def user(text):
    return {"role": "user", "content": text}


class TestTokens:
    def test_turns_reuse_what_was_sampled(self, tokenizer):
        """`abc` is sampled as a, bc; tokenized as text it would be one token."""
        spelled = [tokenizer.convert_tokens_to_ids(t) for t in ("a", "bc")]

        class Say:
            @staticmethod
            def sample(call, row, seed):
                return [*spelled, scripted.EOS]

        async def agent(task, client):
            messages = [user(task.prompt)]
            for _ in range(3):
                answer = await ask(client, messages)
                assert answer.choices[0].message.content == "abc"
                # As clients do: with empty fields, and whitespace trimmed.
                messages += [answer.choices[0].message.model_dump(), user("go")]
            return 1.0

        played = Played(tokenizer, agent, Say, versions=lambda call: [0, call + 4, 9])
        assert played.texts() == [
            "|u:ab|a:[abc<eos>]|u:go|a:[abc<eos>]|u:go|a:[abc<eos>]"
        ]
        assert played.outcomes == [Outcome.OK]
        rows = played.rows
        mask = rows["token_mask"][0] != 0
        assert rows["input_ids"][0][mask].tolist() == [*spelled, scripted.EOS] * 3
        # Each turn has the weights that sampled it, and their log-probs.
        versions = [0, 4, 9, 0, 5, 9, 0, 6, 9]
        assert rows["token_versions"][0][mask].tolist() == versions
        assert rows["token_versions"][0][~mask].unique().tolist() == [-1]
        assert int(rows["weight_version"][0]) == 0
        expected = -(rows["input_ids"][0][mask] + 1.0) / 64
        torch.testing.assert_close(rows["generation_logprobs"][0][mask], expected)
        assert int(rows["num_turns"][0]) == 3
        assert played.result.num_prompt_messages == [1]
        # The generator was given exactly these tokens before each turn.
        calls = played.generation.calls
        for call, start in zip(calls, mask.nonzero().flatten()[::3], strict=True):
            prompt = call["input_ids"][0, : int(call["input_lengths"][0])]
            assert prompt.tolist() == rows["input_ids"][0, : int(start)].tolist()

    def test_a_rewritten_history_is_a_row_of_its_own(self, tokenizer):
        async def agent(task, client):
            first = await ask(client, [user("a")])
            await ask(client, [user("a"), said(first), user("b")])
            # A summary replaces the history.
            await ask(client, [user("sum"), user("c")])
            return 1.0

        played = Played(tokenizer, agent, say_in_turn("x$", "y$", "z$"))
        assert played.texts() == [
            "|u:a|a:[x<eos>]|u:b|a:[y<eos>]",
            "|u:sum|u:c|a:[z<eos>]",
        ]
        rows = unfold_branches(played.rows)
        assert rows["rewards"].tolist() == [1.0, 1.0]
        assert rows["conversation_index"].tolist() == [0, 0]

    def test_a_template_that_forgets_is_a_row_of_its_own(self):
        tokenizer = made.overlapping_tokenizer(made.FORGETFUL)

        async def agent(task, client):
            first = await ask(client, [user("a")])
            await ask(client, [user("a"), said(first), user("b")])
            return 1.0

        played = Played(tokenizer, agent, say_in_turn("th>x$", "y$"))
        assert played.texts() == [
            "|u:a|a:[th>x<eos>]",
            "|u:a|a:x<eos>|u:b|a:[y<eos>]",
        ]

    def test_several_answers_share_their_beginning_once(self, tokenizer):
        async def agent(task, client):
            first = await ask(client, [user("a")])
            history = [user("a"), said(first), user("b")]
            second = await ask(client, history, n=2)
            assert [c.message.content for c in second.choices] == ["y", "z"]
            chosen = second.choices[1].message.model_dump(exclude_none=True)
            await ask(client, [*history, chosen, user("c")])
            return 2.0

        replies = iter(["x$", "y$", "z$", "w$"])
        played = Played(tokenizer, agent, lambda call, row: next(replies))
        assert played.texts() == [
            "|u:a|a:x<eos>|u:b|a:[y<eos>]",
            "|u:a|a:[x<eos>]|u:b|a:[z<eos>]|u:c|a:[w<eos>]",
        ]
        # Shared tokens have no version or log-prob where they are not trained on.
        part = played.rows["branches"][0][0]
        assert (part.token_versions >= 0).tolist() == (part.token_mask != 0).tolist()
        assert not part.generation_logprobs[part.token_mask == 0].any()
        assert int(played.rows["generation_lengths"][0]) == 8

    def test_rows_of_a_group_have_seeds_of_their_own(self, tokenizer):
        async def agent(task, client):
            await asyncio.gather(*(ask(client, [user(c)]) for c in "ab"))
            return float(task["answer"])

        played = Played(
            tokenizer, agent, lambda c, r: "x$", prompts=["a", "b"], copies=2
        )
        seeds = [s for call in played.generation.calls for s in call["seeds"].tolist()]
        assert len(seeds) == len(set(seeds)) == 8
        assert played.rows["group_index"].tolist() == [0, 0, 1, 1]
        assert played.rows["rewards"].tolist() == [0.0, 0.0, 1.0, 1.0]

    def test_without_a_template_texts_follow_each_other(self):
        tokenizer = made.overlapping_tokenizer(None)

        async def agent(task, client):
            answer = await ask(client, [user("a=")])
            await ask(client, [user("a="), said(answer), user("b=")])
            return 1.0

        played = Played(tokenizer, agent, say_in_turn("x$", "y$"))
        assert played.texts() == ["a=[x<eos>]b=[y<eos>]"]


class TestConversations:
    @pytest.mark.parametrize("name", ["critic", "Prüfer: 50 %", "審判\n%41"])
    def test_sub_agents_share_the_reward_or_have_their_own(self, tokenizer, name):
        async def agent(task, client):
            critic = conversation(client, name)
            await ask(client, [user("a")])
            await ask(critic, [user("a")])
            await ask(critic, [user("b")])
            await ask(conversation(client, "helper"), [user("a")])
            return AgentReward(1.0, {"style": 0.5}, {name: float(task["answer"])})

        replies = ["m$", "c$", "d$", "h$"]
        played = Played(
            tokenizer,
            agent,
            lambda call, row: replies[call % 4],
            prompts=["a", "b"],
            limits={"max_at_once": 1},
        )
        rows = unfold_branches(played.rows)
        texts = [
            tokenizer.decode(ids[mask != 0].tolist())
            for ids, mask in zip(rows["input_ids"], rows["token_mask"], strict=True)
        ]
        found = {
            (text, int(group)): (float(reward), int(talk))
            for text, group, reward, talk in zip(
                texts,
                rows["group_index"],
                rows["rewards"],
                rows["conversation_index"],
                strict=True,
            )
        }
        assert len(found) == 8
        # The helper names no reward of its own, so it gets the task's.
        for task in (0, 1):
            assert found["h<eos>", task] == found["m<eos>", task] == (1.0, task)
        # Critics are compared only with critics of the same prompt, and both answers of
        # one critic get one reward.
        own = {key: value for key, value in found.items() if key[0] in "c<eos>d<eos>"}
        assert sorted(reward for reward, _ in own.values()) == [0.0, 0.0, 1.0, 1.0]
        assert {group for _, group in own} == {2, 3}
        assert {talk for _, talk in own.values()} == {2, 3}
        parts = rows["reward/style"]
        assert parts.isfinite().sum() == 4
        assert parts[parts.isfinite()].unique() == 0.5

    @pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
    def test_a_name_may_have_any_letters(self, tokenizer, encoding):
        # Clients differ in how they write a header.
        name = {"X-RL-Conversation": "Prüfer".encode(encoding)}

        async def agent(task, base_url, api_key):
            url, keys = f"{base_url}/chat/completions", f"Bearer {api_key}"
            async with httpx.AsyncClient(trust_env=False) as client:
                for text, headers in (("a", name), ("b", {})):
                    answer = await client.post(
                        url,
                        json={"model": "policy", "messages": [user(text)]},
                        headers={"Authorization": keys, **headers},
                    )
                    assert answer.status_code == 200, answer.text
            return AgentReward(1.0, conversations={"Prüfer": 0.5})

        played = Played(tokenizer, agent, lambda call, row: "x$")
        assert played.outcomes == [Outcome.OK], played.result.samples
        [[other]] = played.rows["branches"]
        assert (other.name, other.reward) == ("Prüfer", 0.5)

    def test_tasks_are_bounded_and_the_rest_wait(self, tokenizer):
        running, most = 0, 0

        async def agent(task, client):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await ask(client, [user("a")])
            running -= 1
            return 1.0

        played = Played(
            tokenizer,
            agent,
            lambda call, row: "x$",
            copies=12,
            limits={"max_at_once": 3},
        )
        assert played.outcomes == [Outcome.OK] * 12
        assert 1 < most <= 3

    def test_requests_that_wait_together_are_one_call(self, tokenizer):
        started = threading.Barrier(9)

        def agent(task, base_url, api_key):
            client = openai.OpenAI(base_url=base_url, api_key=api_key)
            started.wait(DEADLINE_S)
            ask(client, [user("a")])
            client.close()
            return 1.0

        hold = threading.Event()

        def say(call, row):
            if call == 0:
                hold.wait(DEADLINE_S)
            return "x$"

        def release():
            started.wait(DEADLINE_S)
            # Until the other eight requests queue behind the first.
            hold.wait(1.0)
            hold.set()

        thread = threading.Thread(target=release)
        thread.start()
        played = Played(tokenizer, agent, say, copies=8)
        thread.join(DEADLINE_S)
        assert len(played.generation.calls) < 8
        assert sum(call.size for call in played.generation.calls) == 8


class TestInterface:
    def test_tools_are_shown_called_and_answered(self, tokenizer):
        async def agent(task, client):
            history = [user("a")]
            first = await ask(client, history, tools=[TOOL])
            choice = first.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "so"
            (call,) = choice.message.tool_calls
            assert call.function.name == "add"
            assert json.loads(call.function.arguments) == {"a": 1}
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            history += [said(first), result]
            second = await ask(client, history, tools=[TOOL], tool_choice="auto")
            assert second.choices[0].message.content == "3"
            return 1.0

        played = Played(tokenizer, agent, say_in_turn(f"so{CALL}$", "3$"))
        (text,) = played.texts()
        assert text.startswith('[[{"type": "function"')
        assert text.endswith(f"|u:a|a:[so{CALL}<eos>]|t:3|a:[3<eos>]")

    def test_a_forced_tool_is_begun_for_the_policy(self, tokenizer):
        begun = '<tool_call>\n{"name": "add", "arguments": '

        async def agent(task, client):
            answer = await ask(
                client,
                [user("a")],
                tools=[TOOL],
                tool_choice={"type": "function", "function": {"name": "add"}},
            )
            (call,) = answer.choices[0].message.tool_calls
            assert json.loads(call.function.arguments) == {"b": 2}
            last = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            second = await ask(client, [user("a"), said(answer), last], tools=[TOOL])
            assert second.choices[0].message.tool_calls is None
            return 1.0

        played = Played(
            tokenizer, agent, say_in_turn('{"b": 2}}\n</tool_call>$', "ok$")
        )
        (text,) = played.texts()
        # Only completions by the policy are trained on.
        assert f'|a:{begun}[{{"b": 2}}}}\n</tool_call><eos>]|t:2|a:[ok<eos>]' in text

    def test_streams(self, tokenizer):
        async def agent(task, client):
            stream = await ask(
                client,
                [user("a")],
                tools=[TOOL],
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            calls = [
                call
                for chunk in chunks
                for choice in chunk.choices
                for call in choice.delta.tool_calls or ()
            ]
            assert [(c.index, c.function.name) for c in calls] == [(0, "add")]
            assert chunks[-1].usage.completion_tokens > 5
            text = await ask(client, [user("b")], stream=True)
            pieces = [c.choices[0].delta.content or "" async for c in text]
            assert "".join(pieces) == "ok"
            return 1.0

        played = Played(tokenizer, agent, say_in_turn(f"{CALL}$", "ok$"))
        assert played.outcomes == [Outcome.OK]
        assert len(played.texts()) == 2

    def test_the_run_decides_how_is_sampled(self, tokenizer):
        async def agent(task, client):
            await ask(client, [user("a")], temperature=0.1, top_p=0.2, seed=3)
            answer = await ask(client, [user("b")], stop=["b"], logprobs=True)
            assert answer.choices[0].message.content == "a"
            content = answer.choices[0].logprobs.content
            assert [part.token for part in content] == ["abc", "<eos>"]
            return 1.0

        played = Played(tokenizer, agent, lambda call, row: "abc$")
        first, second = played.generation.calls
        assert "stop_strings" not in first
        assert second["stop_strings"] == [["b"]]
        assert first["seeds"].tolist() != second["seeds"].tolist()

    @pytest.mark.parametrize(
        ("options", "status", "code"),
        [
            ({"model": "gpt-4o"}, 404, "model_not_found"),
            ({"messages": []}, 400, "bad_request"),
            ({"messages": [{"role": "robot", "content": "a"}]}, 400, "bad_request"),
            ({"messages": [user("b" * 99)]}, 400, "context_length_exceeded"),
            ({"n": 0}, 400, "bad_request"),
            ({"logit_bias": {"5": 1}}, 400, "not_supported"),
            ({"response_format": {"type": "json_object"}}, 400, "not_supported"),
            ({"tool_choice": "required"}, 400, "bad_request"),
            ({"tools": [{"type": "retrieval"}]}, 400, "bad_request"),
            # In place of the messages, which the client would not send like that.
            (
                {"extra_body": {"messages": [{"role": "assistant", "tool_calls": 5}]}},
                400,
                "bad_request",
            ),
        ],
    )
    def test_a_wrong_request_is_refused(self, tokenizer, options, status, code):
        async def agent(task, client):
            fields = {"model": "policy", "messages": [user("a")], **options}
            with pytest.raises(openai.APIStatusError) as raised:
                await client.chat.completions.create(**fields)
            assert raised.value.status_code == status
            assert raised.value.code == code
            await ask(client, [user("a")])
            return 1.0

        played = Played(
            tokenizer, agent, lambda c, r: "x$", max_total_sequence_length=60
        )
        assert played.outcomes == [Outcome.OK], played.result.samples
        assert played.texts() == ["|u:a|a:[x<eos>]"]

    def test_keys_and_hosts_are_checked(self, tokenizer):
        keys = []

        def agent(task, base_url, api_key):
            keys.append(api_key)
            body = {"model": "policy", "messages": [user("a")]}
            bearer = {"Authorization": f"Bearer {api_key}"}

            def post(path="/chat/completions", headers=bearer, **options):
                given = {"json": body, **options}
                return httpx.post(base_url + path, headers=headers, **given)

            assert post(headers={}).status_code == 401
            assert post(headers={"Authorization": "Bearer x"}).status_code == 401
            spoofed = {**bearer, "Host": "evil.example"}
            assert post(headers=spoofed).status_code == 403
            assert post("/responses").json()["error"]["code"] == "not_found"
            large = {"content": b"{" + b" " * (17 << 20)}
            typed = {**bearer, "Content-Type": "application/json"}
            assert post(headers=typed, json=None, **large).status_code == 413
            assert post(json=[1]).json()["error"]["code"] == "bad_json"
            models = httpx.get(base_url + "/models", headers=bearer).json()
            assert [model["id"] for model in models["data"]] == ["policy"]
            assert base_url.startswith("http://127.0.0.1:")
            if len(keys) == 2:
                # The first task has ended, as they arrive one by one.
                old = {"Authorization": f"Bearer {keys[0]}"}
                late = post(headers=old)
                assert late.status_code == 410
                assert late.json()["error"]["code"] == "task_ended"
            assert post().status_code == 200
            return 1.0

        played = Played(
            tokenizer, agent, lambda c, r: "x$", copies=2, limits={"max_at_once": 1}
        )
        assert played.outcomes == [Outcome.OK] * 2, played.result.samples
        assert len(set(keys)) == 2

    def test_a_user_without_a_home_folder_serves_agents_too(
        self, tokenizer, monkeypatch
    ):
        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("RL_KEYS_FILE", raising=False)
        monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)

        def agent(task, base_url, api_key):
            url = base_url.removesuffix("/v1") + "/metrics"
            for key in (api_key, "rlk_" + "0" * 12 + "_" + "x" * 43):
                bearer = {"Authorization": f"Bearer {key}"}
                assert httpx.get(url, headers=bearer).status_code == 401
            client = openai.OpenAI(base_url=base_url, api_key=api_key)
            ask(client, [user("a")])
            return 1.0

        played = Played(tokenizer, agent, lambda c, r: "x$")
        assert played.outcomes == [Outcome.OK], played.result.samples

    def test_a_retry_takes_over_the_answer_of_a_request_that_was_cut_off(
        self, tokenizer
    ):
        """The client disconnects before the answer and sends the same request again."""
        asked, answer_now = threading.Event(), threading.Event()

        def say(call, row):
            asked.set()
            answer_now.wait(DEADLINE_S)
            return f"x{call}$"

        def agent(task, base_url, api_key):
            fields = {"model": "policy", "messages": [user("a")]}
            bearer = {"Authorization": f"Bearer {api_key}"}
            body = json.dumps(fields, separators=(",", ":"))
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Authorization: Bearer {api_key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            port = int(base_url.split(":")[2].split("/")[0])
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall((head + body).encode())
                assert asked.wait(DEADLINE_S)
            answer_now.set()
            # Whether or not the server has noticed: the request is marked as a retry.
            again = {**bearer, "X-Stainless-Retry-Count": "1"}
            url = f"{base_url}/chat/completions"
            typed = {"Content-Type": "application/json"}
            retry = httpx.post(url, headers={**again, **typed}, content=body)
            assert retry.json()["choices"][0]["message"]["content"] == "x0"
            # With an idempotency key, the answer never changes.
            named = {**bearer, **typed, "Idempotency-Key": "k"}
            both = [
                httpx.post(url, headers=named, content=body).json() for _ in range(2)
            ]
            assert both[0]["id"] == both[1]["id"]
            # Without any of this it is a new request.
            other = httpx.post(url, headers={**bearer, **typed}, content=body)
            assert other.json()["choices"][0]["message"]["content"] == "x2"
            return 1.0

        played = Played(tokenizer, agent, say)
        assert played.outcomes == [Outcome.OK], played.result.samples
        assert len(played.generation.calls) == 3
        assert sorted(played.texts()) == [f"|u:a|a:[x{n}<eos>]" for n in range(3)]

    def test_a_client_that_leaves_beside_its_retry_takes_nothing_from_it(
        self, tokenizer, monkeypatch
    ):
        """The server notices that the first request is gone after the retry arrived."""
        gone, answer_now = threading.Event(), threading.Event()
        arrived = threading.Semaphore(0)

        def ask_counted(session, *request):
            asked = ask_session(session, *request)
            arrived.release()
            return asked

        async def chat_watched(server, request):
            try:
                return await chat(server, request)
            except asyncio.CancelledError:
                gone.set()
                raise

        ask_session, chat = AgentSession.ask, PolicyServer._chat
        monkeypatch.setattr(AgentSession, "ask", ask_counted)
        monkeypatch.setattr(PolicyServer, "_chat", chat_watched)

        def say(call, row):
            assert answer_now.wait(DEADLINE_S)
            return f"x{call}$"

        def agent(task, base_url, api_key):
            body = json.dumps({"model": "policy", "messages": [user("a")]}).encode()
            typed = {
                "Authorization": f"Bearer {api_key}",
                "Content-Type": "application/json",
            }
            port = int(base_url.split(":")[2].split("/")[0])
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n" + (
                "".join(f"{name}: {value}\r\n" for name, value in typed.items())
                + f"Content-Length: {len(body)}\r\n\r\n"
            )

            def post(**headers):
                found = httpx.post(
                    f"{base_url}/chat/completions",
                    headers={**typed, **headers},
                    content=body,
                    timeout=DEADLINE_S,
                ).json()
                return found["choices"][0]["message"]["content"]

            with ThreadPoolExecutor(1) as pool:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    connection.sendall(head.encode() + body)
                    assert arrived.acquire(timeout=DEADLINE_S)
                    retry = pool.submit(post, **{"X-Stainless-Retry-Count": "1"})
                    assert arrived.acquire(timeout=DEADLINE_S)
                assert gone.wait(DEADLINE_S)
                answer_now.set()
                assert retry.result(DEADLINE_S) == "x0"
            # Unmarked and with another answer given: it is no retry.
            assert post() == "x1"
            return 1.0

        played = Played(tokenizer, agent, say)
        assert played.outcomes == [Outcome.OK], played.result.samples
        assert sorted(played.texts()) == [f"|u:a|a:[x{n}<eos>]" for n in range(2)]

    def test_an_answer_stays_given_while_one_of_its_clients_has_it(self):
        answer = SimpleNamespace(is_given=True)
        asked = Asked(b"", None, None, [answer])
        asked.join()
        asked.join()
        asked.leave()
        assert answer.is_given
        asked.leave()
        assert not answer.is_given

    def test_what_the_agent_never_got_is_not_trained_on(self, tokenizer):
        asked = threading.Event()
        left = threading.Event()

        def say(call, row):
            asked.set()
            if call == 0:
                left.wait(DEADLINE_S)
            return f"x{call}$"

        async def agent(task, client):
            impatient = client.with_options(max_retries=0, timeout=0.3)
            with pytest.raises(openai.APITimeoutError):
                await ask(impatient, [user("a")])
            left.set()
            await ask(client, [user("b")])
            return 1.0

        played = Played(tokenizer, agent, say)
        assert played.texts() == ["|u:b|a:[x1<eos>]"]
        assert int(played.rows["num_turns"][0]) == 1


class TestFrameworks:
    def test_an_agent_of_pydantic_ai(self, tokenizer):
        """Its own loop calls the tool and sends the history back in its own format."""
        from pydantic_ai import Agent  # noqa: PLC0415 - seconds, for one test
        from pydantic_ai.models.openai import OpenAIChatModel  # noqa: PLC0415
        from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415

        called = []

        async def agent(task, client):
            provider = OpenAIProvider(openai_client=client)
            model = OpenAIChatModel(task.model, provider=provider)
            helper = Agent(model, system_prompt="be brief")

            @helper.tool_plain
            def add(a: int) -> str:
                called.append(a)
                return f"sum {a + 2}"

            first = await helper.run("a")
            more = await helper.run("b", message_history=first.all_messages())
            async with helper.run_stream(
                "c", message_history=more.all_messages()
            ) as stream:
                assert await stream.get_output() == "last"
            return float(first.output == "3")

        played = Played(tokenizer, agent, say_in_turn(f"{CALL}$", "3$", "4$", "last$"))
        assert played.outcomes == [Outcome.OK], played.result.samples
        assert called == [1]
        assert played.rows["rewards"].tolist() == [1.0]
        # One row: everything that it sent back was recognized.
        (text,) = played.texts()
        assert text.endswith(
            f"|s:be brief|u:a|a:[{CALL}<eos>]|t:sum 3|a:[3<eos>]|u:b|a:[4<eos>]"
            "|u:c|a:[last<eos>]"
        )


class TestEndings:
    def test_an_exception_is_no_reward_of_zero(self, tokenizer):
        async def agent(task, client):
            await ask(client, [user("a")])
            if task["answer"] == "1":
                raise KeyError("my mistake")
            return 0.5

        played = Played(tokenizer, agent, lambda c, r: "x$", prompts=["a", "b", "c"])
        assert played.outcomes == [
            Outcome.OK,
            Outcome.ENVIRONMENT_ERROR,
            Outcome.OK,
        ]
        assert played.rows["sample_mask"].tolist() == [1.0, 0.0, 1.0]
        assert played.rows["rewards"].tolist() == [0.5, 0.0, 0.5]

    def test_the_error_names_the_place_in_the_agent(self, tokenizer):
        async def agent(task, client):
            raise KeyError("my mistake")

        with pytest.raises(AgentError, match=r"(?s)KeyError: 'my mistake'.*in agent"):
            Played(tokenizer, agent, lambda c, r: "x$", on_environment_error="raise")

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (None, "must be a number: got NoneType"),
            ("1", "must be a number: got str"),
            (float("nan"), "must be a finite number"),
            ({"a": None}, "agent's a must be a number"),
        ],
    )
    def test_a_reward_that_is_none_is_an_error(self, tokenizer, value, said):
        async def agent(task, client):
            await ask(client, [user("a")])
            return value

        with pytest.raises(AgentError, match=said):
            Played(tokenizer, agent, lambda c, r: "x$", on_environment_error="raise")

    def test_a_task_without_an_answer_has_no_weights(self, tokenizer):
        async def agent(task, client):
            if task["answer"] == "0":
                raise ValueError("no request")
            await ask(client, [user("a")])
            return 1.0

        engine, generation = made.engine_of(
            tokenizer, agent, lambda call, row: "x$", versions=lambda call: 7
        )
        generation.weight_version = 7
        try:
            batch = scripted.make_batch(tokenizer, ["ab", "cd"], answer=["0", "1"])
            metrics = engine.run(batch).metrics
        finally:
            engine.close()
        assert float(metrics["weight_version_min"]) == 7.0
        assert float(metrics["weight_version_max"]) == 7.0

    def test_an_agent_that_never_asks_is_an_error(self, tokenizer):
        async def agent(task, client):
            return 1.0

        with pytest.raises(AgentError, match="made no request"):
            Played(tokenizer, agent, lambda c, r: "x$", on_environment_error="raise")
        with pytest.raises(RolloutError, match="1 environment error"):
            Played(tokenizer, agent, lambda c, r: "x$")

    @pytest.mark.parametrize("reward", [None, -1.0])
    @pytest.mark.parametrize("limit", ["time", "calls", "length"])
    def test_limits(self, tokenizer, reward, limit):
        async def agent(task, client):
            messages = [user("a")]
            if task["answer"] == "1":
                await ask(client, messages)
                return 1.0
            while True:
                answer = await ask(client, messages)
                if limit == "time":
                    await asyncio.sleep(DEADLINE_S)
                messages += [said(answer), user("b")]

        played = Played(
            tokenizer,
            agent,
            lambda c, r: "x$",
            prompts=["a", "b"],
            max_total_sequence_length=40 if limit == "length" else None,
            limits={
                "time_limit_s": 0.5 if limit == "time" else DEADLINE_S,
                "max_calls": 3 if limit == "calls" else 100,
                "limit_reward": reward,
            },
        )
        if reward is None:
            assert played.outcomes == [Outcome.ENVIRONMENT_ERROR, Outcome.OK]
        else:
            assert played.outcomes == [Outcome.TRUNCATED, Outcome.OK]
            assert played.rows["rewards"].tolist() == [-1.0, 1.0]
            endings = {"time": "out_of_time", "calls": "out_of_turns"}
            ended = endings.get(limit, "out_of_tokens")
            assert played.rows["ending"] == [ended, "finished"]

    @pytest.mark.parametrize(
        ("limits", "ending", "num_tokens"),
        [
            ({"turns": 2}, "out_of_turns", 4),
            ({"tokens": 4}, "out_of_tokens", 4),
            ({"seconds": 0.3}, "out_of_time", 2),
        ],
    )
    def test_limits_of_one_task(self, tokenizer, limits, ending, num_tokens):
        async def agent(task, client):
            messages = [user("a")]
            while True:
                answer = await ask(client, messages)
                if task["task_limits"] is None:
                    return 1.0
                if "seconds" in limits:
                    await asyncio.sleep(DEADLINE_S)
                messages += [said(answer), user("b")]

        played = Played(
            tokenizer,
            agent,
            lambda c, r: "x$",
            prompts=["a", "b"],
            columns={"task_limits": [limits, None]},
            limits={"limit_reward": -1.0, "time_limit_s": DEADLINE_S},
        )
        assert played.rows["ending"] == [ending, "finished"]
        assert played.rows["generation_lengths"].tolist() == [num_tokens, 2]

    def test_a_lost_generator_is_no_mistake_of_the_agent(self, tokenizer):
        def say(call, row):
            raise WorkerDiedError("the replica has gone")

        async def agent(task, client):
            await ask(client.with_options(max_retries=0), [user("a")])
            return 1.0

        with pytest.raises(WorkerDiedError, match="replica has gone"):
            Played(tokenizer, agent, say, on_environment_error="raise")

    def test_what_the_generator_raises_ends_the_run(self, tokenizer):
        def say(call, row):
            raise RuntimeError("a defect")

        async def agent(task, client):
            await ask(client, [user("a")])
            return 1.0

        with pytest.raises(RuntimeError, match="a defect"):
            Played(tokenizer, agent, say)

    def test_failed_tasks_are_played_again(self, tokenizer):
        tries = []

        async def agent(task, client):
            tries.append(task["answer"])
            await ask(client, [user("a")])
            if len(tries) == 1:
                raise ValueError("once")
            return 1.0

        played = Played(tokenizer, agent, lambda c, r: "x$", retry={"max_attempts": 2})
        assert played.outcomes == [Outcome.OK]
        assert len(tries) == 2
        seeds = [call["seeds"][0].item() for call in played.generation.calls]
        assert seeds[0] != seeds[1]


def test_no_thread_is_left(tokenizer):
    async def agent(task, client):
        await ask(client, [user("a")])
        return 1.0

    before = set(threading.enumerate())
    Played(tokenizer, agent, lambda c, r: "x$")
    names = {thread.name for thread in set(threading.enumerate()) - before}
    # The environment's own loop ends with `shutdown`, which its creator calls.
    assert names <= {"agents", "asyncio_0"}


class TestSetup:
    @pytest.mark.parametrize(
        "agent", [lambda task: 1.0, lambda task, key: 1.0, lambda task, client, x: 1.0]
    )
    def test_parameters_that_cannot_be_filled(self, agent):
        with pytest.raises(AgentSetupError, match=r"\(task, client\)"):
            AgentEnvironment(agent)

    def test_it_judges_no_answers(self):
        environment = AgentEnvironment(lambda task, client: 1.0)
        with pytest.raises(EnvironmentContractError, match="does not judge answers"):
            environment.step([[user("a")]], [{}])
        assert environment.step([], []).metadata == []

    def test_an_address_out_of_reach(self):
        from rl_envs.agents.tasks import AgentJob  # noqa: PLC0415

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
            job = AgentJob(0, [user("a")], {}, url, "key")
            environment = AgentEnvironment(lambda task, client: 1.0)
            with pytest.raises(AgentSetupError, match="on the driver's node"):
                environment.poll_agents([job], [], 0.0)
            environment.shutdown()


class TestSelfPlay:
    def test_both_players_are_trained_on_with_their_own_rewards(self, tokenizer):
        """Nim with one match in each of two piles: the second to move wins."""
        [row] = TextArenaTasks("Nim-v0", settings={"piles": [1, 1]}).train(1)
        prompt = row.pop("prompt")
        row = {name: [value] for name, value in row.items()}
        played = Played(
            tokenizer,
            TextArenaSelfPlay(),
            say_in_turn("[0 1]$", "[1 1]$"),
            prompts=[prompt],
            columns={name: row[name] for name in row if name.startswith("ta_")},
        )
        assert played.outcomes == [Outcome.OK]
        other, mine = played.texts()
        assert mine.startswith("|u:Welcome to Nim, Player 0!")
        assert mine.endswith("|a:[[0 1]<eos>]")
        assert other.startswith("|u:Welcome to Nim, Player 1!")
        assert "[Player 0] [0 1]" in other
        assert other.endswith("|a:[[1 1]<eos>]")
        rows = unfold_branches(played.rows)
        assert rows["rewards"].tolist() == [-1.0, 1.0]
        # Separate conversations, each compared with those of the same player.
        assert rows["conversation_index"].tolist() == [0, 1]
