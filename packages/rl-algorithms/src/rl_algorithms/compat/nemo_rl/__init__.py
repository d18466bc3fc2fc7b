"""Let `import nemo_rl...` find the names of this project.

```python
import rl_algorithms.compat.nemo_rl  # before the first import of nemo_rl
from nemo_rl.distributed.named_sharding import NamedSharding
```

`python -m rl_algorithms.compat.nemo_rl script.py` does the same for an unchanged
script. Each name issues one `DeprecationWarning` with its location in this project. A
missing name raises an error that names its replacement. `names.toml` is the map.

Python can import only one `nemo_rl`: if the real one is installed, importing this
module raises `ImportError` and changes nothing.
"""

from rl_algorithms.compat.nemo_rl.differences import DifferenceWarning
from rl_algorithms.compat.nemo_rl.finder import install, uninstall

__all__ = ["DifferenceWarning", "install", "uninstall"]

install()
