"""Questions about invented facts, which no model can know without searching."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_envs.errors import TaskError
from rl_envs.registry import register_task_source
from rl_envs.tasks import Task, TaskSource, check_range
from rl_envs.worlds.retrieval.corpus import Document

__all__ = ["RetrievalTasks", "made_corpus"]

_BEGINS = ("Bra", "Cor", "Del", "Fen", "Gar", "Hol", "Jun", "Kel", "Lor", "Mar", "Nor")
_MIDDLES = ("a", "be", "di", "go", "li", "mo", "na", "pe", "ri", "su", "ta", "vo")
_PERSON_ENDS = ("ck", "den", "lia", "mus", "nia", "ric", "sa", "ton", "vin", "wen")
_TOWN_ENDS = ("burg", "field", "ford", "ham", "mouth", "stead", "ville", "wick")
_COMPANY_ENDS = ("Brothers", "Company", "Industries", "Limited", "Works")
_RIVER_ENDS = ("bach", "brook", "flow", "run", "stream", "water")
_JOBS = (
    *("accountant", "baker", "carpenter", "chemist", "engineer", "gardener"),
    *("glazier", "lawyer", "nurse", "painter", "pilot", "printer", "surveyor"),
)
_PRODUCTS = (
    *("bicycles", "buttons", "candles", "clocks", "cranes", "cutlery", "lenses"),
    *("looms", "pencils", "pianos", "pumps", "ropes", "scales", "umbrellas"),
)
_PROMPTS = {
    "tags": "Answer the question. To search the documents, write <search>words"
    "</search>; the best ones follow. To answer, write <answer>...</answer>.\n",
    "tools": "Answer the question; search the documents before. Write the answer as "
    "<answer>...</answer>.\n",
}


@dataclass(frozen=True, slots=True)
class _Relation:
    """A fact of one kind about an entity."""

    of: str
    """Kind of the entity."""
    to: str
    """Kind of what it names; empty: no entity, but a word."""
    phrase: str
    """How what it names is described, `{}` being the entity."""
    question: str
    """How it is asked for."""


_RELATIONS: Mapping[str, _Relation] = {
    "born": _Relation(
        "person", "town", "the town where {} was born", "In which town was {} born?"
    ),
    "employer": _Relation(
        "person",
        "company",
        "the company where {} works",
        "At which company does {} work?",
    ),
    "job": _Relation("person", "", "", "What is the occupation of {}?"),
    "river": _Relation("town", "", "", "On which river does {} lie?"),
    "mayor": _Relation("town", "person", "the mayor of {}", "Who is the mayor of {}?"),
    "founder": _Relation(
        "company", "person", "the founder of {}", "Who is the founder of {}?"
    ),
    "seat": _Relation(
        "company",
        "town",
        "the town where {} has its seat",
        "Where does {} have its seat?",
    ),
    "product": _Relation("company", "", "", "What does {} make?"),
}
_SENTENCES = {
    "person": "{0} was born in {born}. {0} works at {employer} as a {job}.",
    "town": "{0} lies on the river {river}. The mayor of {0} is {mayor}.",
    "company": "{0} was founded by {founder}. It makes {product} and has its seat in "
    "{seat}.",
}


@dataclass(frozen=True, slots=True)
class _Facts:
    """An invented world."""

    kinds: Mapping[str, str]
    """Kind of each entity, by name."""
    facts: Mapping[tuple[str, str], str]
    """What a relation names, by entity and relation."""


@functools.lru_cache(maxsize=8)
def _made_facts(seed: int, num_people: int) -> _Facts:
    rng = random.Random(f"retrieval/{seed}/{num_people}")
    taken: set[str] = set()

    def name(ends: tuple[str, ...], gap: str = "") -> str:
        while True:
            begin = rng.choice(_BEGINS) + rng.choice(_MIDDLES) + rng.choice(_MIDDLES)
            found = f"{begin}{gap}{rng.choice(ends)}"
            if begin not in taken and found not in taken:
                # No two entities share a word that only names are made of.
                taken.update((begin, found))
                return found

    size = max(num_people // 2, 2)
    by_kind = {
        "person": [name(_PERSON_ENDS) for _ in range(num_people)],
        "town": [name(_TOWN_ENDS) for _ in range(size)],
        "company": [name(_COMPANY_ENDS, " ") for _ in range(size)],
    }
    words = {
        "job": lambda: rng.choice(_JOBS),
        "product": lambda: rng.choice(_PRODUCTS),
        "river": lambda: name(_RIVER_ENDS),
    }
    facts = {}
    for relation, about in _RELATIONS.items():
        for entity in by_kind[about.of]:
            facts[entity, relation] = (
                rng.choice(by_kind[about.to]) if about.to else words[relation]()
            )
    kinds = {entity: kind for kind, names in by_kind.items() for entity in names}
    return _Facts(kinds, facts)


def made_corpus(seed: int = 0, num_people: int = 50) -> list[Document]:
    """Return documents with invented facts, one about each person, town and company.

    Args:
        seed: Seed of the facts.
        num_people: Number of people; there are half as many towns, and companies.
    """
    made = _made_facts(seed, num_people)
    found = []
    for entity, kind in made.kinds.items():
        own = {
            name: made.facts[entity, name]
            for name, relation in _RELATIONS.items()
            if relation.of == kind
        }
        found.append(Document(entity, _SENTENCES[kind].format(entity, **own)))
    return found


@register_task_source("retrieval")
class RetrievalTasks(TaskSource):
    """Generates questions about invented facts, answered by one search or several.

    "Who is the founder of the company where Kelbesuton works?" takes two: a question of
    n hops needs n documents, whose titles are in the column `evidence`. The split
    depends on the last fact of the chain, which the question asks for: it is asked for
    either in training or in held-out tasks, however the question leads to it.

    Args:
        min_hops: Minimum number of documents that a question needs.
        max_hops: Maximum number, up to 4.
        corpus_seed: Seed of the facts; the environment must have the same.
        num_people: Number of people; the environment must have the same.
        style: `tags`: prompts explain `<search>`. `tools`: the chat template describes
            the tool (`call_format: json`).
        seed: Seed of the samples.
        held_out_fraction: Share of all facts that are held out.

    Raises:
        TaskError: A number is out of range, or the style is invalid.
    """

    def __init__(
        self,
        min_hops: int = 1,
        max_hops: int = 2,
        *,
        corpus_seed: int = 0,
        num_people: int = 50,
        style: str = "tags",
        seed: int = 0,
        held_out_fraction: float = 0.1,
    ) -> None:
        super().__init__("retrieval", seed=seed, held_out_fraction=held_out_fraction)
        if not 1 <= min_hops <= max_hops <= 4:
            raise TaskError(
                "min_hops and max_hops must be 1 to 4, in order: got "
                f"{min_hops} and {max_hops}"
            )
        check_range("num_people", num_people, 4, 500)
        if style not in _PROMPTS:
            raise TaskError(f"style must be 'tags' or 'tools': got {style!r}")
        self.hops, self._prompt = (min_hops, max_hops), _PROMPTS[style]
        self._made = _made_facts(corpus_seed, num_people)
        self._entities = list(self._made.kinds)

    def propose(self, rng: random.Random) -> Task:
        """Draw an entity and a chain of relations."""
        num_hops = rng.randint(*self.hops)
        entity = rng.choice(self._entities)
        described, evidence = entity, [entity]
        for _ in range(num_hops - 1):
            name, relation = self._drawn(entity, rng, ends=False)
            described = relation.phrase.format(described)
            entity = self._made.facts[entity, name]
            evidence.append(entity)
        name, relation = self._drawn(entity, rng, ends=True)
        metadata: dict[str, Any] = {
            "evidence": evidence,
            "fact": f"{entity}/{name}",
        }
        question = relation.question.format(described)
        return Task(self._prompt + question, self._made.facts[entity, name], metadata)

    def key(self, task: Task) -> str:
        """Return the fact asked for."""
        return str(task.metadata["fact"])

    def searcher(self, columns: Mapping[str, Any]) -> str:
        """Return the next response of a player who knows where to look.

        Args:
            columns: Metadata of the conversation, at first the row itself.
        """
        done = columns.get("num_tool_turns", 0)
        if done < len(columns["evidence"]):
            return f"<search>{columns['evidence'][done]}</search>"
        return f"<answer>{columns['answer']}</answer>"

    def _drawn(
        self, entity: str, rng: random.Random, *, ends: bool
    ) -> tuple[str, _Relation]:
        kind = self._made.kinds[entity]
        fitting = [
            (name, relation)
            for name, relation in _RELATIONS.items()
            if relation.of == kind and (ends or relation.to)
        ]
        return rng.choice(fitting)
