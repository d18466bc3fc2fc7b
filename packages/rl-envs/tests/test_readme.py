from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_the_programs_of_the_readme_run(index: int) -> None:
    exec(compile(PROGRAMS[index], f"README.md, program {index}", "exec"), {})
