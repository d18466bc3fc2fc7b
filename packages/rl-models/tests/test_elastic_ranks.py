"""The number of training ranks where not all bundles have a node."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rl_distributed.errors import WorkerStartError
from rl_models.config import PolicyConfig
from rl_models.policy import elastic_ranks
from rl_models.policy.elastic_ranks import ElasticRanks, most_ranks, with_ranks


def config(**parallelism: Any) -> PolicyConfig:
    return PolicyConfig.from_dict(
        {
            "model_name": "some/model",
            "backend": "dtensor",
            "max_total_sequence_length": 16,
            "parallelism": parallelism,
        }
    )


class TestMostRanks:
    def test_a_layout_takes_whole_copies_of_the_model(self) -> None:
        assert [most_ranks(config(), n) for n in range(4)] == [0, 1, 2, 3]
        found = [most_ranks(config(tensor=2, context=2), n) for n in (3, 4, 7, 8)]
        assert found == [0, 4, 4, 8]

    def test_the_number_of_copies_may_be_lower_than_asked_for(self) -> None:
        asked = config(tensor=2, data=4)
        assert most_ranks(asked, 5) == 4
        assert with_ranks(asked, 4).parallelism.data is None
        assert with_ranks(asked, 8) is asked


class TestBundles:
    @pytest.fixture
    def cluster(self) -> Any:
        return SimpleNamespace(name="train", world_size=lambda: 4)

    @pytest.fixture
    def placed(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        monkeypatch.setattr(elastic_ranks, "bundles_with_node", lambda _: list(found))
        monkeypatch.setattr(elastic_ranks, "raise_if_lost", lambda **_: None)
        return found

    def test_those_with_a_node_in_the_order_of_ranks(
        self, cluster: Any, placed: list[tuple[int, int]]
    ) -> None:
        placed += [(0, 0), (0, 1), (2, 0)]
        elastic = ElasticRanks(on_node_lost="shrink")
        assert elastic.bundles(cluster, config()) == placed
        # A rank without a partner would have a part of the model only.
        assert elastic.bundles(cluster, config(tensor=2)) == placed[:2]
        assert elastic.can_grow(cluster, config(), 2)
        assert not elastic.can_grow(cluster, config(tensor=2), 2)
        assert not elastic.can_grow(cluster, config(), 4)

    @pytest.mark.parametrize(
        ("elastic", "words"),
        [
            (ElasticRanks(deadline_s=0.1), "nodes for 3 of 4 ranks, and 4 are needed"),
            (ElasticRanks(on_node_lost="fail"), "on_node_lost=fail"),
            (
                ElasticRanks(on_node_lost="shrink", min_ranks=4, deadline_s=0.1),
                r"4 are needed \(on_node_lost=shrink, waited 0.1 s\)",
            ),
        ],
    )
    def test_too_few(
        self,
        cluster: Any,
        placed: list[tuple[int, int]],
        elastic: ElasticRanks,
        words: str,
    ) -> None:
        placed += [(0, 0), (0, 1), (2, 0)]
        with pytest.raises(WorkerStartError, match=words):
            elastic.bundles(cluster, config())

    def test_a_node_that_comes_ends_the_wait(
        self, cluster: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks = iter([[(0, 0)], [(0, 0), (1, 0), (2, 0), (3, 0)]])
        monkeypatch.setattr(elastic_ranks, "bundles_with_node", lambda _: next(looks))
        monkeypatch.setattr(elastic_ranks, "raise_if_lost", lambda **_: None)
        assert len(ElasticRanks().bundles(cluster, config())) == 4
