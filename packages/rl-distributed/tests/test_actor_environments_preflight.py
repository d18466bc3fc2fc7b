from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rl_distributed import ConfigError
from rl_distributed.actor_environments import (
    ContainerEnvironment,
    DriverEnvironment,
    InterpreterEnvironment,
)
from rl_distributed.actor_environments.preflight import check_python
from rl_distributed.actor_environments.uv_tool import Uv
from rl_distributed.errors import ActorEnvironmentError


def script(folder: Path, *lines: str) -> Path:
    path = folder / "python"
    path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    path.chmod(0o755)
    return path


def pretender(folder: Path, code: str) -> Path:
    """The driver's Python, which runs `code` before its actual program."""
    (folder / "pretend.py").write_text(
        f"import sys\n{code}\nsys.argv = sys.argv[1:]\nexec(sys.argv.pop(1))\n"
    )
    return script(folder, f'exec "{sys.executable}" "{folder}/pretend.py" "$@"')


def refuse(python: str | Path, match: str, **options) -> None:
    options = {"preflight_deadline_s": 60, **options}
    with pytest.raises(ActorEnvironmentError, match=match):
        InterpreterEnvironment(python, **options).prepare()


def test_the_drivers_own_interpreter_fits_and_is_asked_once():
    # Nothing else has requested exactly this.
    own = InterpreterEnvironment(sys.executable, imports=("json", "wave"))
    first, second = own.prepare(), own.prepare()
    assert first.runtime_env["py_executable"] == sys.executable
    assert first.runtime_env["env_vars"]["PYTHONPATH"] == ""
    assert first.preflight_s > 0
    assert second.preflight_s == 0.0
    assert own.prepare(recheck=True).preflight_s > 0


def test_command_line_and_path_with_spaces(tmp_path):
    command = f"/usr/bin/env {sys.executable}"
    prepared = InterpreterEnvironment(command).prepare()
    assert prepared.runtime_env["py_executable"] == command
    (tmp_path / "a b").mkdir()
    spaced = script(tmp_path / "a b", f'exec "{sys.executable}" "$@"')
    prepared = InterpreterEnvironment(spaced).prepare()
    assert prepared.runtime_env["py_executable"] == f"'{spaced}'"


def test_interpreter_that_is_missing_or_no_program(tmp_path):
    refuse(tmp_path / "none", "is no program on this machine")
    refuse(tmp_path, "is a folder")
    (tmp_path / "text").write_text("")
    refuse(tmp_path / "text", "is not executable")
    with pytest.raises(ConfigError, match="path of an interpreter"):
        InterpreterEnvironment("")


def test_program_that_is_no_python(tmp_path):
    python = script(tmp_path, "echo https://me:secret@host said no >&2", "exit 3")
    refuse(python, r"(?s)does not work as a Python.*exit code 3.*//\*\*\*@host said no")


def test_program_that_cannot_be_started(tmp_path):
    python = tmp_path / "python"
    python.write_bytes(b"\x7fELFnonsense")
    python.chmod(0o755)
    refuse(python, "does not work as a Python interpreter: it cannot be started")


def test_interpreter_that_hangs(tmp_path):
    python = script(tmp_path, "exec sleep 300")
    refuse(python, r"did not answer", preflight_deadline_s=0.5)


def test_wrong_python_version(tmp_path):
    code = "sys.version_info = (3, 9, 18, 'final', 0)"
    refuse(pretender(tmp_path, code), r"has Python 3\.9\.18 and the driver \d\.\d+")


def test_wrong_ray_version(tmp_path):
    code = "import types; m = types.ModuleType('ray'); m.__version__ = '2.1.0'\n"
    code += "sys.modules['ray'] = m"
    refuse(
        pretender(tmp_path, code),
        r"has Ray 2\.1\.0 and the driver \d[\d.]+: .*pip install ray==\d",
    )


def test_wrong_version_of_ours(tmp_path):
    code = "import rl_distributed; rl_distributed.__version__ = '0.0.1'"
    refuse(pretender(tmp_path, code), r"has rl-distributed 0\.0\.1 and the driver")


def test_environment_without_ray(tmp_path):
    python = Uv("empty", 60).create_venv(tmp_path / "empty")
    refuse(python, r"cannot import 'ray': ModuleNotFoundError.*pip install ray==")


def test_package_that_is_missing():
    refuse(
        sys.executable,
        r"cannot import 'no_such_module'.*add the package",
        imports=("no_such_module",),
    )


def test_package_that_does_not_import(tmp_path):
    (tmp_path / "broken_module.py").write_text("1 / 0\n")
    python = pretender(tmp_path, f"sys.path.insert(1, {str(tmp_path)!r})")
    refuse(
        python,
        "cannot import 'broken_module': ZeroDivisionError.*does not import",
        imports=("broken_module",),
    )


def test_import_that_hangs_is_named(tmp_path):
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(300)\n")
    # Modules imported before it take no time, however busy the machine is.
    code = f"import types; sys.path.insert(1, {str(tmp_path)!r})"
    for name in ("ray", "rl_distributed", "rl_distributed.workers.host"):
        code += f"\nsys.modules[{name!r}] = m = types.ModuleType({name!r})"
        code += f"\nm.__version__ = {version(name.partition('.')[0])!r}"
    python = pretender(tmp_path, code)
    for deadline_s in (2, 6, 18, 54):
        slow = InterpreterEnvironment(
            python, imports=("slow_module",), preflight_deadline_s=deadline_s
        )
        with pytest.raises(ActorEnvironmentError) as caught:
            slow.prepare()
        # If it has not got this far, the machine was busy.
        if "did not import 'slow_module' within" in str(caught.value):
            return
    raise AssertionError(str(caught.value))


def test_mended_interpreter_is_asked_again(tmp_path):
    python = script(tmp_path, "exit 1")
    refuse(python, "does not work")
    script(tmp_path, f'exec "{sys.executable}" "$@"')
    assert check_python([str(python)], (), 60, "mended") > 0


def test_driver_environment_checks_only_named_imports():
    assert DriverEnvironment().prepare().runtime_env == {}
    assert DriverEnvironment(imports=("json",)).prepare().runtime_env == {}
    with pytest.raises(ActorEnvironmentError, match="no_such_module"):
        DriverEnvironment(imports=("no_such_module",)).prepare()


def test_container_needs_podman_and_the_image(tmp_path, monkeypatch):
    # Podman itself is not run: this checks how its answers are parsed.
    monkeypatch.setenv("PATH", str(tmp_path))
    image = ContainerEnvironment("team/engine:1")
    with pytest.raises(ActorEnvironmentError, match="needs podman"):
        image.prepare()
    podman = script(tmp_path, "exit 1")
    podman = podman.rename(tmp_path / "podman")
    with pytest.raises(ActorEnvironmentError, match="podman pull team/engine:1"):
        image.prepare()
    podman.write_text(
        '#!/bin/sh\n[ "$1" = image ] && exit 0\n'
        'while [ "$1" != -c ]; do shift; done\n'
        f'exec "{sys.executable}" "$@"\n'
    )
    assert image.prepare().runtime_env == {"image_uri": "team/engine:1"}
    with pytest.raises(ConfigError, match="name of an image"):
        ContainerEnvironment("--privileged")
