"""`ExtraEnvironment`: one declaration for a checkout and for installed packages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from rl_distributed.actor_environments.base import (
    ActorEnvironment,
    PreparedEnvironment,
    as_texts,
    check_positive,
)
from rl_distributed.actor_environments.driver_wheel import normal_name
from rl_distributed.actor_environments.overrides import overridden
from rl_distributed.actor_environments.packages import InstalledEnvironment
from rl_distributed.actor_environments.workspace import (
    UvWorkspaceEnvironment,
    workspace_of,
)
from rl_distributed.errors import ActorEnvironmentError
from rl_distributed.suggestion import did_you_mean

__all__ = ["ExtraEnvironment"]


@dataclass(frozen=True)
class ExtraEnvironment(ActorEnvironment):
    """An extra of a distribution, in the way that fits how the driver has it.

    The first of these that holds is taken:

    1. what the user's `RL_ENV_CONFIG` says for `"distribution[extra]"`;
    2. the distribution comes from a checkout of a uv workspace:
       `UvWorkspaceEnvironment`, from its lock;
    3. it is installed: `InstalledEnvironment` of the same version of it.
    """

    distribution: str
    extra: str
    overrides: tuple[str, ...] = ()
    """Requirements that replace those of any package, where there is no lock that
    says so: `"torchvision; sys_platform == 'never'"`."""
    build_deadline_s: float = 1_800.0
    """How long building it may take."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "overrides", as_texts("overrides", self.overrides))
        check_positive("build_deadline_s", self.build_deadline_s)

    @property
    def label(self) -> str:
        """As pip writes it."""
        return f"{self.distribution}[{self.extra}]"

    def resolve(self) -> ActorEnvironment:
        """Return the way that is taken here.

        Raises:
            ActorEnvironmentError: the distribution is not installed, or has no such
                extra.
        """
        if (chosen := overridden(self.label)) is not None:
            # The modules that must be importable are the same, however it is made.
            return replace(
                chosen,
                imports=chosen.imports or self.imports,
                preflight_deadline_s=max(
                    chosen.preflight_deadline_s, self.preflight_deadline_s
                ),
            )
        _check_extra(self.distribution, self.extra)
        if (workspace := workspace_of(self.distribution)) is not None:
            return UvWorkspaceEnvironment(
                self.distribution,
                self.extra,
                workspace=workspace,
                imports=self.imports,
                preflight_deadline_s=self.preflight_deadline_s,
                build_deadline_s=self.build_deadline_s,
            )
        installed = distribution(self.distribution).version
        return InstalledEnvironment(
            (f"{self.label}=={installed}",),
            from_driver=(self.distribution,),
            overrides=self.overrides,
            imports=self.imports,
            preflight_deadline_s=self.preflight_deadline_s,
            build_deadline_s=self.build_deadline_s,
        )

    def prepare(
        self, root: Path | None = None, *, recheck: bool = False
    ) -> PreparedEnvironment:
        """Prepare the way that is taken here."""
        return self.resolve().prepare(root, recheck=recheck)


def _check_extra(name: str, extra: str) -> None:
    try:
        found: Distribution = distribution(name)
    except PackageNotFoundError:
        raise ActorEnvironmentError(
            f"environment '{name}[{extra}]': the driver has no distribution {name!r}, "
            f"so its version is unknown; run: pip install {name}"
        ) from None
    extras = found.metadata.get_all("Provides-Extra") or []
    if normal_name(extra) not in {normal_name(known) for known in extras}:
        raise ActorEnvironmentError(
            f"environment '{name}[{extra}]': {name} {found.version} has no extra "
            f"{extra!r}{did_you_mean(extra, extras)} (it has "
            f"{', '.join(extras) or 'none'})"
        )
