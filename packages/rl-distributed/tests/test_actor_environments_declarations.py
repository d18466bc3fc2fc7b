from __future__ import annotations

import dataclasses
import pickle
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import rl_distributed_sample_environments as sample

from rl_distributed import ActorEnvironment, ConfigError, RayWorkerBuilder
from rl_distributed.actor_environments import (
    ContainerEnvironment,
    DriverEnvironment,
    ExtraEnvironment,
    InstalledEnvironment,
    InterpreterEnvironment,
    OverlayEnvironment,
    UvWorkspaceEnvironment,
    declarations,
    declared_environment,
    extra,
    get_environment,
)
from rl_distributed.errors import ActorEnvironmentError, RegistryError
from rl_distributed.registry import Registry

OWN = OverlayEnvironment(("engine==1",))


class Plain:
    pass


class Declares:
    actor_environment = OWN


class Wrong:
    actor_environment = "engine==1"


@pytest.fixture
def registry(monkeypatch):
    made: Registry[ActorEnvironment] = Registry("rl.actor_environments", "environment")
    made._entry_points = {}
    monkeypatch.setattr(declarations, "environment_registry", made)
    monkeypatch.delenv("RL_ENV_CONFIG", raising=False)
    return made


@pytest.fixture
def user_file(tmp_path, monkeypatch):
    def write(text: str) -> Path:
        path = tmp_path / f"environments-{len(list(tmp_path.iterdir()))}.yaml"
        path.write_text(text)
        monkeypatch.setenv("RL_ENV_CONFIG", str(path))
        return path

    return write


# --- who says it -------------------------------------------------------------------


def test_without_a_declaration_it_is_the_drivers(registry):
    for cls in (Plain, "package.that.is.nowhere.Class"):
        found = declared_environment(cls)
        assert found.environment == DriverEnvironment()
        assert found.source == "default"


def test_attribute_of_the_class(registry):
    assert declared_environment(Declares).environment is OWN
    path = f"{Declares.__module__}.Declares"
    sys.modules.setdefault(Declares.__module__, sys.modules[__name__])
    assert declared_environment(path).source == "class"
    with pytest.raises(ConfigError, match=r"Wrong must declare an ActorEnvironment"):
        declared_environment(Wrong)


def test_entry_point_is_read_without_importing_the_class(registry):
    registry._entry_points = {
        name: [EntryPoint(name, value, "rl.actor_environments")]
        for name, value in {
            "heavy_package": "rl_distributed_sample_environments:DECLARED",
            "heavy_package.light": f"{DriverEnvironment.__module__}:DriverEnvironment",
            "heavy": "no_such_module:X",
        }.items()
    }
    found = declared_environment("heavy_package.engine.worker.Worker")
    assert (found.environment, found.source) == (sample.DECLARED, "entry point")
    assert "heavy_package" not in sys.modules
    # The class DriverEnvironment, not an instance of it.
    with pytest.raises(ConfigError, match=r"'heavy_package.light' .* must declare an"):
        declared_environment("heavy_package.light.Worker")
    assert declared_environment("heavy_package_2.Worker").source == "default"


def test_names_registered_in_code(registry):
    registry.register("heavy_package")(OWN)
    assert declared_environment("heavy_package.Worker").environment is OWN
    assert get_environment("heavy_package.Worker") is OWN
    assert get_environment("rl-models[vllm-cpu]").label == "rl-models[vllm-cpu]"
    with pytest.raises(RegistryError, match="did you mean 'heavy_package'"):
        get_environment("heavy_packge")


def test_the_user_wins_over_declarations_and_the_option_over_the_user(
    registry, user_file
):
    registry.register("package")(OWN)
    user_file("environments: {package.Worker: {python: /mine/bin/python}}")
    assert declared_environment("package.Other").environment is OWN
    found = declared_environment("package.Worker")
    assert found.environment == InterpreterEnvironment("/mine/bin/python")
    assert found.source == "user"
    builder = RayWorkerBuilder("package.Worker")
    assert builder.declaration() == found
    chosen = builder.with_options(environment=OWN).declaration()
    assert (chosen.environment, chosen.source) == (OWN, "option")
    given = builder.with_options(py_executable="/other/python").declaration()
    assert given.environment == InterpreterEnvironment("/other/python")
    with pytest.raises(ConfigError, match="exclude each other"):
        builder.with_options(py_executable="/other/python", environment=OWN)


# --- the user's file ---------------------------------------------------------------


def test_every_way_can_be_chosen(registry, user_file):
    user_file(
        "environments:\n"
        "  a: {driver: true}\n"
        "  b: {image: 'team/engine:1'}\n"
        "  c: {requirements: [engine==1], no_index: true, find_links: [/wheels]}\n"
        "  d: {overlay: [engine==1], imports: [engine]}\n"
    )
    assert get_environment("a") == DriverEnvironment()
    assert get_environment("b") == ContainerEnvironment("team/engine:1")
    assert get_environment("c") == InstalledEnvironment(
        ("engine==1",), find_links=("/wheels",), no_index=True
    )
    assert get_environment("d") == OverlayEnvironment(
        ("engine==1",), imports=("engine",)
    )


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("other: 1", "the one key 'environments'"),
        ("environments: {a: {pyhton: x}}", "environments.a must have exactly one of"),
        ("environments: {a: {python: x, image: y}}", "must have exactly one of"),
        ("environments: {a: {python: x, import: [y]}}", "did you mean 'imports'"),
        ("environments: {a: {requirements: engine}}", "must be a list of texts"),
        ("environments: {a: {image: 'b c'}}", "name of an image"),
    ],
)
def test_wrong_file_of_the_user(registry, user_file, text, match):
    user_file(text)
    with pytest.raises(ConfigError, match=match):
        declared_environment(Plain)


