"""Check the version ranges between the packages of this workspace.

uv takes the members of a workspace whatever their version, so a range broken by a
release goes unnoticed until a user installs it. This check finds it now.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def problems() -> list[str]:
    """Return a line for each range that its sibling's version does not satisfy."""
    projects = {}
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        projects[project["name"]] = project
    found = []
    for name, project in projects.items():
        extras = project.get("optional-dependencies", {}).values()
        lines = [
            *project["dependencies"],
            *(line for extra in extras for line in extra),
        ]
        for requirement in map(Requirement, lines):
            if requirement.name not in projects:
                continue
            version = projects[requirement.name]["version"]
            if len(requirement.specifier) < 2:
                found.append(f"{name}: {requirement} needs a lower and an upper bound")
            if not requirement.specifier.contains(version, prereleases=True):
                found.append(f"{name}: {requirement} excludes the present {version}")
    return found


if __name__ == "__main__":
    lines = problems()
    sys.stderr.writelines(f"bounds: {line}\n" for line in lines)
    sys.exit(1 if lines else 0)
