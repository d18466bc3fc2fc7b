"""Has the API pages show what a package gives out by a stub.

`lazy_loader` imports public names from `__init__.pyi`, and so does a type checker. For
griffe, which reads the sources for the pages, imported names are private.
"""

from typing import Any

import griffe


class PublicStubs(griffe.Extension):
    """Marks names that come from a stub as public."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Mark them in all modules of a package that has been read."""
        waiting = [pkg]
        while waiting:
            module = waiting.pop()
            for member in module.members.values():
                if member.is_alias and member.runtime is False:
                    member.public = True
                elif isinstance(member, griffe.Module):
                    waiting.append(member)
