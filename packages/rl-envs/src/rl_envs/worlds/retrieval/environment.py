"""The retrieval environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import Field

from rl_distributed.config import Config
from rl_envs.errors import MessageLogError
from rl_envs.interfaces import EnvironmentReturn, MessageLog
from rl_envs.registry import register_env
from rl_envs.tools.calls import JsonToolCallParser, ToolCall, ToolCallParser
from rl_envs.tools.environment import ToolEnvironment, ToolLimits
from rl_envs.tools.functions import Tool
from rl_envs.worlds.retrieval.answer_matching import exact_match, f1_score
from rl_envs.worlds.retrieval.corpus import read_corpus
from rl_envs.worlds.retrieval.index import Bm25Index
from rl_envs.worlds.retrieval.tasks import made_corpus
from rl_envs.worlds.verdict import Given, Verdict, VerdictEnvironment, last_tagged

__all__ = ["RetrievalConfig", "RetrievalEnvironment"]

Columns: TypeAlias = Mapping[str, Any]

_SEARCH = re.compile(r"<search>(.*?)(?:</search>|\Z)", re.DOTALL)
_FOUND, _EVIDENCE = "found", "evidence"
_ANSWERS = ("answers", "golden_answers", "answer")
# A search takes milliseconds; a call that takes this long is a defect.
_CALL_DEADLINE_S = 60.0


class RetrievalConfig(Config):
    """Settings of the retrieval environment."""

    corpus: str | list[dict[str, Any]] | None = None
    """Documents to search: a folder, a JSON Lines file, or rows; see `read_corpus`.
    null: the invented facts that the task source of this world asks about."""
    corpus_seed: int = 0
    """Without `corpus`: seed of the invented facts, as in the settings of the tasks."""
    num_people: int = Field(default=50, ge=4)
    """Without `corpus`: number of people in the invented facts, as in the settings of
    the tasks."""
    num_results: int = Field(default=3, ge=1)
    """Maximum number of documents that a search returns."""
    max_document_chars: int = Field(default=600, ge=1)
    """Length, in characters, beyond which a document is cut off."""
    max_turns: int | None = Field(default=4, ge=1)
    """Maximum number of turns with searches, after which a response is scored
    regardless. null: only the limit on turns applies."""
    call_format: Literal["tags", "json"] = "tags"
    """How to search. `tags`: `<search>words</search>`. `json`: a tool call,
    `<tool_call>{"name": "search", "arguments": {"query": "words"}}</tool_call>`."""
    credit: Literal["exact", "f1"] = "exact"
    """Scoring of the answer. `exact`: reward 1 if it equals an answer of the row after
    normalisation, else 0. `f1`: F1 of its words with those of the best answer."""


@dataclass(frozen=True, slots=True)
class _SearchTagParser:
    """Reads the first `<search>`; further ones are ignored, as their result would be.

    The tag may lack its end, because generation may stop there.
    """

    def __call__(self, response: str) -> list[ToolCall]:
        queries = _SEARCH.findall(response)
        return [ToolCall("search", {"query": queries[0].strip()})] if queries else []


class _AnswerJudge(VerdictEnvironment[tuple[str, ...]]):
    """Compares the final answer with those of the row."""

    def __init__(self, credit: str) -> None:
        self._score = exact_match if credit == "exact" else f1_score

    def read_row(self, columns: Columns, row: int) -> tuple[str, ...]:
        given = next((columns[key] for key in _ANSWERS if key in columns), None)
        answers = [given] if isinstance(given, str) else given
        if (
            not isinstance(answers, Sequence)
            or not answers
            or not all(isinstance(each, str) and each.strip() for each in answers)
        ):
            raise MessageLogError(
                f"metadata[{row}] must have a column 'answer' with a text, or "
                f"'answers' with several: got {given!r:.80}"
            )
        return tuple(answers)

    def check(self, given: Given[tuple[str, ...]]) -> Verdict:
        answer = last_tagged(given.response)
        if answer is None:
            lines = given.response.strip().splitlines()
            answer = lines[-1] if lines else ""
        score = self._score(answer, given.task)
        reason = "correct" if score == 1.0 else f"incorrect: it is {given.task[0]}"
        return Verdict(score, reason, answer.strip())


@register_env("retrieval")
class RetrievalEnvironment(ToolEnvironment):
    """Searches a corpus between turns, and scores the answer.

    A response with a search is answered by the best documents (BM25). Any other is the
    answer: the content of the last `<answer>` tag or, without one, the last line. Rows
    have a column `answer`, or `answers` (or `golden_answers`) with several.

    The metric `evidence_found` is the share of the documents named in the rows' column
    `evidence` that a search of the conversation returned.

    Args:
        config: The settings, or a mapping of them.

    Raises:
        ConfigError: The settings do not fit, the corpus cannot be read, or bm25s is
            not installed.
    """

    config_class = RetrievalConfig

    def __init__(
        self, config: RetrievalConfig | Mapping[str, Any] | None = None
    ) -> None:
        if not isinstance(config, RetrievalConfig):
            config = RetrievalConfig.from_dict(
                dict(config or {}), source="environment 'retrieval'"
            )
        self.config = config
        documents = (
            made_corpus(config.corpus_seed, config.num_people)
            if config.corpus is None
            else read_corpus(config.corpus)
        )
        self._index = Bm25Index(documents)
        parser: ToolCallParser = (
            _SearchTagParser() if config.call_format == "tags" else JsonToolCallParser()
        )
        self._answers = _AnswerJudge(config.credit)
        super().__init__(
            [Tool(self._search, "search")],
            self._answers,
            parser=parser,
            limits=ToolLimits(
                max_calls_per_turn=1,
                max_tool_turns=config.max_turns,
                # The index is not known to be safe for several threads.
                max_concurrency=1,
                call_deadline_s=_CALL_DEADLINE_S,
                # Room for titles and numbers; the documents have been cut already.
                max_result_chars=config.num_results * (config.max_document_chars + 200),
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config,)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[Any]
    ) -> EnvironmentReturn[Any]:
        """Run the search of each last response, or score it if it has none.

        Raises:
            MessageLogError: A conversation has no response, or a row no answer.
        """
        return super().step(message_log_batch, [_with_found(row) for row in metadata])

    def unusable_rows(self, metadata: Sequence[Any]) -> dict[int, str]:
        """Return the rows without an answer."""
        return self._answers.unusable_rows(
            [row if isinstance(row, Mapping) else {} for row in metadata]
        )

    def global_post_process_and_metrics(
        self, batch: MutableMapping[str, Any]
    ) -> tuple[MutableMapping[str, Any], dict[str, float]]:
        """Return the metrics of tools and judge, and `evidence_found`."""
        batch, metrics = super().global_post_process_and_metrics(batch)
        rows = [r for r in batch.get("metadata") or () if isinstance(r, Mapping)]
        shares = [
            len(set(row[_EVIDENCE]) & set(row[_FOUND])) / len(set(row[_EVIDENCE]))
            for row in rows
            if row.get(_EVIDENCE) and _FOUND in row
        ]
        if shares:
            metrics["evidence_found"] = sum(shares) / len(shares)
        return batch, metrics

    def _search(self, query: str, row: dict[str, Any]) -> str:
        """Search the documents for words.

        Args:
            query: The words.
            row: The columns of the conversation.
        """
        found = self._index.search(query, self.config.num_results)
        # Also those that are cut off below: the metric is about the search.
        row[_FOUND].extend(each.title for each in found)
        if not found:
            return "No document has any of these words."
        limit = self.config.max_document_chars
        return "\n".join(
            f"[{number}] {each.title}: "
            + (each.text if len(each.text) <= limit else f"{each.text[:limit]}...")
            for number, each in enumerate(found, start=1)
        )


def _with_found(columns: Any) -> Any:
    """Return columns with a list of titles of their own, which a search adds to."""
    if columns is None:
        return {_FOUND: []}
    if not isinstance(columns, Mapping):
        return columns
    return {**columns, _FOUND: list(columns.get(_FOUND, ()))}
