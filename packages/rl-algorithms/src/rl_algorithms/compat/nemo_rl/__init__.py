"""Let `import nemo_rl...` find the names of this project.

```python
import rl_algorithms.compat.nemo_rl  # before the first import of nemo_rl
from nemo_rl.distributed.named_sharding import NamedSharding
```

`python -m rl_algorithms.compat.nemo_rl script.py` does the same for a script as it is.
Each name warns once with a `DeprecationWarning` that says where it is here. A name that
is not there raises an error that says what to use instead. `names.toml` is the map.

Python finds one `nemo_rl` only: where the real one is installed, importing this raises
`ImportError` and changes nothing.
"""

from rl_algorithms.compat.nemo_rl.differences import DifferenceWarning
from rl_algorithms.compat.nemo_rl.finder import install, uninstall

__all__ = ["DifferenceWarning", "install", "uninstall"]

install()
