"""The world retrieval: search a corpus over several turns, then answer.

```
response --<search> or tool call--> index (BM25) --> passages, go on
    +-------neither--> the judge: exact match or F1 with the answers of the row
```
"""

from rl_envs.worlds.retrieval.corpus import Document, read_corpus
from rl_envs.worlds.retrieval.environment import RetrievalConfig, RetrievalEnvironment
from rl_envs.worlds.retrieval.tasks import RetrievalTasks

__all__ = [
    "Document",
    "RetrievalConfig",
    "RetrievalEnvironment",
    "RetrievalTasks",
    "read_corpus",
]