def test_file_of_the_user_that_is_missing(registry, monkeypatch, tmp_path):
    monkeypatch.setenv("RL_ENV_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="which is no file"):
        declared_environment(Plain)


# --- extras ------------------------------------------------------------------------


def test_extra_of_a_checkout_comes_from_its_lock(registry):
    wanted = ExtraEnvironment("rl-models", "vllm-cpu", imports=("vllm",))
    found = wanted.resolve()
    assert isinstance(found, UvWorkspaceEnvironment)
    assert (Path(found.workspace) / "uv.lock").is_file()
    assert found.imports == ("vllm",)
    assert found.label == wanted.label == "rl-models[vllm-cpu]"


def test_extra_of_an_installed_distribution(registry, monkeypatch):
    monkeypatch.setattr(extra, "workspace_of", lambda name: None)
    found = ExtraEnvironment("rl-models", "vllm-cpu", overrides=("triton",)).resolve()
    assert isinstance(found, InstalledEnvironment)
    assert found.requirements == ("rl-models[vllm-cpu]==0.1.0",)
    assert found.from_driver == ("rl-models",)
    assert found.overrides == ("triton",)


def test_extra_that_the_user_has_chosen_another_way_for(registry, user_file):
    user_file('environments: {"rl-models[vllm-cpu]": {python: /mine/bin/python}}')
    declared = ExtraEnvironment(
        "rl-models", "vllm-cpu", imports=("vllm",), preflight_deadline_s=90
    )
    assert declared.resolve() == InterpreterEnvironment(
        "/mine/bin/python", imports=("vllm",), preflight_deadline_s=90
    )


def test_extra_that_is_not_there(registry):
    with pytest.raises(ActorEnvironmentError, match="did you mean 'vllm-cpu'"):
        ExtraEnvironment("rl-models", "vlm-cpu").resolve()
    with pytest.raises(ActorEnvironmentError, match="pip install no-such-package"):
        ExtraEnvironment("no-such-package", "x").resolve()


# --- specifications ----------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        DriverEnvironment(),
        InterpreterEnvironment("/x"),
        ContainerEnvironment("x"),
        OWN,
        InstalledEnvironment(["engine"], find_links=["/x"]),
        UvWorkspaceEnvironment("rl-models", group="dev"),
        ExtraEnvironment("rl-models", "vllm-cpu"),
    ],
)
def test_specifications_are_small_values(environment):
    assert pickle.loads(pickle.dumps(environment)) == environment
    assert hash(environment) == hash(dataclasses.replace(environment))
    assert environment.label
    with pytest.raises(dataclasses.FrozenInstanceError):
        environment.imports = ()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: OverlayEnvironment(()), "must name a package: got none"),
        (lambda: OverlayEnvironment("engine"), "must be a list of texts"),
        (lambda: OverlayEnvironment(("",)), "non-empty lines"),
        (lambda: OverlayEnvironment(("-r other",)), "no options"),
        (lambda: OverlayEnvironment(("a",), no_index=True), "no source of packages"),
        (lambda: OverlayEnvironment(("a",), build_deadline_s=0), "must be positive"),
        (lambda: DriverEnvironment(preflight_deadline_s=-1), "must be positive"),
        (lambda: UvWorkspaceEnvironment(""), "distribution must be a name"),
    ],
)
def test_wrong_specifications(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


def test_keys_follow_the_content(tmp_path):
    wheels = tmp_path / "wheels"
    wheel = sample.write_wheel(wheels, "1.0")
    environment = sample.overlay(wheels)
    first = environment.key()
    assert first == sample.overlay(wheels).key()
    assert first.startswith("driver-isolation-sample-1.0-")
    assert sample.overlay(wheels, "2.0").key() != first
    full = InstalledEnvironment(
        environment.requirements, find_links=environment.find_links, no_index=True
    )
    assert full.key() != first
    wheel.write_bytes(wheel.read_bytes().replace(b"return 1", b"return 3"))
    sample.write_wheel(wheels, "3.0")
    assert environment.key() != first
    with pytest.raises(ActorEnvironmentError, match="which is no folder on this node"):
        sample.overlay(tmp_path / "none").key()


def test_key_of_a_workspace_follows_its_lock(tmp_path):
    (tmp_path / "member").mkdir()
    (tmp_path / "member" / "pyproject.toml").write_text("[project]\n")
    lock = tmp_path / "uv.lock"
    package = '[[package]]\nname = "member"\nsource = { editable = "member" }\n'
    lock.write_text(package)
    wanted = UvWorkspaceEnvironment("member", workspace=tmp_path)
    keys = {wanted.key()}
    lock.write_text(package + "# another\n")
    keys.add(wanted.key())
    (tmp_path / "member" / "pyproject.toml").write_text("[project]\nname='member'\n")
    keys.add(wanted.key())
    keys.add(UvWorkspaceEnvironment("member", "extra", workspace=tmp_path).key())
    assert len(keys) == 4
    lock.unlink()
    with pytest.raises(ActorEnvironmentError, match=r"there is no uv\.lock in"):
        wanted.key()
    with pytest.raises(ActorEnvironmentError, match="a checkout of ray"):
        UvWorkspaceEnvironment("ray").key()
